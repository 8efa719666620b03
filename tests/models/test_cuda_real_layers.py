"""A few layers in the shapes and formats of real models on a GPU: exact windows, commits, repeats. Only on a GPU.

REAL_SHAPES=small tries these tests under the interpreter, with other numbers.
"""

import functools
import hashlib
import os
import tempfile
from pathlib import Path

import golden_models as gm
import gpu_machine
import numpy as np
import pytest
import real_models
from state_bits import state_bits

from sparkinfer.models import Target, load_target

TRIED = os.environ.get("REAL_SHAPES")
pytestmark = pytest.mark.skipif(
    gpu_machine.DEVICE != "cuda" and not TRIED, reason="needs an NVIDIA GPU"
)
every_model = pytest.mark.parametrize("name", TRIED.split() if TRIED else ["35B-A3B", "9B"])
WIDTHS = range(1, 17) if not TRIED else (1, 3, 16)
# Before, on and after edges of chunks (64), of splits of the keys (256) and where attention takes its other ways.
EDGES = (0, 1, 63, 240, 257, 1023, 8200, 32700) if not TRIED else (0, 17)
CONTEXT = 33_000 if not TRIED else 64
RUNS = 40 if not TRIED else 2


@functools.cache
def file(name: str) -> Path:
    folder = tempfile.TemporaryDirectory(prefix="real_layers_")
    _folders.append(folder)
    return real_models.write_model(name, Path(folder.name))


_folders: list[tempfile.TemporaryDirectory[str]] = []  # they live as long as the process


@functools.cache
def target(name: str) -> Target:
    backend = gpu_machine.CudaBackend(gpu_machine.DEVICE)
    model = load_target(file(name), context=CONTEXT, backend=backend)
    model.set_taps(range(model.config.n_layers))
    return model


def tokens(name: str, count: int) -> list[int]:
    return gm.tokens(count, real_models.SHAPES[name].vocabulary)


def rows_of(model: Target, result, count: int) -> list[np.ndarray]:
    """The stream after each layer, which tells where a difference began, and the logits."""
    parts = np.split(gm.on_host(model.tapped(count)), model.config.n_layers, axis=1)
    return [*parts, np.array(result)]


def single_rows(model: Target, state, part: list[int]) -> list[np.ndarray]:
    """The same of rows that run one at a time; `state` advances."""
    found = [rows_of(model, model.forward(state, [token], rows="all"), 1) for token in part]
    return [np.concatenate(rows) for rows in zip(*found, strict=True)]


@every_model
def test_a_window_has_the_bits_of_single_rows(name):
    model = target(name)
    text = tokens(name, EDGES[-1] + max(WIDTHS))
    for edge in EDGES:
        state, part = model.new_state(), text[edge : edge + max(WIDTHS)]
        if edge:
            model.prefill(state, text[:edge])
        windows = []
        for width in WIDTHS:
            result = model.forward(state, part[:width], rows="all", verify=True)
            windows.append(rows_of(model, result, width))
        alone = single_rows(model, state, part)
        for width, window in zip(WIDTHS, windows, strict=True):
            for place, (got, wanted) in enumerate(zip(window, alone, strict=True)):
                what = "logits" if place == model.config.n_layers else f"layer {place}"
                gm.assert_same_bits(got, wanted[:width], f"{what}, {width} rows after {edge}")


@every_model
def test_a_commit_leaves_the_state_of_single_rows(name):
    model = target(name)
    text = tokens(name, 64)
    for width, kept in ((2, 1), (6, 3), (6, 6), (16, 11)):
        state, single = model.new_state(), model.new_state()
        for each in (state, single):
            model.prefill(each, text[:7])
        model.forward(state, text[7 : 7 + width], rows="all", verify=True)
        state.commit(kept)
        single_rows(model, single, text[7 : 7 + kept])
        assert state_bits(model, state) == state_bits(model, single), (width, kept)
        token = [text[7 + kept]]
        after = [np.array(model.forward(each, token)) for each in (state, single)]
        gm.assert_same_bits(*after, f"the row after {kept} of {width}")


@every_model
def test_rows_are_near_those_of_the_cpu_and_of_a_prefill(name):
    """The median row is within 1 %: only the order of additions differs. Where two experts weigh nearly the same the
    choice may, which changes a row by what the last of them weighs. A prefill rounds inputs to float16 instead of int8.
    """
    model, count = target(name), 12
    alone = single_rows(model, model.new_state(), tokens(name, 48))[-1]
    other = load_target(file(name), context=64, device="cpu", threads=2)
    try:
        theirs = np.array(other.forward(other.new_state(), tokens(name, count), rows="all"))
    finally:
        other.close()
    errors = np.linalg.norm(alone[:count] - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    assert np.median(errors) < 0.01 and errors.max() < 0.3, errors
    state = model.new_state()
    rows = np.array(model.forward(state, tokens(name, 48), rows="all"))
    errors = np.linalg.norm(rows - alone, axis=1) / np.linalg.norm(alone, axis=1)
    assert np.median(errors) < 0.05 and errors.max() < 0.4, errors


@every_model
def test_runs_repeat_bit_for_bit(name):
    model, text = target(name), tokens(name, 200)

    def run() -> str:
        state, digest = model.new_state(), hashlib.sha256()
        digest.update(np.array(model.prefill(state, text[:150])).tobytes())
        for width, kept in ((6, 4), (1, 1), (16, 16), (3, 1)):
            window = text[state.length : state.length + width]
            for part in rows_of(
                model, model.forward(state, window, rows="all", verify=width > 1), width
            ):
                digest.update(part.tobytes())
            if width > 1:
                state.commit(kept)
        for part in state_bits(model, state):
            digest.update(part)
        return digest.hexdigest()

    assert len({run() for _ in range(RUNS)}) == 1
