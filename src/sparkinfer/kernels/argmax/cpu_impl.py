"""CPU form of `argmax`: each chunk of the product that writes the logits looks at its own while they are in cache."""

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.compiled import Kernel, inner, job
from sparkinfer.backend.cpu import CpuRecorder, Job
from sparkinfer.backend.simd import (
    load,
    load_f32,
    load_i64,
    max_lanes,
    maximum,
    splat,
    store_f32,
    store_i64,
    sum_lanes,
)
from sparkinfer.kernels.linear.cpu_impl import linear_chunk, linear_job

_LOW, _ZERO = np.float32(-np.inf), np.float32(0.0)
_BLOCK = 1024  # numbers, a multiple of 16
_PART = 16  # bytes of what a chunk leaves for a row: its largest number, 0 or what is no number, the place
_CHUNKS = 16  # where there is no product to join


@inner
def _scan(source: int, first: int, last: int, part: int) -> None:
    """Of the numbers first .. last (one or more) at `source`: the largest, its first place, and 0 if all are finite."""
    peak, place, strange = _LOW, first, splat(_ZERO)
    for start in range(first, last, _BLOCK):
        top, end = splat(_LOW), min(start + _BLOCK, last)
        for i in range(start, end - 15, 16):
            value = load(source + 4 * i)
            top = maximum(value, top)
            strange = strange + (value - value)
        best = max_lanes(top)
        for i in range(end - (end - start) % 16, end):
            number = load_f32(source + 4 * i)
            best = max(best, number)
            strange = strange + splat(number - number)
        if best > peak:
            peak, place = best, start
    while place < last - 1 and load_f32(source + 4 * place) != peak:
        place += 1
    store_f32(part, peak)
    store_f32(part + 4, sum_lanes(strange))
    store_i64(part + 8, place)


@job
def piece_job(args: int, chunk: int, thread: int) -> None:
    """A chunk of the product, if there is one, and its largest logit in every row."""
    product, logits, stride = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    rows, n_vocab, parts = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    units, chunks, wide = load_i64(args + 48), load_i64(args + 56), load_i64(args + 64)
    if product != 0:
        linear_chunk(product, chunk, thread)
    first = units * chunk // chunks * wide
    last = min(units * (chunk + 1) // chunks * wide, n_vocab)
    for row in range(rows):
        part = parts + (row * chunks + chunk) * _PART
        if first < last:
            _scan(logits + row * stride, first, last, part)
        else:
            store_f32(part, _LOW)
            store_f32(part + 4, _ZERO)
            store_i64(part + 8, n_vocab - 1)


@job
def merge_job(args: int, chunk: int, thread: int) -> None:
    """The largest of one row."""
    parts, chunks = load_i64(args) + chunk * load_i64(args + 8) * _PART, load_i64(args + 8)
    out = load_i64(args + 16) + chunk * load_i64(args + 24)
    peak, place, strange = load_f32(parts), load_i64(parts + 8), load_f32(parts + 4)
    for index in range(1, chunks):
        part = parts + index * _PART
        value = load_f32(part)
        strange += load_f32(part + 4)
        if value > peak:
            peak, place = value, load_i64(part + 8)
    store_i64(out, place)
    store_i64(out + 8, 1 if strange == _ZERO else 0)


def record(recorder: CpuRecorder, logits: Buffer, out: Buffer, n_vocab: int) -> None:
    recorder.also(_KERNEL)
    rows, product = recorder.rows, recorder.take_phase(linear_job, 6, logits.address)
    if product is None:
        units, chunks, wide, address = -(-n_vocab // 16), _CHUNKS, 16, 0
    else:
        units, chunks, wide = product.args[8], product.chunks, product.args[14]
        address = recorder.words(product.args)
    parts = recorder.pin(np.zeros(rows * chunks * _PART // 8, np.int64))
    args = (address, logits.address, logits.stride, rows, n_vocab, parts, units, chunks, wide)
    recorder.phase([Job(piece_job, args, chunks)])
    recorder.phase([Job(merge_job, (parts, chunks, out.address, out.stride), rows)])


def _largest(source: int, count: int, out: int) -> None:
    """A part for all `count` numbers at `source`, to `out`."""
    _scan(source, 0, count, out)


_KERNEL = Kernel(_largest, 3)


@functools.cache
def _native() -> Callable[..., None]:
    return _KERNEL.native(3)


def largest(row: NDArray[np.float32]) -> tuple[int, bool]:
    """The id of the largest of a row (the lowest id on a tie) and whether all are finite: only then the id counts."""
    out = np.empty(2, np.int64)
    _native()(row.ctypes.data, len(row), out.ctypes.data)
    return int(out[1]), bool(out.view(np.float32)[1] == 0.0)
