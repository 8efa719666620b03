"""What the forms of `attention` for few rows share: a program's units, one step of the softmax, where results lie."""

from typing import Any

import triton
import triton.language as tl

from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.attention.triton_masks import end_key, lowest_key
from sparkinfer.kernels.shapes import Heads
from sparkinfer.kernels.triton_mixers import WORD_POSITION, power_of_two

SPLIT_PROGRAMS = 1  # of a multiprocessor: the merge's programs have room beside them


@triton.jit
def program_units(
    run, program, rows, first_row, of_rows,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, UNIT: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The run's position, that of the first row, the first and one past the last position that any row sees, the
    program's first unit and one past everyone's last.
    """
    position = tl.load(run + WORD_POSITION).to(tl.int32)
    query = position + first_row
    lowest = lowest_key(run, query, WINDOW)
    highest = end_key(query + rows - 1, position + of_rows, CAUSAL, WINDOW)
    first = lowest // UNIT
    first += (program + PROGRAMS - first % PROGRAMS) % PROGRAMS
    return position, query, lowest, highest, first, (highest + UNIT - 1) // UNIT


@triton.jit
def ask(at, count):
    """Ask for `count` bytes from `at` on to come to the chip's cache; both are multiples of 16."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred one;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 one, thread, 0;
        @one cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""", "=r,l,r", [at.to(tl.int64), count], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def weigh(scores, at, low, end, top, total):
    """Keys at positions `at` [UNIT] of columns that see low to end - 1: the running maximum [COLUMNS], what it shrinks
    earlier results by [1, COLUMNS], the weights and their sums by place in a unit [UNIT, COLUMNS].
    """
    seen = (at[:, None] >= low[None, :]) & (at[:, None] < end[None, :])
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 0))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - base)[None, :]
    weight = tl.exp2(scores - base[None, :])
    return higher, shrink, weight, tl.fma(total, tl.broadcast_to(shrink, total.shape), weight)


@triton.jit
def low_part(x, high):
    return (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def in_turn(x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of x and y in turn, [ROWS, 2 COLUMNS]."""
    return tl.reshape(tl.join(x, y), (ROWS, 2 * COLUMNS))


@triton.jit
def result_place(
    c, program, head, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr
):
    """Which partial result a program has of column c."""
    return (c // GROUP * KV_HEADS * GROUP + head * GROUP + c % GROUP) * PROGRAMS + program


def partial_results(recorder: CudaRecorder, shape: Heads, width: int) -> tuple[int, Any, Any]:
    """Programs of a kv head, and memory for the partial results of `width` numbers each and their sums."""
    at_once = -(-SPLIT_PROGRAMS * recorder.owner.sms // shape.kv_heads)
    programs = power_of_two(at_once // 2 + 1)  # the largest power of two that fits
    results = recorder.row_block * shape.heads * programs
    partial = recorder.scratch("attention", results * width)
    return programs, partial, recorder.scratch("attention sums", 2 * results)
