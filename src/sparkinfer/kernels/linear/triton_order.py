"""Rows as products for many rows take them, written by the norms before them: once for all products that read them.

The order of columns is the one that Hopper's matrix instructions need where packed weights are their left side.
A thread of a warp group holds, of 16 columns of a row of the left side, columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9, q
being its lane modulo 4. So that these are codes of one group of 32, which it reads as whole words, columns of the rows
change places inside every 128: place (h, w, j, q, i) holds column (q, h, w, j, i), with h and j, i bits, w and q two
bits each. Each row is divided by its largest magnitude and rounded to float16.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from sparkinfer.backend.cuda import CudaRecorder, Launch
from sparkinfer.kernels.linear.triton_pack import TritonWeight

SPAN = 256  # columns: what a turn of those products' loop takes
ENOUGH = 512  # rows from which on products take them
TALL = 128  # rows of a tile
LARGEST = tl.constexpr(2048.0)  # small values keep their digits, in the second part too
_READERS = {"wide_float_kernel"}  # may read the float32 rows without making their other form stale


@dataclass(frozen=True)
class Ordered:
    """float16 rows of `stride` columns and the rows' scales, made of the float32 rows at address `source`.

    `only`: nothing wrote the float32 rows. `step`: launches recorded before whatever reads it. `low`: memory for the
    second part, which the launch before `step` writes if it is asked to.
    """

    source: int
    halves: torch.Tensor
    stride: int
    scales: torch.Tensor
    rows: int
    step: int
    only: bool = False
    low: torch.Tensor | None = None


@triton.jit
def _store_places(row, value, target, stride, BLOCK: tl.constexpr):
    columns = tl.reshape(value, [BLOCK // 128, 4, 2, 4, 2, 2])
    places = tl.reshape(tl.permute(columns, (0, 2, 3, 4, 1, 5)), [BLOCK])
    k = tl.arange(0, BLOCK)
    tl.store(target + row.to(tl.int64) * stride + k, places, mask=k < stride)


@triton.jit
def store_ordered(row, value, halves, low, stride, scales, BLOCK: tl.constexpr, LOW: tl.constexpr):
    """Write a whole row, whose columns beyond the last are zero, as `stride` columns. LOW: and what was rounded off."""
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # a NaN is the largest
    top = tl.max(bits, 0).to(tl.float32, bitcast=True)
    tl.store(scales + row, top * (1.0 / LARGEST))
    scaled = value * tl.where(top > 1e-34, LARGEST / top, 0.0)
    high = scaled.to(tl.float16)
    _store_places(row, high, halves, stride, BLOCK)
    if LOW:
        _store_places(row, (scaled - high.to(tl.float32)).to(tl.float16), low, stride, BLOCK)


@triton.jit
def order_kernel(
    x, x_stride, halves, low, stride, scales, width, BLOCK: tl.constexpr, LOW: tl.constexpr
):
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    value = tl.load(x + row.to(tl.int64) * x_stride + k, mask=k < width, other=0.0).to(tl.float32)
    store_ordered(row, value, halves, low, stride, scales, BLOCK, LOW)


def serves(recorder: CudaRecorder, *weights: TritonWeight) -> bool:
    """Whether products in Gluon, with packed weights as the left side, serve a recording."""
    here = recorder.owner.warpgroups and recorder.rows >= ENOUGH
    return here and all(w.quantised and w.groups * 32 % SPAN == 0 for w in weights)


def ordered_buffers(
    recorder: CudaRecorder, name: str, rows: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the rows, to whole tiles of products, and for their scales."""
    tall = -(-rows // TALL) * TALL
    return (
        recorder.scratch(f"ordered {name}", tall * width, torch.float16),
        recorder.scratch(f"scales of {name}", tall),
    )


def keep_ordered(
    recorder: CudaRecorder,
    x: torch.Tensor,
    halves: torch.Tensor,
    scales: torch.Tensor,
    width: int,
    *,
    only: bool = False,
    low: torch.Tensor | None = None,
) -> None:
    """Tell later products of the recording that the rows' other form is there, by the last launch."""
    step = len(recorder.steps)
    form = Ordered(x.data_ptr(), halves, width, scales, recorder.rows, step, only, low)
    recorder.pin(form)


def left_rows(recorder: CudaRecorder, x: torch.Tensor, rows: int) -> Ordered | None:
    """The other form of float32 rows as their writer left it, if nothing has changed them since."""
    left = next(
        (f for f in reversed(recorder.keep) if isinstance(f, Ordered) and f.source == x.data_ptr()),
        None,
    )
    if left is None:
        return None
    fresh = left.rows == rows and not any(_writes(step, x) for step in recorder.steps[left.step :])
    assert fresh or not left.only, "rows that nothing wrote"
    return left if fresh else None


def both_parts(recorder: CudaRecorder, form: Ordered) -> torch.Tensor | None:
    """Let the launch that writes the rows write their second part too; returns it. None: it cannot."""
    if form.low is not None:
        step = recorder.steps[form.step - 1]
        assert isinstance(step, Launch) and any(arg is form.low for arg in step.args), step
        recorder.steps[form.step - 1] = replace(step, options={**step.options, "LOW": True})
    return form.low


def ordered_rows(
    recorder: CudaRecorder, x: torch.Tensor, width: int, rows: int, name: str
) -> Ordered:
    """The other form of float32 rows: what their writer left, or recorded here."""
    left = left_rows(recorder, x, rows)
    if left is not None:
        return left
    padded = -(-width // 128) * 128
    halves, scales = ordered_buffers(recorder, name, rows, padded)
    record_order(recorder, x, x.stride(0), rows, width, (halves, halves, padded, scales), low=False)
    return Ordered(x.data_ptr(), halves, padded, scales, rows, len(recorder.steps))


def record_order(
    recorder: CudaRecorder, x: torch.Tensor, x_stride: int, rows: int, width: int,
    target: tuple[torch.Tensor, torch.Tensor, int, torch.Tensor], *, low: bool,
) -> None:  # fmt: skip
    """target: both parts' memory, their stride, the scales'."""
    block = max(128, triton.next_power_of_2(target[2]))
    recorder.launch(
        order_kernel, (rows,), x, x_stride, *target, width,
        BLOCK=block, LOW=low, num_warps=min(16, max(2, block // 512)), enable_fp_fusion=False,
    )  # fmt: skip


def _writes(step: object, x: torch.Tensor) -> bool:
    """Whether a launch may have changed x."""
    return (
        isinstance(step, Launch)
        and step.kernel.fn.__name__ not in _READERS
        and any(isinstance(a, torch.Tensor) and a.data_ptr() == x.data_ptr() for a in step.args)
    )
