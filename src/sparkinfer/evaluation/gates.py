"""What must hold before speed is judged: the run went through, the record follows its plan, the output is right."""

from dataclasses import dataclass

from sparkinfer.evaluation import schedule
from sparkinfer.evaluation.record import Bars, Correctness, Evaluation, Verdict


@dataclass(frozen=True, slots=True)
class Stop:
    """Why nothing is judged; `reject`: the candidate is to blame."""

    verdict: Verdict
    reasons: tuple[str, ...]
    reject: bool = False


@dataclass(frozen=True, slots=True)
class Wrong:
    """Failed checks; `candidate`: one of them is the candidate's."""

    candidate: bool
    reasons: tuple[str, ...]


def stopped(evaluation: Evaluation) -> Stop | None:
    """The first reason to judge nothing: infrastructure, a side that broke, a record that contradicts itself."""
    broken = [f"{e.stage}: {e.message}" for e in evaluation.events if e.kind == "infrastructure"]
    broken += [
        f"preflight refused: {c.name} is {c.value}" + (f" ({c.note})" if c.note else "")
        for c in evaluation.preflight
        if c.level == "refuse"
    ]
    if broken:
        return Stop("INFRASTRUCTURE", tuple(broken))
    failures = [event for event in evaluation.events if event.kind == "failure"]
    if failures:
        reasons = tuple(f"{e.side or 'a side'} failed, {e.stage}: {e.message}" for e in failures)
        return Stop("INVALID", reasons, any(e.side == "candidate" for e in failures))
    contradictions = (
        _plan_against_scope(evaluation) + _plan_against_seed(evaluation) + _against_plan(evaluation)
    )
    return Stop("INVALID", tuple(contradictions)) if contradictions else None


def _plan_against_scope(evaluation: Evaluation) -> list[str]:
    plan, scope = evaluation.plan, evaluation.scope
    pairs = [
        ("looks", plan.looks, scope.looks),
        ("alpha", plan.alpha, scope.alpha),
        ("delta", plan.delta, scope.delta),
        ("primary", plan.primary, scope.primary),
    ]
    return [
        f"the plan's {name} is {ours}, its scope's {theirs}"
        for name, ours, theirs in pairs
        if ours != theirs
    ]


def _plan_against_seed(evaluation: Evaluation) -> list[str]:
    """An order that somebody chose would favour a side on a machine that drifts."""
    plan, scope = evaluation.plan, evaluation.scope
    if evaluation.source == "published":
        single = len(plan.blocks) == 1
        return [] if single else ["published figures are one a side, and the plan has more blocks"]
    if plan.blocks != schedule.blocks(plan.seed, len(plan.blocks)):
        return [f"the plan's order is not the one that its seed {plan.seed} gives"]
    coins = schedule.aa_blocks(plan.seed, scope.aa_blocks)
    for number, sample in enumerate(evaluation.aa):
        order = coins[sample.block] if sample.block < len(coins) else ()
        if sample.slot >= len(order) or order[sample.slot] != sample.side:
            return [f"aa sample {number} is not in the order that the seed {plan.seed} gives"]
    return []


def _against_plan(evaluation: Evaluation) -> list[str]:
    """Samples out of the announced order, in unknown cells, or after a gap."""
    blocks = evaluation.plan.blocks
    for number, sample in enumerate(evaluation.samples):
        order = blocks[sample.block] if sample.block < len(blocks) else ()
        planned = order[sample.slot] if sample.slot < len(order) else "nothing"
        if sample.side != planned:
            place = f"block {sample.block}, place {sample.slot}"
            return [f"sample {number} is {sample.side}'s in {place}; planned was {planned}"]
        primary = sample.metric == evaluation.plan.primary and not sample.guard
        if primary and sample.cell not in evaluation.scope.cells:
            return [f"sample {number} is of the cell {sample.cell!r}, which the scope has not"]
    return _gaps(evaluation)


def _gaps(evaluation: Evaluation) -> list[str]:
    complete = complete_blocks(evaluation)
    beyond = [s.block for s in evaluation.samples if s.block > complete]
    if not beyond or evaluation.source == "published":
        return []
    return [f"block {complete} is incomplete, yet there are samples of block {max(beyond)}"]


def complete_blocks(evaluation: Evaluation) -> int:
    """How many blocks from the first on have every cell of the primary metric in every place."""
    plan, cells = evaluation.plan, evaluation.scope.cells
    there = {
        (s.block, s.slot, s.cell)
        for s in evaluation.samples
        if s.metric == plan.primary and not s.guard
    }
    for number, order in enumerate(plan.blocks):
        if not all((number, slot, cell) in there for slot in range(len(order)) for cell in cells):
            return number
    return len(plan.blocks)


def correctness(evaluation: Evaluation) -> tuple[bool, Wrong]:
    """Whether every check passed, by its own word and by the scope's bars; no check at all is a failure."""
    bars = evaluation.scope.bars
    failed = [(c, why) for c in evaluation.correctness if (why := _failure(c, bars))]
    reasons = [f"{c.check} {c.cell} of {c.side}: {why}" for c, why in failed]
    candidate = any(c.side == "candidate" for c, _ in failed)
    checked = any(c.side == "candidate" for c in evaluation.correctness)
    if not checked and evaluation.source == "measured":
        reasons.append("the candidate's output was not checked")
    return not reasons, Wrong(candidate, tuple(reasons))


def _failure(check: Correctness, bars: Bars) -> str | None:
    """What is wrong, None if nothing. The numbers count even where the check says that it passed."""
    limits = (
        ("agree", bars.agree, 1, "at least"),
        ("top1", bars.top1, 1, "at least"),
        ("kl", bars.kl, -1, "at most"),
    )
    for name, bar, sign, words in limits:
        number = check.numbers.get(name)
        if number is not None and sign * number < sign * bar:
            return f"{name} is {number:g}; expected {words} {bar:g}"
    return None if check.passed else check.detail or "failed"
