"""Keys and values in q8_0 as the CPU keeps them, and how a row of either gets there.

Of a plane, in this order:
  keys     tiles of 16 positions: for every two dimensions 16 x 2 codes; scales: for every block 16 float16
  values   tiles of 32 positions: for every block of 32 dimensions, for every two positions, 32 x 2 codes;
           scales: for every block 32 float16
Two neighbours are what `attention` multiplies with a pair of 16-bit numbers. A block is `BLOCK` dimensions.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from sparkinfer.backend.compiled import inner
from sparkinfer.backend.instructions import FLOAT, NOTHING, VECTOR, WORD, instruction
from sparkinfer.backend.simd import (
    F16,
    F32,
    I8,
    I16,
    I32,
    LANES,
    call_llvm,
    largest_magnitude,
    load,
    splat,
    store_f16,
    store_value,
    vector,
)

_TOP, _ZERO = np.float32(127.0), np.float32(0.0)
_LARGEST = np.float32(65504.0)  # float16


@instruction(FLOAT, FLOAT)
def _as_half(b: Any, value: Any) -> Any:
    """A float32 rounded to float16 and back."""
    return b.fpext(b.fptrunc(value, F16), F32)


def _codes(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """16 float32 of at most 128 as int8, rounded to nearest even and kept within -127 .. 127."""
    whole = call_llvm(b, f"llvm.rint.v{LANES}f32", value.type, [value])
    kind = vector(I32, LANES)
    codes = b.fptosi(whole, kind)
    for bound, order in ((127, ">"), (-127, "<")):
        limit = ir.Constant(kind, [bound] * LANES)
        codes = b.select(b.icmp_signed(order, codes, limit), limit, codes)
    return b.trunc(codes, vector(I8, LANES))


@instruction(NOTHING, WORD, VECTOR)
def _scatter(b: Any, address: Any, value: Any) -> None:
    """The codes of 16 dimensions of a value: bytes two apart."""
    codes = _codes(b, value)
    for lane in range(LANES):
        byte = b.extract_element(codes, ir.Constant(I32, lane))
        store_value(b, b.add(address, ir.Constant(address.type, 2 * lane)), byte, 1)


@instruction(NOTHING, WORD, VECTOR)
def _scatter_pairs(b: Any, address: Any, value: Any) -> None:
    """The codes of 16 dimensions of a key: pairs 32 bytes apart."""
    pairs = b.bitcast(_codes(b, value), vector(I16, LANES // 2))
    for lane in range(LANES // 2):
        pair = b.extract_element(pairs, ir.Constant(I32, lane))
        store_value(b, b.add(address, ir.Constant(address.type, 32 * lane)), pair, 2)


@inner
def _scale(top: float) -> float:
    """A block's scale for its largest magnitude; NaN where that is no number or the scale does not fit."""
    scale = top / _TOP
    return _as_half(scale) if scale <= _LARGEST else np.float32(np.nan)


@inner
def _scaled(source: int) -> tuple[Any, Any, float]:
    """A block over its scale, as two vectors (zero where it has none), and the scale."""
    y0, y1 = load(source), load(source + 64)
    scale = _scale(largest_magnitude(y0, y1))
    inverse = _ZERO
    if scale > _ZERO:
        inverse = np.float32(1.0) / scale
    good = scale == scale
    y0 = y0 * splat(inverse) if good else splat(_ZERO)
    y1 = y1 * splat(inverse) if good else splat(_ZERO)
    return y0, y1, scale


@inner
def value_blocks(codes: int, scales: int, position: int, size: int, source: int) -> float:
    """Write a value of `size` floats; 0, or NaN when a block of it has no scale: that one becomes zero."""
    tile, within, lost = position >> 5, position & 31, _ZERO
    target = codes + tile * size * 32 + (within >> 1) * 64 + (within & 1)
    scale_at = scales + tile * size * 2 + within * 2
    for block in range(size >> 5):
        y0, y1, scale = _scaled(source + 128 * block)
        _scatter(target + 1024 * block, y0)
        _scatter(target + 1024 * block + 32, y1)
        store_f16(scale_at + 64 * block, scale if scale == scale else _ZERO)
        lost = lost + scale * _ZERO
    return lost


@inner
def key_blocks(codes: int, scales: int, position: int, size: int, source: int, lost: float) -> None:
    """Write a key of `size` floats; its scales become NaN where it has none or `lost` is NaN."""
    tile, within = position >> 4, position & 15
    target = codes + tile * size * 16 + within * 2
    scale_at = scales + tile * size + within * 2
    for block in range(size >> 5):
        y0, y1, scale = _scaled(source + 128 * block)
        _scatter_pairs(target + 512 * block, y0)
        _scatter_pairs(target + 512 * block + 256, y1)
        store_f16(scale_at + 32 * block, scale + lost)
