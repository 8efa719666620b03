"""Logits to the exact distribution the next token is drawn from."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkinfer.sampling.arrays import Ids, Logits, Weights, below_peak, largest, pick_index
from sparkinfer.sampling.history import TokenHistory
from sparkinfer.sampling.params import SamplingParams

_FIRST_FLOOR = 1.0 / 64  # of the largest weight; most nuclei lie above it
_FLOOR_STEP = 1.0 / 64


@dataclass(frozen=True, slots=True)
class Distribution:
    """Unnormalised weights of the ids that can be drawn; `ids` None stands for all, in order.

    Shapes: ids int64 [m], weights float [m], total their sum.
    """

    ids: Ids | None
    weights: Weights
    total: float

    def draw(self, u: float) -> int:
        """The token that u in [0, 1) selects."""
        index = pick_index(self.weights, u)
        return index if self.ids is None else int(self.ids[index])

    def probability(self, token: int) -> float:
        """Probability of one id, 0.0 for an id that was filtered out."""
        if self.ids is None:
            inside = 0 <= token < self.weights.size
            return float(self.weights[token]) / self.total if inside else 0.0
        found = np.flatnonzero(self.ids == token)
        return float(self.weights[found[0]]) / self.total if found.size else 0.0

    def dense(self, n_vocab: int) -> NDArray[np.float64]:
        """Probabilities of all ids, float64 [n_vocab]."""
        full = np.zeros(n_vocab, dtype=np.float64)
        where = slice(0, self.weights.size) if self.ids is None else self.ids
        full[where] = self.weights.astype(np.float64) / self.total
        return full


def adjust(
    row: Logits, history: TokenHistory, params: SamplingParams, banned: Ids | None = None
) -> Logits:
    """Steps 2 to 5 of `SamplingParams`: the row itself if nothing applies, else a changed copy."""
    if not params.adjusts and banned is None:
        return row
    changed = row.copy()
    if params.repetition_penalty != 1.0:
        _repetition(changed, history.seen(), params.repetition_penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        ids, counts = history.counts()
        penalty = params.presence_penalty + params.frequency_penalty * counts
        changed[ids] -= penalty.astype(np.float32)
    for token, value in params.logit_bias.items():
        changed[token] += np.float32(value)
    if banned is not None:
        changed[banned] = -np.inf
    return changed


def _repetition(row: Logits, ids: Ids, penalty: float) -> None:
    values = row[ids]
    row[ids] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))


def distribution(row: Logits, params: SamplingParams) -> Distribution:
    """Steps 6 to 9 of `SamplingParams` on an adjusted row, float32 [n_vocab]."""
    if params.greedy:
        return Distribution(np.array([row.argmax()], dtype=np.int64), np.ones(1), 1.0)
    if 0 < params.top_k < row.size:
        ids = largest(row, params.top_k)
        kept = below_peak(row[ids], params.temperature).astype(np.float64)
        return _cut(ids, kept, float(kept.sum()), params)
    if params.top_p < 1.0:
        weights = below_peak(row, params.temperature)
        total = float(weights.sum(dtype=np.float64))
        ids = _nucleus_candidates(weights, params.top_p * total)
        return _cut(ids, weights[ids].astype(np.float64), total, params)
    if params.min_p > 0.0:
        return _above_min_p(row, params)
    weights = below_peak(row, params.temperature)
    return Distribution(None, weights, float(weights.sum(dtype=np.float64)))


def _above_min_p(row: Logits, params: SamplingParams) -> Distribution:
    """min_p alone: a floor on the logits (a little low) leaves few ids to weigh exactly."""
    floor = float(row.max()) + params.temperature * (math.log(params.min_p) - 1e-3)
    ids = np.flatnonzero(row >= np.float32(floor)).astype(np.int64, copy=False)
    weights = below_peak(row[ids], params.temperature)
    kept = weights >= np.float32(params.min_p)
    exact = weights[kept].astype(np.float64)
    return Distribution(ids[kept], exact, float(exact.sum()))


def _nucleus_candidates(weights: NDArray[np.float32], mass: float) -> Ids:
    """Ids holding at least `mass` of the total weight, largest first, ties by id.

    The floor sinks until what reaches it holds the mass, so the whole vocabulary is sorted only
    for a distribution that is flat.
    """
    floor = _FIRST_FLOOR
    while True:
        ids = np.flatnonzero(weights >= np.float32(floor)).astype(np.int64, copy=False)
        kept = weights[ids]
        if kept.sum(dtype=np.float64) >= mass or ids.size == weights.size or floor == 0.0:
            return ids[np.argsort(-kept, kind="stable")]
        floor = floor * _FLOOR_STEP if floor > 1e-30 else 0.0


def _cut(
    ids: Ids, weights: NDArray[np.float64], total: float, params: SamplingParams
) -> Distribution:
    """top_p of `total`, then min_p, on weights sorted from the largest down."""
    keep = ids.size
    if params.top_p < 1.0:
        mass = params.top_p * total
        keep = min(keep, int(np.searchsorted(weights.cumsum(), mass, side="left")) + 1)
    if params.min_p > 0.0:
        keep = min(keep, int(np.count_nonzero(weights >= params.min_p * weights[0])))
    kept = weights[:keep]
    return Distribution(ids[:keep], kept, float(kept.sum()))
