"""Anchors and labels of a step: where blocks stand, what each slot should say, and which slots count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """What the slots 1 .. depth after anchors [b, n] are about; all others are [b, n, depth].

    `labels`: the true tokens, target ids. `previous`: the true tokens before them, the anchor for the first slot.
    `counts`: slots whose label and all labels before it are the target's own choice within one answer.
    """

    anchors: Tensor
    labels: Tensor
    previous: Tensor
    counts: Tensor


def draw_anchors(answers: Tensor, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` different positions of every row, ascending: anchors int64 [b, n] and whether each is real.

    An anchor is an answer's token that has a successor in the same answer. Where a row has fewer, the rest repeat
    position 0.
    """
    fit = _starts(answers)
    scores = torch.rand(answers.shape, generator=random, device=answers.device)
    best, places = torch.where(fit, scores, -1.0).topk(count, -1)
    real = best >= 0
    places = torch.where(real, places, torch.zeros_like(places))
    places, order = places.sort(-1)
    return places, real.gather(-1, order)


def every_anchor(answers: Tensor) -> Tensor:
    """bool [b, length]: positions that are an anchor in serving."""
    return _starts(answers)


def _starts(answers: Tensor) -> Tensor:
    return answers & F.pad(answers[:, 1:], (0, 1), value=False)


def slots_of(tokens: Tensor, answers: Tensor, anchors: Tensor, real: Tensor, depth: int) -> Slots:
    """Labels of the slots after anchors [b, n] in tokens and answer marks [b, length]."""
    b, n = anchors.shape
    places = anchors[..., None] + torch.arange(1, depth + 1, device=tokens.device)
    inside = places < tokens.shape[1]
    flat = places.clamp(max=tokens.shape[1] - 1).flatten(1)
    labels = tokens.gather(1, flat).view(b, n, depth)
    own = answers.gather(1, flat).view(b, n, depth) & inside & real[..., None]
    previous = torch.cat((tokens.gather(1, anchors)[..., None], labels[..., :-1]), -1)
    return Slots(anchors, labels, previous, own.cumprod(-1).bool())
