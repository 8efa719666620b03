"""Which paths the steps took on each side and what a step cost: a change of either comes before any speed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparkinfer.evaluation.record import PathShift, Sample
from sparkinfer.evaluation.stats import holm, student_p

SHIFT = 0.05  # share of steps; less is the planner's daily work
NEW = 0.01  # a path that one side never takes and the other takes this often
ALPHA = 0.05
LEAST_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class StepCost:
    """Tokens a step and milliseconds a step of both sides, means over the samples."""

    cell: str
    base_accept: float
    candidate_accept: float
    base_ms: float
    candidate_ms: float

    def sentence(self) -> str:
        """What separates the two: acceptance, step cost or both."""
        same = abs(self.candidate_accept / self.base_accept - 1) < 0.01
        accepted = (
            f"at equal acceptance ({self.base_accept:.3f} tokens a step)"
            if same
            else f"with {self.candidate_accept:.3f} against {self.base_accept:.3f} tokens a step"
        )
        change = round(self.candidate_ms / self.base_ms - 1, 3) + 0.0  # no "-0.0%"
        costs = f"{self.candidate_ms:.2f} ms against {self.base_ms:.2f} ms ({change:+.1%})"
        return f"{self.cell}: {accepted}, a step costs {costs}"


def path_shifts(samples: Iterable[Sample]) -> tuple[PathShift, ...]:
    """Shares of every path in every metric and cell; changed ones first, the largest change before the others.

    A share has changed if it moved by more than `SHIFT`, or from nothing to `NEW`, and no sample of one side has a
    share that the other side has too; or by more than `SHIFT`, and blocks differ beyond chance (t test, corrected for
    the number of shares).
    """
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        if sum(sample.paths.values()) > 0:
            groups.setdefault((sample.metric, sample.cell), []).append(sample)
    found = [pair for key, group in groups.items() for pair in _group_shifts(*key, group)]
    corrected = holm([p for _, p in found])
    shifts = [
        replace(shift, changed=True)
        if p <= ALPHA and abs(shift.candidate - shift.base) > SHIFT
        else shift
        for (shift, _), p in zip(found, corrected, strict=True)
    ]
    return tuple(
        sorted(
            shifts,
            key=lambda s: (not s.changed, -abs(s.candidate - s.base), s.metric, s.cell, s.path),
        )
    )


def _group_shifts(
    metric: str, cell: str, samples: Sequence[Sample]
) -> list[tuple[PathShift, float]]:
    """The shifts of one figure, each with the p value of no difference between the sides' blocks."""
    found = []
    for path in sorted({path for sample in samples for path in sample.paths}):
        base, candidate = (
            [sample.paths.get(path, 0) / sum(sample.paths.values()) for sample in side]
            for side in _sides(samples)
        )
        if not base or not candidate:
            continue
        pooled = [_pooled(side, path) for side in _sides(samples)]
        shift = PathShift(metric, cell, path, pooled[0], pooled[1], _differs(base, candidate))
        found.append((shift, _block_p(samples, path)))
    return found


def _block_p(samples: Sequence[Sample], path: str) -> float:
    """Two-sided p of the t test over blocks, of equal shares; 1 where there are too few."""
    blocks: dict[int, list[Sample]] = {}
    for sample in samples:
        blocks.setdefault(sample.block, []).append(sample)
    pairs = [_sides(block) for block in blocks.values()]
    gaps = [_pooled(c, path) - _pooled(b, path) for b, c in pairs if b and c]
    return min(1.0, 2 * min(student_p(gaps))) if len(gaps) >= LEAST_BLOCKS else 1.0


def _sides(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    base = [sample for sample in samples if sample.side == "base"]
    return base, [sample for sample in samples if sample.side == "candidate"]


def _pooled(samples: Sequence[Sample], path: str) -> float:
    total = sum(sum(sample.paths.values()) for sample in samples)
    return sum(sample.paths.get(path, 0) for sample in samples) / total


def _differs(base: Sequence[float], candidate: Sequence[float]) -> bool:
    """Whether no sample of one side has a share that the other side has too, and the gap matters."""
    lower, upper = sorted((base, candidate), key=lambda shares: sum(shares) / len(shares))
    if max(lower) >= min(upper):
        return False
    gap = sum(upper) / len(upper) - sum(lower) / len(lower)
    return gap > SHIFT or (max(lower) == 0 and min(upper) >= NEW)


def shift_sentence(shift: PathShift) -> str:
    where = f"{shift.metric}, {shift.cell}"
    shares = f"{shift.base:.1%} of the steps on base, {shift.candidate:.1%} on candidate"
    return f"path mix changed in {where}: {shift.path} took {shares}"


def step_costs(samples: Iterable[Sample], metric: str) -> tuple[StepCost, ...]:
    """Acceptance and step cost by cell, where samples of both sides say how many tokens a step gave.

    Milliseconds a step are 1000 * tokens a step / tokens a second.
    """
    cells: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.metric == metric and not sample.guard and sample.accept:
            cells.setdefault(sample.cell, []).append(sample)
    costs = []
    for cell, group in cells.items():
        base, candidate = _sides(group)
        if base and candidate:
            accepts = [_mean(side, lambda s: s.accept or 0.0) for side in (base, candidate)]
            ms = [
                _mean(side, lambda s: 1000 * (s.accept or 0.0) / s.value)
                for side in (base, candidate)
            ]
            costs.append(StepCost(cell, *accepts, *ms))
    return tuple(costs)


def whole_cost(costs: Sequence[StepCost]) -> StepCost | None:
    """The mean over cells, each with the same weight; None if there are none."""
    if not costs:
        return None
    names = ("base_accept", "candidate_accept", "base_ms", "candidate_ms")
    means = [float(np.mean([getattr(cost, name) for cost in costs])) for name in names]
    return StepCost("all", *means) if len(costs) > 1 else costs[0]


def _mean(samples: Sequence[Sample], figure: Callable[[Sample], float]) -> float:
    return float(np.mean([figure(sample) for sample in samples]))
