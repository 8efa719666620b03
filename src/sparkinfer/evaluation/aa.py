"""The base against itself: a bench that finds a difference there, or that is too noisy to find any, judges nothing."""

import math
from dataclasses import dataclass, replace

from sparkinfer.evaluation.effects import effect_of, overall, series_of
from sparkinfer.evaluation.record import Effect, Evaluation
from sparkinfer.evaluation.sequential import plan_looks
from sparkinfer.evaluation.stats import detectable, deviation, student_interval, student_p

ALPHA = 0.01  # a tripwire, not a measurement: it must hardly ever stop an evaluation for nothing


@dataclass(frozen=True, slots=True)
class AA:
    """`ok` None: the scope asks for no such blocks."""

    ok: bool | None
    effect: Effect | None
    reasons: tuple[str, ...]


def judge_aa(evaluation: Evaluation) -> AA:
    """Whether a1 and a2 agree, and whether the noise allows to find anything.

    Fails if the t interval at 99 % excludes 1 and the point is beyond delta, or if the change that all blocks would
    detect in 4 of 5 cases, at the noise seen here, is above the scope's `noise_limit`.
    """
    scope, plan = evaluation.scope, evaluation.plan
    if scope.aa_blocks == 0 or evaluation.source == "published":
        return AA(None, None, ())
    found = series_of(evaluation.aa, scope.aa_blocks, ("a1", "a2"))
    keys = [(plan.primary, cell, False) for cell in scope.cells]
    cells = [found[key] for key in keys if key in found]
    complete = len(cells) == len(keys) and all(len(c.base) == scope.aa_blocks for c in cells)
    if not complete:
        reason = f"the base was not compared with itself in {scope.aa_blocks} complete blocks"
        return AA(False, None, (reason,))
    whole = overall(cells)
    interval = student_interval(whole.ratios, ALPHA)
    effect = replace(
        effect_of(whole, ALPHA, plan.seed),
        low=math.exp(interval[0]) if interval else None,
        high=math.exp(interval[1]) if interval else None,
        p=min(1.0, 2 * min(student_p(whole.ratios))),
    )
    last = plan_looks(plan.looks, plan.alpha)[-1]
    smallest = detectable(deviation(whole.ratios), last.blocks, last.alpha)
    effect = replace(effect, mde=None if smallest is None else math.expm1(smallest))
    biased = interval is not None and (interval[0] > 0 or interval[1] < 0)
    if biased and abs(math.log(effect.point)) > math.log1p(plan.delta):
        reason = (
            f"the base differs from itself: {effect.point:.4f}"
            f" [{effect.low:.4f}, {effect.high:.4f}] at 99 %"
        )
        return AA(False, effect, (reason,))
    if effect.mde is not None and effect.mde > scope.noise_limit:
        reason = (
            f"too noisy: {last.blocks} blocks would find changes from {effect.mde:.1%} up;"
            f" the scope allows {scope.noise_limit:.1%}"
        )
        return AA(False, effect, (reason,))
    return AA(True, effect, ())
