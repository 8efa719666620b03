"""Triton form of `argmax`: programs look at parts of a row, then one compares what they found.

Maxima and lowest ids do not depend on the order they are taken in.
"""

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.board import BEST_BITS, SERIALS
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.triton_mixers import (
    WORD_CONV,
    WORD_CONV_NEXT,
    WORD_POSITION,
    WORD_RECURRENT,
    WORD_RECURRENT_NEXT,
    WORD_SERIAL,
    stride_of,
)
from sparkinfer.kernels.triton_overlap import await_inputs, release_next

PARTS = 64  # programs of a row
_COLUMNS = 1024  # that a program looks at in a step
_BEST_BITS, _SERIALS = tl.constexpr(BEST_BITS), tl.constexpr(SERIALS)


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
def _change_places(run, ONE: tl.constexpr, OTHER: tl.constexpr):
    one, other = tl.load(run + ONE), tl.load(run + OTHER)
    tl.store(run + ONE, other)
    tl.store(run + OTHER, one)


@triton.jit
def _go_on(run, serial):
    """The parameters of the same run after its only row."""
    tl.store(run + WORD_POSITION, tl.load(run + WORD_POSITION) + 1)
    tl.store(run + WORD_SERIAL, (serial + 1) % _SERIALS)
    _change_places(run, WORD_CONV, WORD_CONV_NEXT)
    _change_places(run, WORD_RECURRENT, WORD_RECURRENT_NEXT)


@triton.jit
def whole_kernel(
    values, places, out, out_stride, tokens, run, n_vocab, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    WORDS: tl.constexpr, ADVANCES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    release_next()
    await_inputs()
    value = tl.load(values + row * PARTS + part)
    place = tl.load(places + row * PARTS + part)
    failed = tl.max((place < 0).to(tl.int32), 0)
    _, lowest = _largest(value, tl.where(place < 0, -1 - place, place))
    if TOKENS:
        tl.store(tokens + row, tl.minimum(lowest, n_vocab - 1).to(tl.int64))
    if WORDS:
        serial = tl.load(run + WORD_SERIAL)
        word = ((serial * 2 + (1 - failed)) << _BEST_BITS) | lowest.to(tl.int64)
        tl.store(out + row * out_stride, word)
        if ADVANCES:
            _go_on(run, serial)
    else:
        tl.store(out + row * out_stride, lowest.to(tl.int64))
        tl.store(out + row * out_stride + 1, (1 - failed).to(tl.int64))


def record(
    recorder: CudaRecorder,
    logits: Buffer,
    out: Buffer,
    n_vocab: int,
    tokens: tuple[Buffer, int] | None = None,
) -> None:
    _record(recorder, logits, out, n_vocab, tokens, None, advances=False)


def record_words(
    recorder: CudaRecorder,
    logits: Buffer,
    out: Buffer,
    n_vocab: int,
    params: Buffer,
    tokens: tuple[Buffer, int] | None,
    first: int | None,
) -> None:
    if first is not None:
        assert recorder.rows == 1, recorder.rows
        tokens = params, first
    _record(recorder, logits, out, n_vocab, tokens, params, advances=first is not None)


def _record(
    recorder: CudaRecorder,
    logits: Buffer,
    out: Buffer,
    n_vocab: int,
    tokens: tuple[Buffer, int] | None,
    params: Buffer | None,
    *,
    advances: bool,
) -> None:
    """With `params` words, else pairs."""
    rows = recorder.rows
    target = out.array if tokens is None else tokens[0].array[0, tokens[1] :]
    values = recorder.scratch("argmax values", rows * PARTS)
    places = recorder.scratch("argmax places", rows * PARTS, torch.int32)
    recorder.launch(
        part_kernel, (PARTS, rows), logits.array, stride_of(logits.array), values, places, n_vocab,
        PARTS=PARTS, COLUMNS=_COLUMNS, overlap=True,
    )  # fmt: skip
    recorder.launch(
        whole_kernel, (rows,), values, places, out.array, stride_of(out.array), target,
        out.array if params is None else params.array, n_vocab, PARTS=PARTS, TOKENS=tokens is not None,
        WORDS=params is not None, ADVANCES=advances, num_warps=1, overlap=True,
    )  # fmt: skip
