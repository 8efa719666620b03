"""A coarse copy of a head, four bits a weight, and of each output a rigorous bound of what it is off by.

Notation: w is an output's exact row, x an activation as the exact product reads it (the value of its int8 blocks). Both
are taken in another order of dimensions: first `LEAD` in which x is large (those of largest norm weights, and where the
weights themselves are largest), then the others by the size of what u leaves of the weights, so that those of a block
are alike. Then

    w = a u + c + e     u: one direction for all outputs, which half of an embedding's energy may lie in
                        c: blocks of 64 of four bits, the first block twice (the second time what the first left)
    x = y + d           y: the reordered x in int8 blocks of its own
    w.x = a (u.x) + c.y + c.d + e.x

and |c.d + e.x| is at most the sum over blocks b of |c_b| |d_b| + |e_b| |x_b|. With any positive shares p_b and r_b that
is at most sqrt(sum |e_b|^2 / p_b + |c_b|^2 / r_b) of the output times sqrt(sum p_b |x_b|^2 + r_b |d_b|^2) of the
activation (Cauchy and Schwarz): one number each. The rounding of all sums is covered by `_rounding`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend.base import Arena, aligned
from sparkinfer.backend.compiled import Kernel, inner
from sparkinfer.backend.simd import (
    fma,
    load,
    load_f32,
    load_half,
    load_i64,
    maximum,
    splat,
    store,
    store_bytes,
    store_f32,
    store_half,
    store_i64,
    where_above,
)
from sparkinfer.kernels.screen.cpu_tiles import COLUMNS, scale_and_code_bytes

F32, U8 = NDArray[np.float32], NDArray[np.uint8]
Rows = Callable[[int, int], F32]

BLOCK = COLUMNS
LEAD = BLOCK  # dimensions that get twice the bits
_WIDEST = 8  # of them, whose weights are the largest; the others have the largest norm weights
_LEADING = 3.0  # size of x in the lead over that of its norm weights, relative to other dimensions
LARGEST = 1e15  # norms of rows and activations beyond this, or below 1 / LARGEST for activations, are not screened
_SLAB = 1024  # outputs packed at a time
_SAMPLE, _RUN = 4096, 64  # outputs that statistics are taken of, in runs of neighbours
_TURNS = 6  # of the power iteration
_LEAST_SHARE = 0.05  # of the largest: what rounding costs grows with its inverse
_WHOLE = np.float32(1.5 * 2**23)  # what is added to it becomes a whole number
_ZERO, _ONE, _EIGHTH, _MOST = np.float32(0), np.float32(1), np.float32(0.125), np.float32(7)
_EIGHT, _SIXTEEN = np.float32(8), np.float32(16)


@dataclass(frozen=True)
class Coarse:
    """What a screened head needs beside its exact weights.

    `tiles` uint8 [tiles, tile bytes]: the blocks' codes (`cpu_tiles`). `order` int64 [n]: dimension at each place, then
    in that order, filled with zeros to whole blocks: `direction` float32 (u), `shares` float32 [2, blocks] (p and r).
    `along` and `slack` float32 [outputs, padded to vectors of 16]: a and an output's part of the bound.
    """

    outputs: int
    lanes: int
    tiles: NDArray[np.uint8]
    order: NDArray[np.int64]
    direction: F32
    shares: F32
    along: F32
    slack: F32

    @property
    def steps(self) -> int:
        """Blocks of a tile: those of the weights, and the first one again."""
        return self.shares.shape[1] + 1

    @property
    def n_bytes(self) -> int:
        return self.tiles.nbytes + self.along.nbytes + self.slack.nbytes


def _rounding(inputs: int) -> float:
    """Of |w| |x|, more than the rounding of all float32 sums of that many products together."""
    return (4 * inputs + 256) * 2.0**-24


@inner
def _pair(codes: int, place: int) -> Any:
    """The byte of two codes, 16 columns apart."""
    return load(codes + 64 * place) + load(codes + 64 * (16 + place)) * splat(_SIXTEEN)


def _pack(args: int) -> None:
    """Pack groups of 16 outputs; `args` are those of `_packed`. Inputs are whole blocks here."""
    source, order, direction = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    outputs, inputs, out = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    tile_bytes, lanes = load_i64(args + 48), load_i64(args + 56)
    along, errors, sizes = load_i64(args + 64), load_i64(args + 72), load_i64(args + 80)
    left, halves = load_i64(args + 88), load_i64(args + 96)
    whole, eight, most, zero = splat(_WHOLE), splat(_EIGHT), splat(_MOST), splat(_ZERO)
    blocks, used = inputs >> 6, load_i64(args + 104)
    first_part = left + 64 * inputs
    for i in range(used, inputs):
        store(left + 64 * i, zero)
    for first in range(0, outputs, 16):
        for lane in range(16):
            row = source + 4 * used * min(first + lane, outputs - 1)
            for i in range(used):
                value = load_f32(row + 4 * load_i64(order + 8 * i))
                store_f32(left + 64 * i + 4 * lane, value)
        share = zero
        for i in range(inputs):
            share = fma(load(left + 64 * i), splat(load_f32(direction + 4 * i)), share)
        store(along + 4 * first, share)
        tile = out + (first // lanes) * tile_bytes
        after = tile + (tile_bytes if lanes == 8 else 32)  # where lanes 8 .. 15 go
        for i in range(inputs):
            value = load(left + 64 * i) - share * splat(load_f32(direction + 4 * i))
            store(left + 64 * i, value)
        for step in range(blocks + 1):
            block = 0 if step == blocks else step
            start = left + 64 * 64 * block
            high, low = zero, zero
            for k in range(64):
                value = load(start + 64 * k)
                high, low = maximum(high, value), maximum(low, zero - value)
            store_half(halves, where_above(high, low, zero - high, low) * splat(_EIGHTH))
            scale = load_half(halves)
            record = 34 * lanes * step
            for at in range(0, 16, 8):
                store_i64(tile + record + at, load_i64(halves + at))
                store_i64(
                    after + record + at - (0 if lanes == 8 else 16), load_i64(halves + 16 + at)
                )
            inverse = splat(_ONE) / scale
            error, size = zero, zero
            for k in range(64):
                value = load(start + 64 * k)
                code = (value * inverse + whole) - whole
                code = most - maximum(most - maximum(code, zero - eight), zero)
                part = code * scale
                value = value - part
                store(start + 64 * k, value)
                error = fma(value, value, error)
                if step == 0:
                    store(first_part + 64 * (64 + k), part)
                if step == blocks:
                    part = part + load(first_part + 64 * (64 + k))
                size = fma(part, part, size)
                store(first_part + 64 * k, code + eight)
            store(errors + 64 * (first // 16 * blocks + block), error)
            store(sizes + 64 * (first // 16 * blocks + block), size)
            for j in range(8):
                codes = first_part + 64 * (4 * (j & 3) + 32 * (j >> 2))
                planes = record + 2 * lanes + 4 * lanes * j
                store_bytes(
                    tile + planes, after + planes,
                    _pair(codes, 0), _pair(codes, 1), _pair(codes, 2), _pair(codes, 3),
                )  # fmt: skip


_KERNEL = Kernel(_pack, 1)


@functools.cache
def _native() -> Callable[..., None]:
    return _KERNEL.native(1)


def _tile_bytes(steps: int, lanes: int) -> int:
    return -(-steps * scale_and_code_bytes(lanes) // 64) * 64


def _packed(
    values: F32, order: NDArray[np.int64], direction: F32, lanes: int, out: U8, along: F32
) -> tuple[F32, F32]:
    """Pack rows into the tiles `out` (with room for whole groups of 16 outputs) and their a into `along` [whole groups
    of 16]; the squares of |e_b| and |c_b|, float32 [groups, blocks, 16].
    """
    outputs, inputs = len(values), len(direction)
    groups, blocks = -(-outputs // 16), inputs // BLOCK
    errors, sizes = (np.empty((groups, blocks, 16), np.float32) for _ in range(2))
    scratch, halves = aligned(64 * (inputs + 2 * BLOCK)), aligned(64)
    arrays = (along, errors, sizes, scratch, halves)
    args = np.array(
        [values.ctypes.data, order.ctypes.data, direction.ctypes.data, outputs, inputs, out.ctypes.data,
         _tile_bytes(blocks + 1, lanes), lanes, *(array.ctypes.data for array in arrays), len(order)],
        np.int64,
    )  # fmt: skip
    _native()(args.ctypes.data)
    return errors, sizes


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is refused in the end
def pack_coarse(
    rows: Rows, outputs: int, inputs: int, norm: F32, lanes: int, arena: Arena
) -> Coarse | None:
    """The coarse form of a head of `outputs` x `inputs` (a multiple of 32, at least 64) exact weights.

    `rows(first, count)` gives some of them, float32 [count, inputs]; `norm` are the weights of the norm before.
    None where a weight is not finite or a row too large to be bounded.
    """
    sample = _sample(rows, outputs)
    direction = _direction(sample)
    left = sample - (sample @ direction)[:, None] * direction
    if not np.isfinite(left).all():
        return None
    order = _order(norm, left)
    fill = np.zeros(-inputs % BLOCK, np.float32)
    turned = np.concatenate([direction[order], fill])
    shares = _shares(np.concatenate([norm[order], fill]), *_statistics(sample, order, turned))
    tiles, tile_bytes = -(-outputs // lanes), _tile_bytes(len(turned) // BLOCK + 1, lanes)
    padded = -(-outputs // 16) * 16
    array = arena.take(padded // lanes * tile_bytes)
    along, slack = np.zeros(padded, np.float32), np.zeros(padded, np.float32)
    for first in range(0, outputs, _SLAB):
        values = np.ascontiguousarray(rows(first, min(_SLAB, outputs - first)), np.float32)
        group = slice(first, first + _SLAB)
        out = array[first // lanes * tile_bytes :]
        errors, sizes = _packed(values, order, turned, lanes, out, along[group])
        slack[group] = _slack(along[group], errors, sizes, shares, inputs)
    if not np.isfinite(slack).all():
        return None
    packed = array[: tiles * tile_bytes].reshape(tiles, tile_bytes)
    return Coarse(outputs, lanes, packed, order, turned, shares, along, slack)


def _sample(rows: Rows, outputs: int) -> F32:
    """Rows from all over the head, enough to know its shape."""
    runs = max(1, min(_SAMPLE // _RUN, outputs // _RUN))
    places = [outputs * run // runs for run in range(runs)]
    found = np.concatenate([rows(first, min(_RUN, outputs - first)) for first in places])
    return np.ascontiguousarray(found, np.float32)


def _direction(sample: F32) -> F32:
    """The unit vector that rows have most of, by power iteration from their mean; zeros where there is none."""
    vector = sample.mean(axis=0)
    for _ in range(_TURNS):
        vector = _unit(vector)
        vector = sample.T @ (sample @ vector)
    return _unit(vector)


def _unit(vector: F32) -> F32:
    length = np.linalg.norm(vector)
    return vector / length if 0 < length < np.inf else np.zeros_like(vector)


def _order(norm: F32, left: F32) -> NDArray[np.int64]:
    size = np.square(left).mean(axis=0)
    by_size, by_norm = (np.argsort(-value, kind="stable") for value in (size, np.abs(norm)))
    widest = by_size[:_WIDEST]
    first = np.concatenate([widest, by_norm[~np.isin(by_norm, widest)][: LEAD - _WIDEST]])
    return np.concatenate([first, by_size[~np.isin(by_size, first)]]).astype(np.int64)


def _statistics(sample: F32, order: NDArray[np.int64], direction: F32) -> tuple[F32, F32]:
    """Mean squares of |e_b| and |c_b|."""
    groups = -(-len(sample) // 16)
    out = np.zeros(groups * _tile_bytes(len(direction) // BLOCK + 1, 16), np.uint8)
    along = np.zeros(16 * groups, np.float32)
    errors, sizes = _packed(sample, order, direction, 16, out, along)
    return errors.mean(axis=(0, 2)), sizes.mean(axis=(0, 2))


def _shares(norm: F32, errors: F32, sizes: F32) -> F32:
    """p and r. The tightest bound has the ratio of the other factor's usual size to its own; x is taken as large as its
    norm's weight (in the lead more), and int8 blocks to be off by a 127th of that.
    """
    usual = np.sqrt(np.square(norm.astype(np.float64)).reshape(-1, BLOCK).sum(axis=1))
    usual[: LEAD // BLOCK] *= _LEADING
    shares = []
    for squares, part in ((errors, 1.0), (sizes, 1.0 / 127)):
        share = np.sqrt(squares.astype(np.float64)) / np.maximum(usual * part, 1e-30)
        most = share.max()
        if not 0 < most < np.inf:
            share, most = np.ones_like(share), 1.0
        shares.append(np.maximum(share, _LEAST_SHARE * most))
    return np.array(shares / shares[0].max(), np.float32)


def _slack(along: F32, errors: F32, sizes: F32, shares: F32, inputs: int) -> F32:
    """Each output's factor of the bound, rounded up; not finite for what cannot be bounded."""
    p, r = shares.astype(np.float64)
    e, c = (
        squares.astype(np.float64).transpose(0, 2, 1).reshape(-1, len(p))
        for squares in (errors, sizes)
    )
    row = np.abs(along.astype(np.float64)) * 1.001 + np.sqrt(e.sum(axis=1)) + np.sqrt(c.sum(axis=1))
    row = np.where(row < LARGEST, row, np.inf)
    total = np.sqrt(e @ (1 / p) + c @ (1 / r)) + _rounding(inputs) * row / np.sqrt(p.min())
    return np.nextafter((total * (1 + 2.0**-16)).astype(np.float32), np.float32(np.inf))
