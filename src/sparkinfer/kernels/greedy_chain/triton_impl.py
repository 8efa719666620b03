"""Triton form of `greedy_chain`: a launch a slot, whose programs first choose the token of the slot before.

A program takes a run of ids and leaves its largest value, the sum of exponentials relative to it, and a key: the id
above 32 bits, the token that it stands for below. The lowest key of the largest value is the choice, so the token
comes without another read. All programs of the next launch choose it again, from a few hundred numbers.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.greedy_chain import TokenLinks, TokenPicks
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.triton_mixers import EXACT, power_of_two, stride_of
from sparkinfer.kernels.triton_overlap import await_inputs, release_next
from sparkinfer.kernels.triton_quant import bound

_PARTS = 128  # programs of a slot, at most
_TILE = 4096  # numbers of the head's second matrix that a program holds at a time
_COLUMNS = 1024  # ids that it looks at at a time where nothing is added
_NO_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_TOKEN = tl.constexpr(0xFFFFFFFF)
_LOW = tl.constexpr(float("-inf"))


@triton.jit
def _relative(value, top):
    """exp(value - top), 0 where the value is -inf."""
    return tl.where(value > _LOW, tl.exp(value - top), 0.0)


@triton.jit
def _chosen(values, sums, keys, parts, LANES: tl.constexpr):
    """Token and probability of a slot whose `parts` programs left these."""
    part = tl.arange(0, LANES)
    live = part < parts
    value = tl.load(values + part, mask=live, other=_LOW)
    total = tl.load(sums + part, mask=live, other=0.0)
    key = tl.load(keys + part, mask=live, other=_NO_KEY)
    top = tl.max(value, 0)
    best = tl.min(tl.where(value == top, key, _NO_KEY), 0)
    whole = tl.sum(total * _relative(value, top), 0)
    chance = tl.where(whole >= 1.0, tl.div_rn(1.0, whole), 0.0)
    return best & _TOKEN, chance


@triton.jit
def _told(out, out_stride, tokens, slot, token, chance, TOKENS: tl.constexpr):
    tl.store(out + slot * out_stride, token)
    tl.store(out + slot * out_stride + 1, chance.to(tl.int32, bitcast=True).to(tl.int64))
    if TOKENS:
        tl.store(tokens + slot, token)


@triton.jit
def _keys(known, column, ids, KNOWN: tl.constexpr):
    token = column.to(tl.int64)
    if KNOWN:
        token = tl.load(known + column, mask=column < ids, other=0)
    return tl.where(column < ids, (column.to(tl.int64) << 32) | token, _NO_KEY)


@triton.jit
def _rows(after, stride, column, ids, rank, RANK: tl.constexpr):
    """What is added to these ids' logits, before it is multiplied: [columns, RANK]."""
    r = tl.arange(0, RANK)[None, :]
    live = (column < ids)[:, None] & (r < rank)
    return tl.load(after + column[:, None].to(tl.int64) * stride + r, mask=live, other=0.0)


