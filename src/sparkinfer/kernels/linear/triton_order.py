"""Rows as products for many rows take them, written by the norms before them: once for all products that read them.

The order of columns is the one that Hopper's matrix instructions need where packed weights are their left side.
A thread of a warp group holds, of 16 columns of a row of the left side, columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9, q
being its lane modulo 4. So that these are codes of one group of 32, which it reads as whole words, columns of the rows
change places inside every 128: place (h, w, j, q, i) holds column (q, h, w, j, i), with h and j, i bits, w and q two
bits each. Each row is divided by its largest magnitude and rounded to float16.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparkinfer.backend.cuda import CudaRecorder, Launch
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.triton_halves import unit_row

SPAN = 256  # columns: what a turn of those products' loop takes
ENOUGH = 512  # rows from which on products take them
TALL = 128  # rows of a tile
_READERS = {"wide_float_kernel"}  # may read the float32 rows without making their other form stale


@dataclass(frozen=True)
class Ordered:
    """float16 rows of `stride` columns and the rows' largest magnitudes, made of the float32 rows at address `source`.

    `only`: nothing wrote the float32 rows. `step`: launches recorded before whatever reads it.
    """

    source: int
    halves: torch.Tensor
    stride: int
    scales: torch.Tensor
    rows: int
    step: int
    only: bool = False


@triton.jit
def store_ordered(row, value, halves, stride, scales, BLOCK: tl.constexpr):
    """Write a whole row, whose columns beyond the last are zero, as `stride` columns."""
    columns = tl.reshape(unit_row(value, scales + row), [BLOCK // 128, 4, 2, 4, 2, 2])
    places = tl.reshape(tl.permute(columns, (0, 2, 3, 4, 1, 5)), [BLOCK])
    k = tl.arange(0, BLOCK)
    tl.store(halves + row.to(tl.int64) * stride + k, places, mask=k < stride)


@triton.jit
def order_kernel(x, x_stride, halves, stride, scales, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    value = tl.load(x + row.to(tl.int64) * x_stride + k, mask=k < width, other=0.0)
    store_ordered(row, value, halves, stride, scales, BLOCK)


def serves(recorder: CudaRecorder, *weights: TritonWeight) -> bool:
    """Whether products in Gluon, with packed weights as the left side, serve a recording."""
    here = recorder.owner.warpgroups and recorder.rows >= ENOUGH
    return here and all(w.quantised and w.groups * 32 % SPAN == 0 for w in weights)


def ordered_buffers(
    recorder: CudaRecorder, name: str, rows: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the rows, to whole tiles of products, and for their magnitudes."""
    tall = -(-rows // TALL) * TALL
    return (
        recorder.scratch(f"ordered {name}", tall * width, torch.float16),
        recorder.scratch(f"magnitudes of {name}", tall),
    )


def keep_ordered(
    recorder: CudaRecorder,
    x: torch.Tensor,
    halves: torch.Tensor,
    scales: torch.Tensor,
    width: int,
    *,
    only: bool,
) -> None:
    """Tell later products of the recording that the rows' other form is there."""
    step = len(recorder.steps)
    form = Ordered(x.data_ptr(), halves, width, scales, recorder.rows, step, only)
    recorder.pin(form)


def ordered_rows(
    recorder: CudaRecorder, x: torch.Tensor, width: int, rows: int, name: str
) -> Ordered:
    """The other form of float32 rows: what their writer left, or recorded here."""
    left = next(
        (f for f in reversed(recorder.keep) if isinstance(f, Ordered) and f.source == x.data_ptr()),
        None,
    )
    if left is not None:
        fresh = left.rows == rows and not any(
            _writes(step, x) for step in recorder.steps[left.step :]
        )
        if fresh:
            return left
        assert not left.only, "rows that nothing wrote"
    padded = -(-width // 128) * 128
    halves, scales = ordered_buffers(recorder, name, rows, padded)
    block = max(128, triton.next_power_of_2(padded))
    recorder.launch(
        order_kernel, (rows,), x, x.stride(0), halves, padded, scales, width,
        BLOCK=block, num_warps=min(16, max(2, block // 512)), enable_fp_fusion=False,
    )  # fmt: skip
    return Ordered(x.data_ptr(), halves, padded, scales, rows, len(recorder.steps))


def _writes(step: object, x: torch.Tensor) -> bool:
    """Whether a launch may have changed x."""
    return (
        isinstance(step, Launch)
        and step.kernel.fn.__name__ not in _READERS
        and any(isinstance(a, torch.Tensor) and a.data_ptr() == x.data_ptr() for a in step.args)
    )
