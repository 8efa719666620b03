"""From a record to its verdict: a pure function, so that anybody who has the record can derive the verdict again.

Order: what stopped the run, contradictions, correctness, the base against itself, then speed, look by look. Verdicts:

- BETTER, WORSE: the whole interval of the primary metric lies on one side of 1, and not all of it within 1 +- delta.
- EQUIVALENT: the whole interval lies within 1 +- delta.
- MIXED: faster here and slower there, both beyond chance after Holm's correction; or faster with a failed guard.
- INCONCLUSIVE: none of these; says how many more blocks would probably settle it.
- INVALID: speed was not judged: a wrong output, a bench that differs from itself, a record that contradicts its plan.
- INFRASTRUCTURE: the run broke for reasons that are neither side's. It has no label and is to be repeated.

Every bound is symmetric in the logarithm, so exchanging the sides mirrors verdict and intervals. Guards alone are not
symmetric: they watch the candidate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparkinfer.evaluation import labels
from sparkinfer.evaluation.aa import judge_aa
from sparkinfer.evaluation.effects import (
    Series,
    cautious_interval,
    effect_of,
    guard_effects,
    overall,
    series_of,
    side_ratio,
    with_holm,
)
from sparkinfer.evaluation.gates import complete_blocks, correctness, stopped
from sparkinfer.evaluation.path_mix import path_shifts, shift_sentence, step_costs, whole_cost
from sparkinfer.evaluation.record import Effect, Evaluation, Judgement, Verdict
from sparkinfer.evaluation.sequential import Look, plan_looks
from sparkinfer.evaluation.stats import blocks_to_settle, deviation

PLAIN = "ar_tps"  # the speed without a draft, measured in the same process


@dataclass(frozen=True, slots=True)
class _Decision:
    verdict: Verdict
    label: str
    reasons: tuple[str, ...]
    effects: tuple[Effect, ...]
    more_blocks: int | None = None


def judge(evaluation: Evaluation) -> Judgement:
    """The verdict on a record, complete or up to its last complete block.

    No clock, no chance beyond `plan.seed`, nothing read but the record.
    """
    shifts = path_shifts(evaluation.samples)
    correct, wrong = correctness(evaluation)
    aa = judge_aa(evaluation)
    opening = tuple(shift_sentence(shift) for shift in shifts if shift.changed)
    cost = whole_cost(step_costs(evaluation.samples, evaluation.plan.primary))
    opening += (cost.sentence(),) if cost else ()
    plain = Judgement(
        verdict="INVALID",
        label=None,
        basis="none",
        reasons=(),
        effects=(),
        path_mix=shifts,
        correctness_passed=correct,
        aa_ok=aa.ok,
        aa=aa.effect,
        looks_used=0,
        more_blocks=None,
    )
    stop = stopped(evaluation)
    if stop is not None:
        label = labels.REJECT if stop.reject else None
        return replace(plain, verdict=stop.verdict, label=label, reasons=stop.reasons)
    if not correct:
        label = labels.REJECT if wrong.candidate else None
        return replace(plain, label=label, reasons=wrong.reasons)
    if aa.ok is False:
        return replace(plain, reasons=aa.reasons)
    if evaluation.base.kind == "none":
        reason = "there is no base to compare with; the candidate becomes the baseline"
        return replace(plain, verdict="INCONCLUSIVE", label=labels.BASELINE, reasons=(reason,))
    if evaluation.source == "published":
        return _published(evaluation, plain, opening)
    return _by_looks(evaluation, plain, opening)


def decided(evaluation: Evaluation) -> bool:
    """Whether measuring may stop here: a look was reached and it settled the verdict, or nothing can be judged."""
    return judge(evaluation).verdict != "INCONCLUSIVE"


def _published(evaluation: Evaluation, plain: Judgement, opening: tuple[str, ...]) -> Judgement:
    """Single figures: the original's rule on the points, marked."""
    found = series_of(evaluation.samples, len(evaluation.plan.blocks))
    seed, bars = evaluation.plan.seed, evaluation.scope.bars
    effects = [effect_of(series, 0.0, seed) for series in found.values()]
    cells = _primary_cells(evaluation, found)
    if not cells:
        return replace(plain, reasons=("a side has no figure of the primary metric",))
    total = effect_of(overall(cells), 0.0, seed)
    failed = [effect for effect in effects if effect.guard and effect.point < bars.guard]
    figures = labels.Published(
        total.base, total.candidate, guards_held=not failed, reject=bars.reject
    )
    reasons = [
        f"{total.metric}: {total.candidate:.2f} against {total.base:.2f} {total.unit}"
        f" ({figures.gain:+.1%})",
        *(f"guard {e.metric} {e.cell}: {e.point:.1%} of base" for e in failed),
        labels.UNREPLICATED,
    ]
    return replace(
        plain,
        verdict="INCONCLUSIVE",
        label=figures.label,
        basis="unreplicated",
        reasons=(*opening, *reasons),
        effects=(total, *effects),
    )