@triton.jit(do_not_specialize=["slot", "anchor", "turns", "parts", "ids"])
def slot_kernel(
    logits, stride, ids, known, turns, parts, values, sums, keys, slot,
    run, anchor, before, before_stride, after, after_stride, rank, out, out_stride, tokens,
    COLUMNS: tl.constexpr, RANK: tl.constexpr, FIRST: tl.constexpr, KNOWN: tl.constexpr, TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """One slot (RANK 0: as many as the grid's second axis has). FIRST: the token before stands in `run`."""
    release_next()
    part = tl.program_id(0)
    slot += tl.program_id(1)
    column = part * turns * COLUMNS + tl.arange(0, COLUMNS)
    key = _keys(known, column, ids, KNOWN)
    if RANK > 0:  # no launch of this tape writes these, so they are on their way
        rows = _rows(after, after_stride, column, ids, rank, RANK)
    await_inputs()
    if RANK > 0:
        if FIRST:
            token = tl.load(run + anchor)
        else:
            earlier = (slot - 1) * parts
            token, chance = _chosen(values + earlier, sums + earlier, keys + earlier, parts, LANES)
            if part == 0:
                _told(out, out_stride, tokens, slot - 1, token, chance, TOKENS)
        r = tl.arange(0, RANK)
        x = tl.load(before + token * before_stride + r, mask=r < rank, other=0.0)[None, :]
    line = logits + slot * stride
    value = tl.load(line + column, mask=column < ids, other=_LOW)
    if RANK > 0:
        value += tl.sum(rows.to(tl.float32) * x, 1)
    best = tl.where((column < ids) & (value == value), value, _LOW)
    total = tl.where(best > _LOW, 1.0, 0.0)
    for _ in range(1, bound(turns)):
        column += COLUMNS
        value = tl.load(line + column, mask=column < ids, other=_LOW)
        if RANK > 0:
            rows = _rows(after, after_stride, column, ids, rank, RANK)
            value += tl.sum(rows.to(tl.float32) * x, 1)
        value = tl.where((column < ids) & (value == value), value, _LOW)
        top = tl.maximum(value, best)
        total = total * _relative(best, top) + _relative(value, top)
        key = tl.where(value > best, _keys(known, column, ids, KNOWN), key)
        best = top
    top = tl.max(best, 0)
    at = slot * parts + part
    tl.store(values + at, top)
    tl.store(sums + at, tl.sum(total * _relative(best, top), 0))
    tl.store(keys + at, tl.min(tl.where(best == top, key, _NO_KEY), 0))


@triton.jit(do_not_specialize=["slot", "parts"])
def choose_kernel(
    values, sums, keys, parts, slot, out, out_stride, tokens, TOKENS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """The end of a chain, and of slots that depend on nothing."""
    slot += tl.program_id(0)
    release_next()
    await_inputs()
    at = slot * parts
    token, chance = _chosen(values + at, sums + at, keys + at, parts, LANES)
    _told(out, out_stride, tokens, slot, token, chance, TOKENS)


def float_rows(weight: TritonWeight) -> torch.Tensor:
    """A weight of floats as a matrix [outputs, inputs], both padded."""
    dtype = {"F32": torch.float32, "F16": torch.float16}[weight.format_name]
    return weight.words.view(dtype).view(weight.total, -1)


def record(
    recorder: CudaRecorder, logits: Buffer, ids: int, links: TokenLinks | None, out: TokenPicks
) -> None:
    """Pinned: nothing depends on the number of slots."""
    slots = recorder.rows
    rank = 0 if links is None else links.after.inputs
    width = 0 if links is None else max(16, power_of_two(rank))
    columns = min(_COLUMNS, power_of_two(ids)) if links is None else max(8, _TILE // width)
    turns = -(-ids // (_PARTS * columns))
    parts = -(-ids // (turns * columns))
    values, sums = (recorder.scratch(f"chain {name}", slots * parts) for name in ("values", "sums"))
    keys = recorder.scratch("chain keys", slots * parts, torch.int64)
    known = out.found.array if out.known is None else out.known.array
    tokens = out.found.array if out.tokens is None else out.tokens[0].array[0, out.tokens[1] :]
    found: tuple[Any, ...] = (out.found.array, stride_of(out.found.array), tokens)
    common = {
        "TOKENS": out.tokens is not None,
        "LANES": power_of_two(parts),
        "overlap": True,
        **EXACT,
    }
    # unread without a rank
    linked: tuple[Any, ...] = (keys, 0, logits.array, 0, logits.array, 0, 1)
    if links is not None:
        run, anchor = links.anchor
        after = float_rows(links.after)  # type: ignore[arg-type]
        before = links.before.array
        linked = (run.array, anchor, before, stride_of(before), after, stride_of(after), rank)
    for slot in range(slots if rank else 1):
        recorder.launch(
            slot_kernel, (parts, 1 if rank else slots),
            logits.array, stride_of(logits.array), ids, known, turns, parts, values, sums, keys, slot, *linked, *found,
            COLUMNS=columns, RANK=width, FIRST=slot == 0, KNOWN=out.known is not None, **common,
        )  # fmt: skip
    first, count = (slots - 1, 1) if rank else (0, slots)
    recorder.launch(
        choose_kernel, (count,), values, sums, keys, parts, first, *found, num_warps=1, **common
    )
