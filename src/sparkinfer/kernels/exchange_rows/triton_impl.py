"""Triton form of `exchange_rows`: a launch a plane, a program a change; programs without one end at once."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.triton_overlap import await_inputs, release_next
from sparkinfer.kernels.triton_quant import bound

_UNITS = 512  # pairs of bytes that a program copies at a time


@triton.jit(do_not_specialize=["units"])
def exchange_kernel(changes, target, source, units, UNITS: tl.constexpr):
    release_next()
    await_inputs()
    change = tl.program_id(0)
    if change < tl.load(changes):
        place = tl.load(changes + 1 + 2 * change)
        row = tl.load(changes + 2 + 2 * change)
        for begin in range(0, bound(units), UNITS):
            unit = begin + tl.arange(0, UNITS)
            live = unit < units
            value = tl.load(source + row * units + unit, mask=live, other=0)
            tl.store(target + place * units + unit, value, mask=live)


def _planes(rows: TritonWeight | Buffer) -> list[torch.Tensor]:
    """Contiguous, int16 [rows, pairs of bytes]."""
    if isinstance(rows, TritonWeight):
        return [plane.view(torch.int16) for plane in rows.planes()]
    assert rows.rows == 1, rows
    return [rows.array[0].view(torch.int16).view(rows.width, -1)]


def record(
    recorder: CudaRecorder, changes: Buffer, most: int, pairs: Sequence[tuple[Any, Any]]
) -> None:
    planes = [
        plane
        for target, source in pairs
        for plane in zip(_planes(target), _planes(source), strict=True)
    ]
    for into, given in planes:
        assert into.shape[1] == given.shape[1], (into.shape, given.shape)
        recorder.launch(
            exchange_kernel, (most,), changes.array, into, given, into.shape[1], UNITS=_UNITS,
            num_warps=4, overlap=True,
        )  # fmt: skip
