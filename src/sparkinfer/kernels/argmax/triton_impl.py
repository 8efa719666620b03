"""Triton form of `argmax`: programs look at parts of a row, then one compares what they found.

Maxima and lowest ids do not depend on the order they are taken in.
"""

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.triton_mixers import stride_of
from sparkinfer.kernels.triton_overlap import await_inputs, release_next

PARTS = 64  # programs of a row
_COLUMNS = 1024  # that a program looks at in a step


@triton.jit
def _largest(value, place):
    """The largest value and the lowest place that has it."""
    top = tl.max(value, 0)
    return top, tl.min(tl.where(value == top, place, 2147483647), 0)


@triton.jit
def part_kernel(
    logits, stride, values, places, n_vocab, PARTS: tl.constexpr, COLUMNS: tl.constexpr
):
    """A part's largest logit and its id; where a logit is not finite, the id's complement instead."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, COLUMNS)
    best = tl.full((COLUMNS,), float("-inf"), tl.float32)
    place = lane + part * COLUMNS
    bad = tl.zeros((COLUMNS,), tl.int32)
    release_next()
    await_inputs()
    for begin in range(part * COLUMNS, n_vocab, PARTS * COLUMNS):
        column = begin + lane
        inside = column < n_vocab
        x = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
        bad |= ((x - x != 0.0) & inside).to(tl.int32)
        larger = x > best
        best = tl.where(larger, x, best)
        place = tl.where(larger, column, place)
    top, lowest = _largest(best, place)
    failed = tl.max(bad, 0)
    tl.store(values + row * PARTS + part, top)
    tl.store(places + row * PARTS + part, tl.where(failed > 0, -1 - lowest, lowest))


@triton.jit
def whole_kernel(
    values, places, out, out_stride, tokens, n_vocab, PARTS: tl.constexpr, TOKENS: tl.constexpr
):
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    release_next()
    await_inputs()
    value = tl.load(values + row * PARTS + part)
    place = tl.load(places + row * PARTS + part)
    failed = tl.max((place < 0).to(tl.int32), 0)
    _, lowest = _largest(value, tl.where(place < 0, -1 - place, place))
    tl.store(out + row * out_stride, lowest.to(tl.int64))
    if TOKENS:
        tl.store(tokens + row, tl.minimum(lowest, n_vocab - 1).to(tl.int64))
    tl.store(out + row * out_stride + 1, (1 - failed).to(tl.int64))


def record(
    recorder: CudaRecorder,
    logits: Buffer,
    out: Buffer,
    n_vocab: int,
    tokens: tuple[Buffer, int] | None = None,
) -> None:
    rows = recorder.rows
    target = out.array if tokens is None else tokens[0].array[0, tokens[1] :]
    values = recorder.scratch("argmax values", rows * PARTS)
    places = recorder.scratch("argmax places", rows * PARTS, torch.int32)
    recorder.launch(
        part_kernel, (PARTS, rows), logits.array, stride_of(logits.array), values, places, n_vocab,
        PARTS=PARTS, COLUMNS=_COLUMNS, overlap=True,
    )  # fmt: skip
    recorder.launch(
        whole_kernel,
        (rows,),
        values,
        places,
        out.array,
        stride_of(out.array),
        target,
        n_vocab,
        PARTS=PARTS,
        TOKENS=tokens is not None,
        num_warps=1,
        overlap=True,
    )
