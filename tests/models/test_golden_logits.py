"""Logits against an independent implementation's (tests/data/golden/README.md says which, and how close is close)."""

import golden_models as gm
import numpy as np
import pytest


def golden(name):
    data = np.load(gm.FOLDER / f"{name}.npz")
    return data["tokens"].tolist(), data["logits"]


@pytest.mark.parametrize("name", gm.MODELS)
def test_float32_logits_are_within_1e_4(name):
    prompt, wanted = golden(name)
    model = gm.target(name, "f32")
    got = model.forward(model.new_state(), prompt, rows="all")
    assert np.abs(got - wanted).max() <= 1e-4


@pytest.mark.parametrize("name", gm.MODELS)
def test_int8_activations_stay_close(name):
    """The last 64 positions, as the README measures; without quantised weights only the float16 cache rounds."""
    prompt, wanted = golden(name)
    model = gm.target(name)
    got = model.forward(model.new_state(), prompt, rows="all")
    difference = np.abs(got - wanted)[-64:]
    agreed = (got.argmax(-1) == wanted.argmax(-1))[-64:].sum()
    quantised = any(kind not in ("F32", "F16", "BF16") for kind in model.plan["weight_bytes"])
    assert difference.mean() <= (0.1 if quantised else 0.003)
    assert agreed >= (60 if quantised else 64)
