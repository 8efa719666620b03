"""The six golden models as loaded targets, and bit-for-bit comparison."""

import atexit
import functools
import os
from collections.abc import Sequence as Ids
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkinfer.models import Target, load_target
from sparkinfer.state import Sequence

FOLDER = Path(__file__).parent / "data" / "golden"
MODELS = (
    "llama-tiny-F32",
    "qwen3-tiny-Q8_0",
    "qwen35-tiny-F32",
    "qwen35-tiny256-Q4_K_M",
    "qwen35moe-tiny-F32",
    "qwen35moe-tiny256-Q4_K_M",
)
ACTIVATIONS: tuple[Literal["int8", "f32"], ...] = ("int8", "f32")
# .. and with the cache's format behind a plus: heads of llama-tiny have 16 values, too few for its blocks
BLOCK_CACHE = "int8+q8_0"
BLOCK_MODELS = MODELS[1:]
CONTEXT = 640
DEVICE = os.environ.get(
    "GOLDEN_DEVICE", "cpu"
)  # `make check-gpu` says cuda; "interpreter" is its kernels without a GPU
# Tile of 16 positions, chunk of 64 rows, split of 256 positions: one before, on and after each edge.
EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 240, 255, 256, 257, 500, 511, 512, 513)


def target(
    name: str,
    activations: str = "int8",
    threads: int = 2,
    isa: str = "auto",
    context: int = CONTEXT,
    *,
    any_split: bool = False,
) -> Target:
    """A loaded golden model; the same object for the same arguments. `activations` as above.

    `any_split`: on a device too a prompt's bits do not depend on the runs it is split into, as they do not on the CPU.
    There runs of more than 16 rows have kernels of their own, so prompts then go by 16 rows at most.
    """
    return _target(name, activations, threads, isa, context, any_split and DEVICE != "cpu")


@functools.cache
def _target(
    name: str, activations: str, threads: int, isa: str, context: int, short_runs: bool
) -> Target:
    activations, _, kv_cache = activations.partition("+")
    backend = None if DEVICE == "cpu" else device_backend(short_runs)
    if backend is not None and kv_cache and kv_cache not in backend.cache_formats:
        pytest.skip(f"this device has no cache of {kv_cache}")
    loaded = load_target(
        FOLDER / f"{name}.gguf",
        context=context,
        threads=threads,
        activations=activations,  # type: ignore[arg-type]
        kv_cache=kv_cache or None,  # type: ignore[arg-type]
        isa=isa,
        device="cpu" if DEVICE == "cpu" else None,
        backend=backend,
    )
    atexit.register(loaded.close)
    return loaded


def device_backend(short_runs: bool) -> Any:
    from sparkinfer.backend.cuda import EXACT_ROWS, CudaBackend

    device = "cpu" if DEVICE == "interpreter" else DEVICE
    backend = CudaBackend(device)
    if short_runs:
        backend.chunk = EXACT_ROWS
    return backend


def on_host(array: Any) -> NDArray[np.float32]:
    """Numbers of a target's memory: features, logits that stay on a device."""
    return np.array(array.cpu().numpy() if hasattr(array, "cpu") else array)


@functools.cache
def tokens(count: int, vocabulary: int = 320, seed: int = 1) -> list[int]:
    """The same random tokens every time."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocabulary, count)]


@functools.cache
def single_rows(name: str, activations: str, count: int) -> NDArray[np.float32]:
    """Logits [count, n_vocab] of `tokens(count)` run one row at a time: what every other way must equal."""
    model = target(name, activations)
    state = model.new_state()
    return np.stack([model.forward(state, [t])[0].copy() for t in tokens(count)])


def state_at(model: Target, history: Ids[int]) -> Sequence:
    """A state that has seen `history`."""
    state = model.new_state()
    if history:
        model.forward(state, history, rows="none")
    return state


def assert_same_bits(got: NDArray[np.float32], wanted: NDArray[np.float32], what: str = "") -> None:
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    same = got.view(np.uint32) == wanted.view(np.uint32)
    if not same.all():
        rows = np.unique(np.nonzero(~same)[0])
        worst = np.abs(got - wanted).max()
        raise AssertionError(f"{what}: rows {rows.tolist()} differ, by {worst:.3g} at most")
