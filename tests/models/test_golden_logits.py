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


@pytest.mark.parametrize("activations", gm.ACTIVATIONS)
@pytest.mark.parametrize("name", gm.BLOCK_MODELS)
def test_a_cache_of_8_bits_stays_close(name, activations):
    """Beside the same activations with the cache that they have by default."""
    prompt, _ = golden(name)
    plain, blocks = gm.target(name, activations), gm.target(name, f"{activations}+q8_0")
    wanted = np.array(plain.forward(plain.new_state(), prompt, rows="all"))
    got = np.array(blocks.forward(blocks.new_state(), prompt, rows="all"))
    assert blocks.plan["cache"] == "q8_0" and blocks.plan["activations"] == activations
    limit = 0.025 if activations == "f32" else 0.05
    assert 0 < np.abs(got - wanted)[-64:].mean() <= limit * np.abs(wanted).mean()
    assert (got.argmax(-1) == wanted.argmax(-1))[-64:].sum() >= 60


def test_any_format_of_the_cache_may_be_asked_for():
    """float16 beside float32 activations, and float32 beside int8: what they round, and nothing else, differs."""
    name = "qwen35-tiny-F32"
    prompt, _ = golden(name)
    rows = {}
    for activations, cache in (("f32", "f16"), ("int8", "f32"), ("int8", "f16"), ("f32", "f32")):
        model = gm.target(name, f"{activations}+{cache}")
        assert model.plan["cache"] == {"f16": "float16", "f32": "float32"}[cache]
        rows[activations, cache] = np.array(model.forward(model.new_state(), prompt))
    for activations, default in (("int8", "f16"), ("f32", "f32")):
        model = gm.target(name, activations)
        gm.assert_same_bits(model.forward(model.new_state(), prompt), rows[activations, default])
        other = rows[activations, "f32" if default == "f16" else "f16"]
        assert 0 < np.abs(other - rows[activations, default]).max() < 0.05
