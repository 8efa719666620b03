"""A draft from an earlier one of a smaller shape: it proposes what that one did, and has room to learn more.

What may grow: layers (new ones add nothing until they are trained), heads of keys and values (each is repeated for
the query heads that shared it), taps, the vocabulary and a head of its own. All else must be the same.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from sparkinfer.errors import RequestError
from sparkinfer.training.config import DraftShape
from sparkinfer.training.draft import DraftLayer, DraftModel

_MAY_CHANGE = ("layers", "kv_heads", "taps", "vocabulary", "active", "own_head")


def check_growth(old: DraftShape, new: DraftShape) -> None:
    """Raises RequestError where a draft of shape `old` cannot become one of shape `new`."""
    before, after = asdict(old), asdict(new)
    changed = [k for k in after if k not in _MAY_CHANGE and not _same(before[k], after[k])]
    if changed:
        raise RequestError(f"the draft to start from differs from this run in {', '.join(changed)}")
    if new.layers < old.layers:
        raise RequestError(f"a draft of {old.layers} layers cannot go on with {new.layers}")
    if new.kv_heads % old.kv_heads:
        raise RequestError(f"{old.kv_heads} heads of keys cannot become {new.kv_heads}")
    if not set(old.taps) <= set(new.taps):
        raise RequestError(f"taps {list(new.taps)} lack some of the start's, {list(old.taps)}")
    if old.own_head and not new.own_head:
        raise RequestError("the draft to start from has a head of its own: give --own-head")


def _same(one: Any, other: Any) -> bool:
    """GGUF files keep numbers in single precision."""
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


@torch.no_grad()
def grow(
    old: DraftModel, old_ids: Tensor | None, shape: DraftShape, ids: Tensor | None, head: Tensor
) -> DraftModel:
    """A draft of `shape` on the CPU that computes what `old` does, where `shape` may have more.

    `old_ids` and `ids` int64: target ids of the outputs before and now, None for all. `head` [n_vocab, n_embd]: the
    target's, whose rows serve tokens that `old` could not propose. Raises RequestError like `check_growth`.
    """
    before = old.shape
    check_growth(before, shape)
    draft, given = DraftModel(shape), dict(old.named_parameters())
    ids = torch.arange(shape.n_vocab) if ids is None else ids.cpu()
    place = torch.arange(shape.n_vocab)
    if old_ids is not None:
        place = torch.full((shape.n_vocab,), -1)
        place[old_ids.cpu()] = torch.arange(len(old_ids))
    known, rows = place[ids] >= 0, place[ids].clamp(min=0)
    for name, own in draft.named_parameters():
        if name == "lm_head":
            own.copy_(head[ids.to(head.device)].float().cpu())
            if old.lm_head is not None:
                own[known] = old.lm_head[rows[known]]
        elif name == "markov_w2":
            own.zero_()
            own[known] = given[name][rows[known]]
        elif name == "fc":
            own.zero_()
            blocks = own.view(shape.n_embd, len(shape.taps), shape.n_embd)
            stored = given[name].view(shape.n_embd, len(before.taps), shape.n_embd)
            for index, tap in enumerate(before.taps):
                blocks[:, shape.taps.index(tap)] = stored[:, index]
        elif not name.startswith("layers."):
            own.copy_(given[name])
    for number, layer in enumerate(draft.layers):
        source = old.layers[min(number, before.layers - 1)]
        _copy(layer, source)
        if number >= before.layers:
            layer.o_proj.zero_()
            layer.down_proj.zero_()
    return draft


def _copy(layer: DraftLayer, source: DraftLayer) -> None:
    """Parameters of `source`; heads of keys and values repeated."""
    times, size = layer.shape.kv_heads // source.shape.kv_heads, source.shape.head_size
    stored = dict(source.named_parameters())
    for name, own in layer.named_parameters():
        value = stored[name]
        if name in ("k_proj", "v_proj"):
            value = value.unflatten(0, (-1, size)).repeat_interleave(times, 0).flatten(0, 1)
        own.copy_(value)
