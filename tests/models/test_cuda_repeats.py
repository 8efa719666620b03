"""A GPU gives the same bits every time: many runs of one prompt, plain and in windows. Only on a GPU."""

import hashlib

import golden_models as gm
import gpu_machine
import numpy as np
import pytest
from state_bits import state_bits

from sparkinfer.models import load_target

pytestmark = pytest.mark.skipif(gpu_machine.DEVICE != "cuda", reason="needs an NVIDIA GPU")
RUNS = 40


def run(model, prompt, width):
    """Digest of every row of logits and of the state after a prefill and some windows with commits."""
    state, digest = model.new_state(), hashlib.sha256()
    digest.update(np.asarray(model.prefill(state, prompt)).tobytes())
    tokens = gm.tokens(40, seed=9)
    for start in range(0, len(tokens) - width, width):
        rows = model.forward(state, tokens[start : start + width], rows="all", verify=width > 1)
        digest.update(np.asarray(rows).tobytes())
        if width > 1:
            state.commit(max(1, width - 1))
    for part in state_bits(model, state):
        digest.update(part)
    return digest.hexdigest()


@pytest.mark.parametrize("width", [1, 4, 7])
@pytest.mark.parametrize("name", gm.MODELS)
def test_runs_repeat_bit_for_bit(name, width):
    model = load_target(gm.FOLDER / f"{name}.gguf", context=gm.CONTEXT, device="cuda")
    try:
        assert len({run(model, gm.tokens(100), width) for _ in range(RUNS)}) == 1
    finally:
        model.close()
