"""Keys and values in 8 bits (q8_0) as the GPU kernels keep them.

A plane (keys or values of one kv head in one layer) has a byte for every number, its code + 128, then a float16 scale
for every 32 numbers of a position: max|x| / 127. Codes are x / scale rounded to even. What is read is float16(scale x
code), the same for every number of rows. Scales begin at 16/17 of the plane.

Positions come in units of 32. Where heads have 128 or 256 numbers, the bytes of a unit lie as the left operand of a
matrix instruction wants them, 16 bytes for a thread of 128 (warp, g, t) at a time, so that a kernel loads them into the
registers where they are used (kernels/attention/triton_q8.py):

- keys: position 8 warp + g, 16 numbers from 128 q + 32 t + 16 half on; pieces (q, half). Scales: [position][t][q].
- values: positions 8 s + 2 t + pair, numbers of thread (warp, g) from size / 4 x warp + size / 32 x g on, of which
  number e has bits (y, m, row), or (y, row) of a head of 128. 256: pieces (s / 2, y), bytes (s % 2, m, row, pair);
  128: pieces y, bytes (s, row, pair). Scales: [32 numbers][t][s][pair].

Other heads lie position by position. A position beyond the plane's last is never touched.
"""

import triton
import triton.language as tl

from sparkinfer.kernels.triton_mixers import WORD_HEAD_BYTES, nearest

_MOST = tl.constexpr(515.5)  # a scale whose 127 codes are float16


def has_units(size: int) -> bool:
    """Whether heads of this size lie in units for matrix instructions."""
    return size in (128, 256)


@triton.jit
def q8_plane(run, WORD: tl.constexpr, plane):
    """Codes (bytes) and scales of one kv head of one layer."""
    size = tl.load(run + WORD_HEAD_BYTES)
    address = tl.load(run + WORD) + plane * size
    codes = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    scales = tl.multiple_of((address + size // 17 * 16).to(tl.pointer_type(tl.float16)), 16)
    return codes, scales


@triton.jit
def code_place(p, d, SIZE: tl.constexpr, VALUES: tl.constexpr):
    """Where number d of position p has its code, from the plane's begin on."""
    if SIZE != 128 and SIZE != 256:
        return p * SIZE + d
    elif not VALUES:
        piece = d // 128 * 2 + d // 16 % 2
        return p // 32 * (32 * SIZE) + piece * 2048 + p % 32 * 64 + d // 32 % 4 * 16 + d % 16
    else:
        s, t, e = p // 8 % 4, p // 2 % 4, d % (SIZE // 32)
        thread = d // (SIZE // 32) * 4 + t
        if SIZE == 256:
            piece, word = s // 2 * 2 + e // 4, s % 2 * 2 + e // 2 % 2
        else:
            piece, word = e // 2, s
        inner = piece * 2048 + thread * 16 + word * 4 + e % 2 * 2 + p % 2
        return p // 32 * (32 * SIZE) + inner


@triton.jit
def scale_place(p, block, SIZE: tl.constexpr, VALUES: tl.constexpr):
    """Where the 32 numbers from 32 block on of position p have their scale, from the first scale on."""
    if SIZE != 128 and SIZE != 256:
        return p * (SIZE // 32) + block
    elif not VALUES:
        return p * (SIZE // 32) + block % 4 * (SIZE // 128) + block // 4
    else:
        return p // 32 * SIZE + block * 32 + p // 2 % 4 * 8 + p // 8 % 4 * 2 + p % 2


@triton.jit
def read_q8(codes, scale):
    """float16 numbers of codes and their scales, of one shape."""
    return ((codes.to(tl.int32) - 128).to(tl.float32) * scale.to(tl.float32)).to(tl.float16)


@triton.jit
def store_q8(codes, scales, p, x, spoilt, SIZE: tl.constexpr, PADDED: tl.constexpr, VALUES: tl.constexpr):  # fmt: skip
    """Write numbers x [PADDED] (0 from SIZE on) of position p; their scales are NaN where `spoilt` is no number or 32
    of them do not fit. Values must fit.
    """
    B: tl.constexpr = PADDED // 32
    x = tl.reshape(x, (B, 32))
    top = tl.max(tl.abs(x), 1)
    lost = tl.sum(x.to(tl.float16).to(tl.float32) * 0.0, 1) + spoilt
    scale = tl.minimum(tl.div_rn(top, 127.0), _MOST).to(tl.float16)
    wide = scale.to(tl.float32)
    fits = (wide > 0.0) & (lost == 0.0)
    inverse = tl.where(fits, tl.div_rn(1.0, tl.where(fits, wide, 1.0)), 0.0)
    code = tl.where(tl.broadcast_to(fits[:, None], x.shape), x * inverse[:, None], 0.0)
    code = tl.minimum(tl.maximum(code, -127.0), 127.0)
    code = nearest(code) + 128
    block = tl.arange(0, B)
    d = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(codes + code_place(p, d, SIZE, VALUES), code.to(tl.uint8), mask=d < SIZE)
    scale = tl.where(lost == 0.0, wide, lost).to(tl.float16)
    tl.store(scales + scale_place(p, block, SIZE, VALUES), scale, mask=block < SIZE // 32)
