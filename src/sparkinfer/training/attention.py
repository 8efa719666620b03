"""Which keys a block's rows see, and attention under that rule.

Keys are the context rows of the sequence (positions 0 .. length - 1) followed by the rows of all blocks. A row of the
block at anchor a sees the context strictly before a (and inside the window) and the rows of its own
block, in a causal draft only those up to itself. Nothing else: neither other blocks nor the target's features at or
after the anchor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkinfer.training.config import DraftShape


def visible(anchors: Tensor, length: int, shape: DraftShape) -> Callable[..., Tensor]:
    """A rule (row of the batch, head, query, key) -> bool for blocks at `anchors` [b, n], over index tensors."""
    block, causal, window = shape.block, shape.causal, shape.window

    def rule(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        owner, slot = query // block, query % block
        anchor = anchors[b, owner]
        context = (key < length) & (key < anchor)
        if window:
            context = context & (anchor + slot - key < window)
        row = key - length
        own = (row >= 0) & (row // block == owner)
        if causal:
            own = own & (row % block <= slot)
        return context | own

    return rule


class BlockAttention:
    """Attention of all blocks of a batch; made once a step, used by every draft layer."""

    def __init__(self, anchors: Tensor, length: int, shape: DraftShape) -> None:
        b, n = anchors.shape
        queries, keys = n * shape.block, length + n * shape.block
        rule = visible(anchors, length, shape)
        self.on_gpu = anchors.is_cuda
        if self.on_gpu:
            self.mask: Any = _block_mask()(rule, b, None, queries, keys, device=anchors.device)
        else:
            index = lambda size, *view: torch.arange(size, device=anchors.device).view(*view)  # noqa: E731
            self.mask = rule(
                index(b, b, 1, 1),
                torch.zeros(()),
                index(queries, 1, queries, 1),
                index(keys, 1, 1, keys),
            )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b, heads, queries, hd], k and v [b, kv_heads, keys, hd] -> [b, heads, queries, hd]."""
        if self.on_gpu:
            out: Tensor = _flex()(
                q, k, v, block_mask=self.mask, enable_gqa=q.shape[1] != k.shape[1]
            )
            return out
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask[:, None], enable_gqa=True
        )


@cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@cache
def _block_mask() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False)
