"""From samples to effects: one log ratio a block, then a point, an interval and p values for each metric and cell."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparkinfer.evaluation.record import Effect, GuardState, Sample
from sparkinfer.evaluation.stats import (
    Floats,
    SignFlip,
    bca_interval,
    detectable,
    deviation,
    hodges_lehmann,
    holm,
    student_interval,
    student_p,
)

Key = tuple[str, str, bool]  # metric, cell, guard
ALL = "all"
_BOOTSTRAPPED = 64  # blocks; more need no bootstrap, and pairs of pairs take memory


@dataclass(frozen=True, slots=True)
class Series:
    """Means of logarithms by block, for both sides; blocks that lack a side are left out."""

    metric: str
    cell: str
    guard: bool
    unit: str
    base: Floats
    candidate: Floats

    @property
    def ratios(self) -> Floats:
        """Log of candidate over base by block."""
        return self.candidate - self.base


def series_of(
    samples: Iterable[Sample], blocks: int, sides: tuple[str, str] = ("base", "candidate")
) -> dict[Key, Series]:
    """The series of every metric and cell in the first `blocks` blocks, in order of appearance.

    A side's figure in a block is the mean over both places it has in the block's order.
    """
    units: dict[Key, str] = {}
    logs: dict[Key, dict[tuple[int, str], list[float]]] = {}
    for sample in samples:
        if sample.block < blocks:
            key = sample.metric, sample.cell, sample.guard
            units.setdefault(key, sample.unit)
            place = logs.setdefault(key, {}).setdefault((sample.block, sample.side), [])
            place.append(math.log(sample.value))
    found = {}
    for key, places in logs.items():
        both = sorted(
            block for block, side in places if side == sides[0] and (block, sides[1]) in places
        )
        means = [
            np.array([math.fsum(places[b, side]) / len(places[b, side]) for b in both])
            for side in sides
        ]
        if both:
            found[key] = Series(*key, units[key], *means)
    return found


def overall(cells: Sequence[Series]) -> Series:
    """The mean over cells, each with the same weight; all have the same blocks."""
    first = cells[0]
    base = np.mean([cell.base for cell in cells], axis=0)
    candidate = np.mean([cell.candidate for cell in cells], axis=0)
    return Series(first.metric, ALL, first.guard, first.unit, base, candidate)


def effect_of(series: Series, alpha: float, seed: int, *, bootstrap: bool = False) -> Effect:
    """Point (Hodges-Lehmann), sign-flip interval and p; none where blocks are too few for the level."""
    ratios = series.ratios
    flips = SignFlip.of(ratios, seed) if len(ratios) > 1 else None
    interval = flips.interval(alpha) if flips and alpha > 0 else None
    bca = bca_interval(ratios, seed=seed) if bootstrap and len(ratios) <= _BOOTSTRAPPED else None
    mde = detectable(deviation(ratios), len(ratios), alpha)
    return Effect(
        metric=series.metric,
        cell=series.cell,
        guard=series.guard,
        unit=series.unit,
        base=math.exp(float(series.base.mean())),
        candidate=math.exp(float(series.candidate.mean())),
        point=math.exp(hodges_lehmann(ratios)),
        low=math.exp(interval[0]) if interval else None,
        high=math.exp(interval[1]) if interval else None,
        level=1 - alpha,
        p=flips.p() if flips else None,
        p_holm=None,
        mde=math.expm1(mde) if mde is not None else None,
        n=len(ratios),
        bca_low=math.exp(bca[0]) if bca else None,
        bca_high=math.exp(bca[1]) if bca else None,
    )


def with_holm(effects: Sequence[Effect], series: Sequence[Series]) -> list[Effect]:
    """The effects with p values corrected for their number.

    A sign-flip p of n blocks is 2 / 2**n at best, which a correction for many cells would always lift over any level.
    So the correction is applied to the p values of t tests, and the result is never below the sign-flip p itself.
    """
    single = [min(1.0, 2 * min(student_p(s.ratios))) for s in series]
    corrected = holm(single)
    return [
        replace(effect, p_holm=max(effect.p, p)) if effect.p is not None else effect
        for effect, p in zip(effects, corrected, strict=True)
    ]


def guard_effects(
    series: Sequence[Series], bar: float, alpha: float, family_alpha: float, seed: int
) -> list[Effect]:
    """Guards against `bar` (0.98: may not be under 98 % of base). `p`: one-sided, of being at the bar or above it.

    The interval at `alpha` is the wider of the t test's and the sign-flip test's. A guard failed if all of it is under
    the bar and the t test says so at `family_alpha` after correction for the number of guards; it is clear if none of
    it is under the bar; else it is open.
    """
    edge = math.log(bar)
    below = [student_p(s.ratios, edge)[1] for s in series]
    corrected = holm(below)
    return [
        _guard_effect(s, edge, (alpha, family_alpha), seed, p, p_holm)
        for s, p, p_holm in zip(series, below, corrected, strict=True)
    ]


def _guard_effect(
    series: Series, edge: float, alphas: tuple[float, float], seed: int, p: float, p_holm: float
) -> Effect:
    alpha, family_alpha = alphas
    failed = p_holm <= family_alpha
    effect = effect_of(series, alpha, seed)
    interval = cautious_interval(series.ratios, alpha, seed)
    if len(series.ratios) > 1 and effect.low is not None:
        p = max(p, SignFlip.of(series.ratios, seed).one_sided(edge)[1])
    p_holm = max(p, p_holm)
    low, high = interval or (None, None)
    state: GuardState = "open"
    if high is not None and high < edge and failed:
        state = "failed"
    elif low is not None and low >= edge:
        state = "clear"
    return replace(
        effect,
        low=None if low is None else math.exp(low),
        high=None if high is None else math.exp(high),
        p=p,
        p_holm=p_holm,
        state=state,
    )


def cautious_interval(ratios: Floats, alpha: float, seed: int) -> tuple[float, float] | None:
    """The wider of the t interval and, where so few blocks have one, the sign-flip interval (log ratios)."""
    interval = student_interval(ratios, alpha) if alpha > 0 else None
    exact = SignFlip.of(ratios, seed).interval(alpha) if interval else None
    if interval is None or exact is None:
        return interval
    return min(interval[0], exact[0]), max(interval[1], exact[1])


def side_ratio(
    found: Mapping[Key, Series], metric: str, over: str, cells: Sequence[str]
) -> Series | None:
    """Log of `metric` over `over` on each side, mean over the cells that have both; None where there are none."""
    pairs = [
        (found[metric, cell, False], found[over, cell, False])
        for cell in cells
        if (metric, cell, False) in found and (over, cell, False) in found
    ]
    pairs = [(above, below) for above, below in pairs if len(above.base) == len(below.base)]
    if not pairs:
        return None
    base = np.mean([above.base - below.base for above, below in pairs], axis=0)
    candidate = np.mean([above.candidate - below.candidate for above, below in pairs], axis=0)
    return Series(f"{metric}/{over}", "floor", True, "x", base, candidate)
