"""Two Triton kernels of batched generation: attention of one token a row to its cache, and the choice of a token.

Both take what changes from step to step from device memory, so one recorded CUDA graph serves every position.
"""

# mypy: ignore-errors

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERY_ROWS = 16  # least rows of a matrix product in Triton; a group of query heads has fewer


@triton.jit
def _attend(
    q, k, v, keys, values, out, place, length, scale,
    GROUP: tl.constexpr, HD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each row and key head."""
    pid = tl.program_id(0).to(tl.int64)
    n = tl.load(place)  # keys in the cache before this one
    d, g = tl.arange(0, HD), tl.arange(0, ROWS)
    own, at = g[:, None] < GROUP, pid * GROUP * HD + g[:, None] * HD + d[None, :]
    x = tl.load(q + at, mask=own, other=0.0)
    new_k, new_v = tl.load(k + pid * HD + d), tl.load(v + pid * HD + d)
    cache = pid * length * HD
    tl.store(keys + cache + n * HD + d, new_k)
    tl.store(values + cache + n * HD + d, new_v)
    # The new key first, from registers: the sums begin finite, and nothing just written is read.
    top = tl.sum(x.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
    total = tl.full((ROWS,), 1.0, tl.float32)
    sums = tl.zeros((ROWS, HD), tl.float32) + new_v.to(tl.float32)[None, :]
    for start in range(0, n, BLOCK):
        row = start + tl.arange(0, BLOCK)
        seen = row < n
        some = tl.load(keys + cache + row[None, :] * HD + d[:, None], mask=seen[None, :], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(x, some) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shares, kept = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
        some = tl.load(
            values + cache + row[:, None] * HD + d[None, :], mask=seen[:, None], other=0.0
        )
        sums = sums * kept[:, None] + tl.dot(shares.to(some.dtype), some)
        total = total * kept + tl.sum(shares, 1)
        top = higher
    tl.store(out + at, (sums / total[:, None]).to(out.dtype.element_ty), mask=own)


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, place: Tensor, block: int = 64
) -> Tensor:
    """Write k and v to the cache at `place` and attend to all keys up to it: [rows, heads, hd].

    q [rows, heads, hd], k and v [rows, kv_heads, hd], caches [rows, kv_heads, length, hd], all contiguous; `place`
    int32 [1] on the device.
    """
    rows, heads, size = q.shape
    kv_heads, length = keys.shape[1:3]
    out = torch.empty_like(q)
    _attend[(rows * kv_heads,)](
        q, k, v, keys, values, out, place, length, size**-0.5 * math.log2(math.e),
        GROUP=heads // kv_heads, HD=size, ROWS=QUERY_ROWS, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _choose(logits, out, heats, cool, seed, n_vocab, log_min_p, BLOCK: tl.constexpr):
    """One program for each row."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * n_vocab
    lane = tl.arange(0, BLOCK)
    best, index = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n_vocab, BLOCK):
        x = tl.load(base + start + lane, mask=start + lane < n_vocab, other=float("-inf"))
        x = x.to(tl.float32)
        index = tl.where(x > best, start + lane, index)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    chosen = tl.min(tl.where(best == top, index, n_vocab), 0)
    if tl.load(cool + row) == 0:
        heat = tl.load(heats + row)
        least = top + heat * log_min_p
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        number = tl.load(seed)
        for start in range(0, n_vocab, BLOCK):
            at = start + lane
            x = tl.load(base + at, mask=at < n_vocab, other=float("-inf")).to(tl.float32)
            noise = tl.maximum(tl.rand(number, row * n_vocab + at), 1e-10)
            score = (x - top) / heat - tl.log(-tl.log(noise) + 1e-20)
            score = tl.where(x >= least, score, float("-inf"))
            index = tl.where(score > best, at, index)
            best = tl.maximum(best, score)
        top = tl.max(best, 0)
        chosen = tl.min(tl.where(best == top, index, n_vocab), 0)
    tl.store(out + row, chosen.to(tl.int64))


def choose(
    logits: Tensor, heats: Tensor, cool: Tensor, seed: Tensor, log_min_p: float, block: int = 4096
) -> Tensor:
    """The likeliest token of the rows marked in `cool`, else one drawn at the row's heat: int64 [rows].

    logits [rows, n_vocab]; heats float32, cool int8 [rows]; `seed` int64 [1] on the device, another for each step.
    Tokens less likely than min-p times the likeliest are not drawn.
    """
    rows, n_vocab = logits.shape
    out = torch.empty(rows, dtype=torch.long, device=logits.device)
    _choose[(rows,)](
        logits, out, heats, cool, seed, n_vocab, log_min_p, BLOCK=block, num_warps=8
    )  # fmt: skip
    return out
