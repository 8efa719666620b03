"""Whole targets on the CUDA backend: logits, row exactness, commits, prefill.

Without a GPU one model lives a short life under Triton's interpreter, which is slow; `make check-gpu` runs the rest.
"""

import atexit
import functools
from typing import Literal

import golden_models as gm
import gpu_machine
import numpy as np
import pytest

from sparkinfer.models import Target, load_target

gpu_only = pytest.mark.skipif(gpu_machine.DEVICE != "cuda", reason="needs an NVIDIA GPU")
every_model = pytest.mark.parametrize("name", gm.MODELS)
WIDTHS = range(1, 17)


@functools.cache
def target(name: str) -> Target:
    backend = gpu_machine.CudaBackend(gpu_machine.DEVICE)
    loaded = load_target(gm.FOLDER / f"{name}.gguf", context=gm.CONTEXT, backend=backend)
    atexit.register(loaded.close)
    return loaded


@functools.cache
def cpu_rows(name: str, count: int, activations: Literal["int8", "f32"] = "int8") -> np.ndarray:
    """The CPU's logits of the first tokens."""
    model = load_target(
        gm.FOLDER / f"{name}.gguf", context=gm.CONTEXT, device="cpu", activations=activations
    )
    try:
        return np.array(model.forward(model.new_state(), gm.tokens(count), rows="all"))
    finally:
        model.close()


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


def assert_near(ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> None:
    assert np.abs(ours - theirs).max() < tolerance * np.abs(theirs).max()


@pytest.mark.timeout(600)
def test_a_short_life_of_a_hybrid():
    """Plain rows are the CPU's up to the order of additions; a window has their bits, and so has what follows it."""
    name, tokens = "qwen35moe-tiny-F32", gm.tokens(3)
    model, alone = target(name), single_rows(name, 3)
    assert_near(alone, cpu_rows(name, 3), 1e-4)
    state = model.new_state()
    rows = model.forward(state, tokens[:2], rows="all", verify=True)
    gm.assert_same_bits(np.array(rows), alone[:2], "a window of 2")
    assert [row.best for row in rows] == [int(row.argmax()) for row in alone[:2]]
    assert all(row.finite for row in rows)
    state.commit(2)
    after = np.array(model.forward(state, tokens[2:])[0])
    gm.assert_same_bits(after, alone[2], "the row after the commit")


@gpu_only
@every_model
def test_logits_are_those_of_the_cpu(name):
    """Both quantise activations to int8; only the order of float additions differs."""
    assert_near(single_rows(name, 24), cpu_rows(name, 24), 0.02)


@gpu_only
@every_model
def test_a_window_has_the_bits_of_single_rows(name):
    model, longest = target(name), gm.EDGES[-1] + max(WIDTHS)
    alone, tokens = single_rows(name, longest), gm.tokens(longest)
    for edge in gm.EDGES:
        state = prefilled(model, tokens[:edge])
        for width in WIDTHS:
            rows = model.forward(state, tokens[edge : edge + width], rows="all", verify=True)
            gm.assert_same_bits(
                np.array(rows), alone[edge : edge + width], f"{width} rows after {edge}"
            )


@gpu_only
@every_model
def test_a_commit_leaves_the_state_of_single_rows(name):
    model, tokens = target(name), gm.tokens(24)
    for width, kept in ((4, 1), (4, 3), (5, 5), (16, 9)):
        state = prefilled(model, tokens[:3])
        model.forward(state, tokens[3 : 3 + width], rows="all", verify=True)
        state.commit(kept)
        after = np.array(model.forward(state, [tokens[3 + kept]])[0])
        gm.assert_same_bits(after, single_rows(name, 24)[3 + kept], f"{kept} of {width}")


def errors(rows: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Of each row, relative to its size."""
    return np.linalg.norm(rows - exact, axis=1) / np.linalg.norm(exact, axis=1)


FLOAT16 = 3e-3  # what float16 keys, values, queries and inputs of products may do to a row


@gpu_only
@every_model
def test_a_prefill_is_as_near_the_exact_rows_as_single_rows_are(name):
    """Many rows run on other kernels, which round to float16 where single rows round to int8: they are not equal, but
    by the distance from rows computed in float32 they are no worse. A prompt's last rows, up to 15, are such single
    rows over the prefill's cache: they are as far off as some single row is. A prefill gives the same bits twice.
    """
    model, exact = target(name), cpu_rows(name, 150, "f32")
    single = errors(single_rows(name, 150), exact)
    wide = np.array(model.forward(model.new_state(), gm.tokens(128), rows="all"))
    found = errors(wide, exact[:128])
    assert np.median(found) < np.median(single) + FLOAT16, (np.median(found), np.median(single))
    for count in (33, 48, 150):
        first = np.array(model.prefill(model.new_state(), gm.tokens(count)))
        again = np.array(model.prefill(model.new_state(), gm.tokens(count)))
        gm.assert_same_bits(first, again, "twice")
        [last] = errors(first[None], exact[count - 1 : count])
        assert last < single.max() + FLOAT16, (count, last, single.max())
