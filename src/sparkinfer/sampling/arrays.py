"""Array types of this package and the few whole-vocabulary passes it makes."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.float32]
Weights: TypeAlias = NDArray[np.float32] | NDArray[np.float64]
Ids: TypeAlias = NDArray[np.int64]

_GROUPS_OF = 64  # ids per group when a pass is split in two levels


def largest(values: Weights, count: int) -> Ids:
    """Ids of the `count` largest values, largest first, lowest id first on a tie.

    Only what reaches a floor is sorted. The maxima of any disjoint groups give such a floor: the
    count-th largest maximum is reached by at least `count` values.
    """
    if count >= values.size:
        ids = np.arange(values.size, dtype=np.int64)
    else:
        ids = np.flatnonzero(values >= _floor(values, count)).astype(np.int64, copy=False)
    order = np.argsort(-values[ids], kind="stable")[:count]
    return ids[order]


def _floor(values: Weights, count: int) -> float:
    groups = values.size // _GROUPS_OF
    pool: Weights = values
    if count <= groups // 2:
        pool = values[: groups * _GROUPS_OF].reshape(_GROUPS_OF, groups).max(axis=0)
    return float(np.partition(pool, pool.size - count)[pool.size - count])


def pick_index(weights: Weights, u: float) -> int:
    """Index drawn with probability proportional to its weight, from one u in [0, 1).

    Large arrays go in two levels: a group of every `groups`-th element, then an element of it, so
    that no running sum over the whole vocabulary is needed. An index of weight 0 is never drawn.
    """
    groups = weights.size // _GROUPS_OF
    if groups < _GROUPS_OF:
        return _search(weights, u)[0]
    body = weights[: groups * _GROUPS_OF].reshape(_GROUPS_OF, groups)
    rest = weights[groups * _GROUPS_OF :]
    sums = np.concatenate([body.sum(axis=0), rest])
    chosen, within = _search(sums, u)
    if chosen >= groups:
        return groups * (_GROUPS_OF - 1) + chosen
    return _search(body[:, chosen], within)[0] * groups + chosen


def _search(weights: Weights, u: float) -> tuple[int, float]:
    """The index drawn by u, and where u lies within that index' share, again in [0, 1)."""
    ends = weights.cumsum(dtype=np.float64)
    target = u * ends[-1]
    index = int(np.searchsorted(ends, target, side="right"))
    if index == ends.size:  # u * total rounded up to the total
        index = int(np.flatnonzero(weights)[-1])
    start = float(ends[index - 1]) if index else 0.0
    share = float(ends[index]) - start
    return index, min((float(target) - start) / share, 1.0 - 2.0**-53)


def log_total(row: Logits) -> float:
    """log(sum(exp(row))) of finite logits, exact to about 1e-6."""
    return float(row.max()) + float(np.log(below_peak(row, 1.0).sum(dtype=np.float64)))


def below_peak(row: Logits, temperature: float) -> NDArray[np.float32]:
    """exp((row - row.max()) / temperature), float32 [n]; the largest is exactly 1."""
    with np.errstate(over="ignore"):  # finite logits can be further apart than float32 reaches
        scaled: NDArray[np.float32] = row - row.max()
        if temperature != 1.0:
            scaled /= np.float32(temperature)
    np.exp(scaled, out=scaled)
    return scaled
