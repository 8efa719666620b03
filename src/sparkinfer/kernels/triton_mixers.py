"""What the Triton forms of the token mixers share: run parameters, cache addresses, int8 blocks, SiLU."""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Activation
from sparkinfer.kernels import run_params as P
from sparkinfer.kernels.triton_quant import store_words

WORD_POSITION = tl.constexpr(P.POSITION // 8)
WORD_ADVANCE = tl.constexpr(P.ADVANCE // 8)
WORD_KEYS = tl.constexpr(P.KEYS // 8)
WORD_VALUES = tl.constexpr(P.VALUES // 8)
WORD_HEAD_BYTES = tl.constexpr(P.HEAD_BYTES // 8)
WORD_CONV = tl.constexpr(P.CONV // 8)
WORD_RECURRENT = tl.constexpr(P.RECURRENT // 8)
WORD_CONV_RECORD = tl.constexpr(P.CONV_RECORD // 8)
WORD_KEY_RECORD = tl.constexpr(P.KEY_RECORD // 8)
WORD_DELTA_RECORD = tl.constexpr(P.DELTA_RECORD // 8)
WORD_DECAY_RECORD = tl.constexpr(P.DECAY_RECORD // 8)
WORD_COMMIT_ROWS = tl.constexpr(P.COMMIT_ROWS // 8)
WORD_FIRST = tl.constexpr(P.FIRST // 8)
WORD_ROTATION = tl.constexpr(P.ROTATION // 8)
WORD_CONV_NEXT = tl.constexpr(P.CONV_NEXT // 8)
WORD_RECURRENT_NEXT = tl.constexpr(P.RECURRENT_NEXT // 8)
WORD_SERIAL = tl.constexpr(P.SERIAL // 8)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer, ties to even

# Products and sums stay apart where a kernel does not ask for tl.fma: the bits do not depend on the variant.
EXACT = {"enable_fp_fusion": False}


def _as_float(handle: Any) -> Any:
    """An interpreter's tensor as float32; it keeps bfloat16 numbers as their bits."""
    if handle.data.dtype == np.uint16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def _mend_interpreter() -> None:
    """Two things about Triton 3.6's interpreter: it turns loop bounds into integers in a way that numpy 2.4 refuses,
    and leaves products to a library whose bits depend on an element's place. Here their terms are added in order.
    """
    from triton.runtime import interpreter

    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def in_order(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        wide = b.data.shape[-1] > 64 and b.data.dtype != np.uint16
        if wide or d.data.dtype != np.float32:
            return dot(self, a, b, d, precision, imprecise)
        left, right, total = _as_float(a), _as_float(b), d.data.copy()
        for k in range(left.shape[-1]):
            total += left[..., :, k, None] * right[..., k, None, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = in_order


if triton.knobs.runtime.interpret:
    _mend_interpreter()


def stride_of(tensor: torch.Tensor) -> int:
    """Elements from one row to the next."""
    return int(tensor.stride(0))


def q8_args(out: Activation) -> tuple[Any, int]:
    """The int8 form as a kernel takes it: bytes and row stride. Without one the float form stands in, unused."""
    if out.q8 is None:
        return out.f32.array, 0
    return out.q8.array, stride_of(out.q8.array)


def power_of_two(n: int) -> int:
    return int(triton.next_power_of_2(n))


@triton.jit
def floats_at(run, WORD: tl.constexpr):
    """The float32 array whose address stands in the run parameters."""
    return tl.multiple_of(tl.load(run + WORD).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def cache_plane(run, WORD: tl.constexpr, plane, WIDE: tl.constexpr):
    """The keys or values of one kv head of one layer; `plane` counts (layer, kv head)."""
    address = tl.load(run + WORD) + plane * tl.load(run + WORD_HEAD_BYTES)
    if WIDE:
        return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
    else:
        return tl.multiple_of(address.to(tl.pointer_type(tl.float16)), 16)


@triton.jit
def nearest(x):
    """The nearest integer, ties to even, of a number of less than 2^22."""
    return ((x + _ROUND) - _ROUND).to(tl.int32)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def store_int8(q8, y, columns, width, mask):
    """Quantise y [blocks, 32] into the row at `q8` (bytes) of `width` columns; columns and mask are [blocks, 32].

    Codes of the first halves of all blocks come first, as `triton_quant.input_part` reads them.
    Scale d = max|y| / 127, codes round(y / d) to even (0 where d is 0). A block with something that is no number, or
    with an infinity, has no finite d: y * 0 carries it there.
    """
    y = tl.where(mask, y, 0.0)
    d = tl.div_rn(tl.max(tl.abs(y), 1), 127.0) + tl.sum(y * 0.0, 1)
    codes = tl.div_rn(y, tl.where(d > 0.0, d, 1.0)[:, None])
    codes = tl.where((d > 0.0)[:, None], codes, 0.0)
    codes = nearest(codes)
    total = d * tl.sum(codes, 1).to(tl.float32)
    place = columns // 32 * 16 + columns % 16 + columns // 16 % 2 * (width // 2)
    tl.store(q8.to(tl.pointer_type(tl.int8), bitcast=True) + place, codes.to(tl.int8), mask=mask)
    block = tl.min(columns, 1) // 32
    whole = tl.max(mask.to(tl.int32), 1) > 0
    floats = (q8 + width).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(floats + block, d, mask=whole)
    tl.store(floats + width // 32 + block, total, mask=whole)


@triton.jit
def store_int8_row(q8, y, first, width, BLOCKS: tl.constexpr):
    """`store_int8` of whole blocks y [BLOCKS * 32], from block `first` on, in words of four codes."""
    y = tl.reshape(y, [BLOCKS, 8, 4])
    d = tl.div_rn(tl.max(tl.max(tl.abs(y), 2), 1, keep_dims=True), 127.0)
    d += tl.sum(tl.sum(y * 0.0, 2), 1, keep_dims=True)
    codes = tl.div_rn(y, tl.where(d > 0.0, d, 1.0)[:, :, None])
    codes = tl.where((d > 0.0)[:, :, None], codes, 0.0)
    code = (codes + _ROUND).to(tl.int32, bitcast=True)  # in the low bits, as a whole number
    words = q8.to(tl.pointer_type(tl.int32), bitcast=True)
    floats = (q8 + width).to(tl.pointer_type(tl.float32), bitcast=True)
    store_words(words, floats, first, width // 32, code, d, BLOCKS)