def _by_looks(evaluation: Evaluation, plain: Judgement, opening: tuple[str, ...]) -> Judgement:
    """Go through the looks that were reached; the first that settles the verdict counts."""
    plan = evaluation.plan
    done = complete_blocks(evaluation)
    looks = [look for look in plan_looks(plan.looks, plan.alpha) if look.blocks <= done]
    if not looks:
        reason = f"{done} complete blocks; the first look is after {plan.looks[0]}"
        return replace(
            plain,
            verdict="INCONCLUSIVE",
            label=labels.NONE,
            reasons=(*opening, reason),
            more_blocks=plan.looks[0] - done,
        )
    for used, look in enumerate(looks, 1):
        decision = _decide(evaluation, look)
        if decision.verdict != "INCONCLUSIVE" or used == len(looks):
            break
    reasons = [*opening, *decision.reasons]
    if done > look.blocks:
        reasons.append(f"settled after {look.blocks} blocks; {done - look.blocks} more are unused")
    return replace(
        plain,
        verdict=decision.verdict,
        label=decision.label,
        basis="interval" if decision.effects[0].low is not None else "none",
        reasons=tuple(reasons),
        effects=decision.effects,
        looks_used=used,
        more_blocks=decision.more_blocks,
    )


def _decide(evaluation: Evaluation, look: Look) -> _Decision:
    """The verdict of one look, from its blocks alone."""
    plan, seed, alpha = evaluation.plan, evaluation.plan.seed, look.alpha
    found = series_of(evaluation.samples, look.blocks)
    cells = _primary_cells(evaluation, found)
    whole = overall(cells)
    total = effect_of(whole, alpha, seed, bootstrap=True)
    total = replace(total, p_holm=total.p)
    parts = with_holm([effect_of(cell, alpha, seed) for cell in cells], cells)
    others = [s for s in found.values() if not s.guard and s.metric != plan.primary]
    others_effects = with_holm([effect_of(s, alpha, seed) for s in others], others)
    guards = _guards(evaluation, look, found)
    effects = (total, *parts, *others_effects, *guards)
    verdict, reasons = _verdict(evaluation, total, parts, guards, alpha)
    more = None
    if verdict == "INCONCLUSIVE" and not _missing_guards(evaluation, guards):
        more = _more_blocks(evaluation, whole, total, guards, found)
        reasons.append(_more_sentence(more))
    label = _label(evaluation, verdict, total, parts, guards, alpha)
    return _Decision(verdict, label, tuple(reasons), effects, more)


def _primary_cells(
    evaluation: Evaluation, found: dict[tuple[str, str, bool], Series]
) -> list[Series]:
    keys = [(evaluation.plan.primary, cell, False) for cell in evaluation.scope.cells]
    return [found[key] for key in keys if key in found]


def _guards(
    evaluation: Evaluation, look: Look, found: dict[tuple[str, str, bool], Series]
) -> list[Effect]:
    """The guards that were measured, and the floor under speculation."""
    scope, seed = evaluation.scope, evaluation.plan.seed
    series = [s for s in found.values() if s.guard]
    family = look.guard_alpha / 2  # half for the guards, half for the floor
    effects = guard_effects(series, scope.bars.guard, look.alpha, family, seed)
    names = {metric.name for metric in scope.metrics}
    if PLAIN in names and scope.primary != PLAIN:
        ratio = side_ratio(found, scope.primary, PLAIN, scope.cells)
        if ratio is not None:
            effects.append(_floor(ratio, scope.bars.floor, (look.alpha, family), seed))
    return effects


def _floor(ratio: Series, bar: float, alphas: tuple[float, float], seed: int) -> Effect:
    """Speculative over plain speed of the candidate; no state where the base fails as well: then it is no change."""
    edge = math.log(bar)
    # Against a side that is 1 everywhere the "ratio" is the candidate's own.
    own = replace(ratio, base=0 * ratio.base)
    effect = guard_effects([own], bar, *alphas, seed)[0]
    base = cautious_interval(ratio.base, alphas[0], seed)
    state = effect.state
    if base is not None and base[1] < edge:
        state = None
    return replace(effect, base=math.exp(float(ratio.base.mean())), state=state)


def _direction(effect: Effect, alpha: float, delta: float, *, family: bool) -> int:
    """1 for faster, -1 for slower, 0 for neither; within delta, or in a family not beyond its correction: 0."""
    if effect.low is None or effect.high is None or _within(effect, delta):
        return 0
    if family and (effect.p_holm is None or effect.p_holm > alpha):
        return 0
    if effect.low > 1:
        return 1
    return -1 if effect.high < 1 else 0


def _within(effect: Effect, delta: float) -> bool:
    """Whether the interval lies within 1 +- delta, measured alike in both directions (1 / (1 + delta) below)."""
    if effect.low is None or effect.high is None:
        return False
    edge = math.log1p(delta)
    return math.log(effect.low) >= -edge and math.log(effect.high) <= edge


