"""CPU form: the largest number of a row that the host reads, and whether all are finite, in one pass."""

import functools
from collections.abc import Callable

import numpy as np
from numba import types
from numpy.typing import NDArray

from sparkinfer.backend.compiled import Kernel
from sparkinfer.backend.simd import (
    load,
    load_f32,
    max_lanes,
    maximum,
    splat,
    store_i64,
    sum_lanes,
)

_LOW, _ZERO = np.float32(-np.inf), np.float32(0.0)
_BLOCK = 1024  # numbers, a multiple of 16


def _largest(source: int, count: int, out: int) -> None:
    """The first id of the largest of `count` float32 at `source` and 1 if all are finite, two int64 at `out`."""
    peak, place, strange = _LOW, 0, splat(_ZERO)
    for start in range(0, count, _BLOCK):
        top, end = splat(_LOW), min(start + _BLOCK, count)
        for i in range(start, end - 15, 16):
            value = load(source + 4 * i)
            top = maximum(value, top)
            strange = strange + (value - value)  # 0, or no number
        best = max_lanes(top)
        for i in range(end - (end - start) % 16, end):
            value = load_f32(source + 4 * i)
            best = max(best, value)
            strange = strange + splat(value - value)
        if best > peak:
            peak, place = best, start
    while place < count - 1 and load_f32(source + 4 * place) != peak:
        place += 1
    store_i64(out, place)
    store_i64(out + 8, 1 if sum_lanes(strange) == _ZERO else 0)


_KERNEL = Kernel(_largest, types.void(types.int64, types.int64, types.int64))


@functools.cache
def _native() -> Callable[..., None]:
    return _KERNEL.native(3)


def largest(row: NDArray[np.float32]) -> tuple[int, bool]:
    """The id of the largest of a row (the lowest id on a tie) and whether all are finite: only then the id counts."""
    out = np.empty(2, np.int64)
    _native()(row.ctypes.data, len(row), out.ctypes.data)
    place, finite = out.tolist()
    return place, finite == 1
