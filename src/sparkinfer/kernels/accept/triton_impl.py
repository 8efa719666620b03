"""Triton form of `accept`: one small program."""

import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import EXACT_ROWS, CudaRecorder
from sparkinfer.kernels.triton_mixers import WORD_COMMIT_ROWS, WORD_POSITION


@triton.jit(do_not_specialize=["column"])
def accept_kernel(window, found, run, column, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    later = tl.load(run + WORD_COMMIT_ROWS).to(tl.int32) - 1  # tokens after the first
    token = tl.load(window + 1 + row, mask=row < later, other=0)
    best = tl.load(found + row, mask=row < later, other=1)
    differs = (token != best) | (row >= later)
    last = tl.min(tl.where(differs, row, ROWS - 1), 0)  # the last one that stays
    tl.store(run + WORD_POSITION, tl.load(run + WORD_POSITION) + last + 1)
    tl.store(run + column, tl.load(found + last))


def record(
    recorder: CudaRecorder, window: tuple[Buffer, int], found: Buffer, params: Buffer, column: int
) -> None:
    tokens = window[0].array[0, window[1] :]
    recorder.launch(
        accept_kernel, (1,), tokens, found.array, params.array, column, ROWS=EXACT_ROWS, num_warps=1
    )