def _verdict(
    evaluation: Evaluation,
    total: Effect,
    parts: Sequence[Effect],
    guards: Sequence[Effect],
    alpha: float,
) -> tuple[Verdict, list[str]]:
    delta, bar = evaluation.plan.delta, evaluation.scope.bars.guard
    direction = _direction(total, alpha, delta, family=False)
    by_cell = {e.cell: _direction(e, alpha, delta, family=True) for e in parts}
    faster = [cell for cell, sign in by_cell.items() if sign > 0]
    slower = [cell for cell, sign in by_cell.items() if sign < 0]
    failed = [guard for guard in guards if guard.state == "failed"]
    reasons = [_effect_sentence(total)]
    reasons += [f"guard failed: {_effect_sentence(guard)}" for guard in failed]
    missing = _missing_guards(evaluation, guards)
    reasons += [f"guard not measured: {name}" for name in missing]
    doubtful = [g for g in guards if g.state == "open" and g.point < _bar_of(evaluation, g)]
    reasons += [f"guard not settled, {g.point:.1%} so far: {_name(g)}" for g in doubtful]
    unproven = [g for g in guards if g.state == "open" and g not in doubtful]
    if unproven:
        names = ", ".join(_name(guard) for guard in unproven)
        reasons.append(f"guards that look fine but are not proven above {bar:.0%}: {names}")
    if (
        (direction > 0 and (slower or failed))
        or (direction < 0 and faster)
        or (direction == 0 and faster and slower)
    ):
        up, down = ", ".join(faster) or "the whole", ", ".join(slower) or "guards"
        if direction < 0 and not slower:
            down = "the whole"
        reasons.append(f"faster in {up}; slower in {down}")
        return "MIXED", reasons
    if direction < 0 or failed:
        return "WORSE", reasons
    if direction > 0 and not missing and not doubtful:
        return "BETTER", reasons
    if direction == 0 and _within(total, delta) and not missing and not doubtful:
        one_sided = ", ".join(faster + slower)
        reasons += [f"equal on the whole, but not in {one_sided}"] if one_sided else []
        return "EQUIVALENT", reasons
    return "INCONCLUSIVE", reasons


def _bar_of(evaluation: Evaluation, guard: Effect) -> float:
    bars = evaluation.scope.bars
    return bars.floor if guard.cell == "floor" else bars.guard


def _missing_guards(evaluation: Evaluation, guards: Sequence[Effect]) -> list[str]:
    measured = {(effect.metric, effect.cell) for effect in guards}
    return [
        f"{metric} {guard.cell(context)}"
        for guard in evaluation.scope.guards
        for context in guard.contexts
        for metric in guard.metrics
        if (metric, guard.cell(context)) not in measured
    ]


def _label(
    evaluation: Evaluation,
    verdict: Verdict,
    total: Effect,
    parts: Sequence[Effect],
    guards: Sequence[Effect],
    alpha: float,
) -> str:
    bars = evaluation.scope.bars
    slower = [
        part
        for part in parts
        if _direction(part, alpha, evaluation.plan.delta, family=True) < 0
        and part.high is not None
        and part.high < bars.reject
    ]
    if (slower and verdict in ("MIXED", "WORSE")) or any(g.state == "failed" for g in guards):
        return labels.REJECT
    if total.low is None or total.high is None:
        return labels.NONE
    label = labels.label_of_interval(total.low, total.high, bars.reject)
    if label != labels.REJECT and verdict != "BETTER":
        return labels.NONE
    return label


def _more_blocks(
    evaluation: Evaluation,
    whole: Series,
    total: Effect,
    guards: Sequence[Effect],
    found: dict[tuple[str, str, bool], Series],
) -> int | None:
    """Blocks beyond those of this look that would probably settle the primary metric and every doubtful guard."""
    plan = evaluation.plan
    alpha = plan_looks(plan.looks, plan.alpha)[-1].alpha or plan.alpha
    least = total.n + 1
    needed = [
        blocks_to_settle(
            math.log(total.point),
            deviation(whole.ratios),
            math.log1p(plan.delta),
            alpha,
            least=least,
        )
    ]
    for guard in guards:
        key = guard.metric, guard.cell, True
        if guard.state == "open" and guard.point < _bar_of(evaluation, guard) and key in found:
            gap = math.log(guard.point / _bar_of(evaluation, guard))
            spread = deviation(found[key].ratios)
            needed.append(blocks_to_settle(gap, spread, 0.0, alpha, least=guard.n + 1))
    counts = [count for count in needed if count is not None]
    return max(counts) - total.n if len(counts) == len(needed) else None


def _more_sentence(more: int | None) -> str:
    if more is None:
        return "inconclusive: no practical number of blocks would settle it at this noise"
    return f"inconclusive: about {more} more blocks would probably settle it"


def _name(effect: Effect) -> str:
    return f"{effect.metric} {effect.cell}"


def _effect_sentence(effect: Effect) -> str:
    if effect.low is None or effect.high is None:
        return f"{_name(effect)}: {effect.point:.4f}, no interval from {effect.n} blocks"
    interval = f"[{effect.low:.4f}, {effect.high:.4f}] at {effect.level:.1%}"
    return f"{_name(effect)}: {effect.point:.4f} {interval}, {effect.n} blocks"
