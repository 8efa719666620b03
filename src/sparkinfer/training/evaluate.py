"""Acceptance on conversations the draft has not seen: the exact walk of greedy decoding, by teacher forcing.

The proposals of every position are computed once; the walk then goes through each answer as a decoder of a given
width would: accept the right prefix, take the target's own token, stand on it. With a Markov head a slot sees the
true token before it, which is the one it would see in any walk that gets there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sparkinfer.dflash.prior import Tally
from sparkinfer.training.anchors import slots_of
from sparkinfer.training.config import DraftShape
from sparkinfer.training.draft import DraftModel
from sparkinfer.training.loss import reachable
from sparkinfer.training.target import TorchTarget

WIDTHS = (2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class HeldOut:
    """Greedy answers to prompts kept for measuring: tokens int64 and answers bool [rows, length], a domain for each
    row.
    """

    tokens: Tensor
    answers: Tensor
    domains: tuple[str, ...]


@dataclass(frozen=True)
class Acceptance:
    """`tau[w]`: tokens a step of width w brings, itself included. `slots[k]`: (reached, accepted) of slot k + 1 at
    full width. `claims`: what the draft's probabilities are worth, as `dflash.prior` has it in files.
    """

    tau: dict[int, float]
    slots: tuple[tuple[int, int], ...]
    domains: dict[str, dict[int, float]]
    claims: tuple[float, ...] = ()

    @property
    def prior(self) -> tuple[list[float], list[float]] | None:
        """Acceptance by slot and means of claims for the draft's file, None where no slot was judged."""
        rates = [accepted / reached for reached, accepted in self.slots if reached]
        return (rates, list(self.claims)) if rates else None

    def describe(self) -> str:
        taus = " ".join(f"{width}:{value:.2f}" for width, value in self.tau.items())
        rates = " ".join(f"{accepted / max(1, reached):.2f}" for reached, accepted in self.slots)
        return f"tau by width {taus}; acceptance by slot {rates}"


@torch.no_grad()
def right_slots(
    draft: DraftModel,
    target: TorchTarget,
    head: Tensor,
    index: Tensor | None,
    tokens: Tensor,
    answers: Tensor,
    chunk: int = 64,
) -> Tensor:
    """bool [rows, length, depth]: the slots that would be accepted for every position as an anchor, given those
    before.
    """
    return claimed_slots(draft, target, head, index, tokens, answers, chunk)[0]


@torch.no_grad()
def claimed_slots(
    draft: DraftModel,
    target: TorchTarget,
    head: Tensor,
    index: Tensor | None,
    tokens: Tensor,
    answers: Tensor,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """The same, and the probability that the draft gives its likeliest token there, float32."""
    rows, length = tokens.shape
    depth = draft.shape.depth
    features, _ = target.features(tokens, draft.shape.taps)
    occurs = _occurs(tokens, draft.shape, index)
    out = torch.zeros(rows, length, depth, dtype=torch.bool, device=tokens.device)
    claims = torch.zeros(rows, length, depth, device=tokens.device)
    for start in range(0, length, chunk):
        places = torch.arange(start, start + chunk, device=tokens.device).clamp(max=length - 1)
        anchors = places.expand(rows, chunk)
        embedded = F.embedding(tokens.gather(1, anchors), target.embedding)
        slots = slots_of(
            tokens, answers, anchors, torch.ones_like(anchors, dtype=torch.bool), depth
        )
        logits = draft.logits(draft(features, embedded, anchors), slots.previous, head)
        if occurs is not None:
            later = occurs[:, None] > anchors[..., None]
            logits[..., draft.shape.active :].masked_fill_(later[:, :, None], -torch.inf)
        labels, counts = reachable(slots.labels, slots.counts, index)
        count = min(chunk, length - start)
        out[:, start : start + count] = ((logits.argmax(-1) == labels) & counts)[:, :count]
        logits = logits.float()
        likeliest = (logits.amax(-1) - logits.logsumexp(-1)).exp()
        claims[:, start : start + count] = likeliest[:, :count]
    return out, claims


def _occurs(tokens: Tensor, shape: DraftShape, index: Tensor | None) -> Tensor | None:
    """Where each output after the active ones occurs first in a row, int64 [rows, outputs - active]; never: the end."""
    if not shape.active or index is None:
        return None
    rows, length = tokens.shape
    places = torch.arange(length, device=tokens.device).expand(rows, length)
    first = torch.full((rows, shape.outputs + 1), length, device=tokens.device)
    outputs = torch.where(index[tokens] < 0, shape.outputs, index[tokens])
    first.scatter_reduce_(1, outputs, places, "amin")
    return first[:, shape.active : shape.outputs]


@dataclass(frozen=True)
class Step:
    """One step of a walk: where its anchor stands, slots accepted, slots that had a label, tokens gained."""

    place: int
    accepted: int
    labelled: int
    gained: int


def walk(right: NDArray[np.bool_], answers: NDArray[np.bool_], width: int) -> list[Step]:
    """All steps of width `width` through the answers of one row; right [length, depth], answers [length]."""
    ends = _ends(answers)
    steps, place = [], 0
    while place < len(answers) - 1:
        left = int(ends[place]) - place - 1  # the answer's tokens after this one
        if left < 1:
            place += 1
            continue
        accepted = int(right[place, : min(width - 1, left)].cumprod().sum())
        gained = min(accepted + 1, left)
        steps.append(Step(place, accepted, min(width - 1, left), gained))
        place += gained
    return steps


def _ends(answers: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For every position the end (exclusive) of the answer it is in; its own position where it is in none."""
    ends = np.arange(len(answers))
    end = 0
    for place in range(len(answers) - 1, -1, -1):
        if answers[place]:
            end = end if place + 1 < len(answers) and answers[place + 1] else place + 1
            ends[place] = end
    return ends


def acceptance(
    right: NDArray[np.bool_],
    held_out: HeldOut,
    widths: Sequence[int] = WIDTHS,
    claims: NDArray[np.float32] | None = None,
) -> Acceptance:
    """Walk all rows at every width; right and claims [rows, length, depth]."""
    own = held_out.answers.cpu().numpy()
    depth = right.shape[-1]
    names = list(dict.fromkeys(held_out.domains))
    tau: dict[int, float] = {}
    domains: dict[str, dict[int, float]] = {name: {} for name in names}
    for width in [width for width in widths if width <= depth + 1]:
        sums = {name: [0, 0] for name in names}
        for hits, marks, name in zip(right, own, held_out.domains, strict=True):
            for step in walk(hits, marks, width):
                sums[name][0] += step.gained
                sums[name][1] += 1
        for name, (tokens, steps) in sums.items():
            domains[name][width] = tokens / max(1, steps)
        total = np.sum(list(sums.values()), 0)
        tau[width] = float(total[0] / max(1, total[1]))
    told = np.zeros(right.shape, np.float32) if claims is None else claims
    tally = Tally(depth)
    for hits, marks, sure in zip(right, own, told, strict=True):
        for step in walk(hits, marks, depth + 1):
            tally.add(sure[step.place], step.accepted, min(step.accepted + 1, step.labelled))
    slots = tuple(zip(tally.reached, tally.kept, strict=True))
    return Acceptance(tau, slots, domains, () if claims is None else tuple(tally.numbers[1]))
