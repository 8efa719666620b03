"""Whole targets on the CUDA backend (on a GPU, or under Triton's interpreter): logits, row exactness, commits.

The interpreter is slow, so without a GPU only the smallest cases run; `make check-gpu` runs them all.
"""

import atexit
import functools

import golden_models as gm
import gpu_machine
import numpy as np
import pytest

from sparkinfer.models import Target, load_target

ON_GPU = gpu_machine.DEVICE == "cuda"
MODELS = gm.MODELS if ON_GPU else ("qwen3-tiny-Q8_0", "qwen35moe-tiny256-Q4_K_M")
WIDTHS = range(1, 17) if ON_GPU else (2, 5)
EDGES = gm.EDGES if ON_GPU else (0, 17)


@functools.cache
def target(name: str, activations: str = "int8") -> Target:
    backend = gpu_machine.CudaBackend(gpu_machine.DEVICE, wide_cache=activations == "f32")
    loaded = load_target(
        gm.FOLDER / f"{name}.gguf", context=gm.CONTEXT, activations=activations, backend=backend
    )
    atexit.register(loaded.close)
    return loaded


@functools.cache
def single_rows(name: str, count: int) -> np.ndarray:
    """Logits of rows that were computed one at a time."""
    model = target(name)
    state = model.new_state()
    rows = [np.array(model.forward(state, [token])[0]) for token in gm.tokens(count)]
    return np.stack(rows)


def prefilled(model: Target, tokens: list[int]):
    """A state after `tokens`, computed one row at a time, as decoding does."""
    state = model.new_state()
    for token in tokens:
        model.forward(state, [token])
    return state


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_cpu(name):
    """Both quantise activations to int8; only the order of float additions differs."""
    count = 24 if ON_GPU else 6
    theirs = gm.single_rows(name, "int8", count)[:count]
    ours = single_rows(name, count)
    assert np.abs(ours - theirs).max() < 0.02 * np.abs(theirs).max()


@pytest.mark.parametrize("name", MODELS)
def test_a_window_has_the_bits_of_single_rows(name):
    model, longest = target(name), EDGES[-1] + max(WIDTHS)
    alone, tokens = single_rows(name, longest), gm.tokens(longest)
    for edge in EDGES:
        state = prefilled(model, tokens[:edge])
        for width in WIDTHS:
            rows = model.forward(state, tokens[edge : edge + width], rows="all", verify=True)
            gm.assert_same_bits(
                np.array(rows), alone[edge : edge + width], f"{width} rows after {edge}"
            )


@pytest.mark.parametrize("name", MODELS)
def test_a_commit_leaves_the_state_of_single_rows(name):
    model, tokens = target(name), gm.tokens(12)
    for width, kept in ((4, 1), (4, 3), (5, 5)) if ON_GPU else ((4, 3),):
        state = prefilled(model, tokens[:3])
        model.forward(state, tokens[3 : 3 + width], rows="all", verify=True)
        state.commit(kept)
        after = np.array(model.forward(state, [tokens[3 + kept]])[0])
        gm.assert_same_bits(after, single_rows(name, 12)[3 + kept], f"{kept} of {width}")


@pytest.mark.parametrize("name", MODELS)
def test_a_prefill_is_close_to_single_rows(name):
    """Many rows run on other kernels: near, not equal; and twice the same."""
    count = 150 if ON_GPU else 18
    model, tokens = target(name), gm.tokens(count)
    first = np.array(model.prefill(model.new_state(), tokens))
    again = np.array(model.prefill(model.new_state(), tokens))
    gm.assert_same_bits(first, again, "twice")
    wanted = single_rows(name, count)[-1]
    assert np.abs(first - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("name", MODELS)
def test_the_largest_logit_is_known_without_the_row(name):
    model = target(name)
    rows = model.forward(model.new_state(), gm.tokens(3), rows="all", verify=True)
    for row in rows:
        assert row.finite and row.best == int(np.asarray(row).argmax())
