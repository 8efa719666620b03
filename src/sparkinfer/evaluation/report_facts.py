"""What a report says, in plain text, whatever its form: rows, reasons and series derived from a record.

Names, prompts and messages in a record come from outside. Nothing here is markup; a form escapes what it prints.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Any

from sparkinfer.evaluation.keys import PublicKey
from sparkinfer.evaluation.path_mix import shift_sentence
from sparkinfer.evaluation.receipt import payload_of, receipt_id, statement_of
from sparkinfer.evaluation.record import (
    Build,
    Correctness,
    Effect,
    Evaluation,
    GuardState,
    Judgement,
    PathShift,
    Sample,
)

NAMES = {
    "dflash_tps": "DFlash",
    "ar_tps": "AR",
    "decode_tps": "decode",
    "prefill_tps": "prefill",
}
PARTS = ("draft", "target", "sample", "rest")
SIDES = ("base", "candidate")
STATES: tuple[GuardState, ...] = ("failed", "open", "clear")
SPEC_AGREE = "spec_agree"
LONGEST = 300
MOST = 1e9


def clean(text: object, longest: int = LONGEST) -> str:
    """Return one line of printable characters: no control, direction or invisible ones, at most `longest`."""
    words = " ".join(str(text).split())
    shown = "".join(c if c.isprintable() else "\ufffd" for c in words)
    return shown if len(shown) <= longest else shown[: longest - 1] + "\u2026"


def sane(value: float) -> float:
    """Return a figure that arithmetic and charts can bear: a record may hold any number."""
    return min(max(value, 0.0), MOST)


def name_of(metric: str) -> str:
    """Return what a metric is called in a table."""
    return NAMES.get(metric, metric)


def percent(ratio: float, digits: int = 1) -> str:
    """Return a ratio as a signed change in per cent, without the sign of per cent."""
    shown = f"{100 * (ratio - 1):+.{digits}f}"
    # A change that rounds to nothing has no sign.
    return (shown[1:] if float(shown) == 0 else shown).replace("-", "\u2212")


def change(effect: Effect) -> str:
    """Return an effect with its interval: `0.914x (−8.6 %), 95 % interval −9.0 to −8.2 %`."""
    point = f"{effect.point:.3f}x ({percent(effect.point)} %)"
    if effect.low is None or effect.high is None:
        return f"{point}, no interval: one figure a side"
    return (
        f"{point}, {level_of(effect)} % interval {percent(effect.low)} to {percent(effect.high)} %"
    )


def level_of(effect: Effect) -> str:
    """Return an interval's confidence in per cent."""
    return f"{100 * effect.level:.1f}".rstrip("0").rstrip(".")


def rate(value: float, unit: str) -> str:
    return f"{value:,.2f} {unit}"


def title(evaluation: Evaluation) -> str:
    """Return the report's subject: scope and both builds."""
    base, candidate = evaluation.base.name, evaluation.candidate.name
    return clean(f"{evaluation.scope.name}: {candidate} against {base}")


def headline(judgement: Judgement) -> str:
    """Return label and verdict."""
    return f"{judgement.label or 'no label'}: {judgement.verdict}"


def build_text(build: Build) -> str:
    """Return a build's name with what identifies it."""
    if build.kind == "none":
        return "none yet"
    known = {
        "commit": build.sha,
        "merged onto": build.merged_onto,
        "tree": build.tree_sha,
        "wheel": build.wheel_sha256,
    }
    told = [f"{name} {value[:12]}" for name, value in known.items() if value]
    told += [f"{name}={value}" for name, value in sorted(build.options.items())]
    return clean(f"{build.name} ({build.kind}{''.join(', ' + text for text in told)})")


def mean_of(evaluation: Evaluation, metric: str, side: str) -> float | None:
    """Return the geometric mean of a metric over cells, the mean of each cell first; None without samples."""
    cells: dict[str, list[float]] = {}
    for sample in evaluation.samples:
        if (sample.metric, sample.side, sample.guard) == (metric, side, False):
            cells.setdefault(sample.cell, []).append(sample.value)
    return geometric_mean(geometric_mean(values) for values in cells.values()) if cells else None


def _primary(evaluation: Evaluation, sample: Sample) -> bool:
    return sample.metric == evaluation.plan.primary and not sample.guard


def accept_of(evaluation: Evaluation, side: str) -> float | None:
    """Return tokens a step of the primary metric, the mean over cells of each cell's mean; None without any."""
    cells = [many for (_, whose), many in acceptance(evaluation).items() if whose == side]
    return fmean(map(fmean, cells)) if cells else None


def rows(
    evaluation: Evaluation, judgement: Judgement, receipt: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    """Return the table's rows, each a name and plain text."""
    unreplicated = " (from published single figures, not replicated)"
    label = judgement.label or "no label: nothing was judged"
    out = [
        ("Label", label + (unreplicated if judgement.basis == "unreplicated" else "")),
        ("Verdict", judgement.verdict),
        *_rates(evaluation, judgement),
        ("Mean accept", _sides(evaluation, accept_of, "{:.3f} tokens a step")),
        *_accuracy_rows(evaluation),
        ("Against AR", floor_text(evaluation, judgement)),
        ("Guards", guard_text(judgement)),
        ("A/A run", aa_text(judgement)),
        ("Plans differ in", plan_text(evaluation)),
        ("Receipt", receipt_text(receipt)),
        ("Candidate", build_text(evaluation.candidate)),
        ("Base", build_text(evaluation.base)),
    ]
    return [(name, text) for name, text in out if text]


def _rates(evaluation: Evaluation, judgement: Judgement) -> list[tuple[str, str]]:
    primary = evaluation.plan.primary
    name = name_of(primary)
    effect = judgement.primary
    out = []
    for side in reversed(SIDES):
        value = getattr(effect, side) if effect else mean_of(evaluation, primary, side)
        if value is not None:
            unit = effect.unit if effect else "tok/s"
            out.append((f"{side.capitalize()} {name}", rate(value, unit)))
    if effect is not None:
        out.append(("Speed-up", change(effect)))
        if effect.mde is not None:
            found = f"a change of {100 * effect.mde:.1f} % would be found in 4 of 5 evaluations"
            out.append(("Resolution", f"{found}; {effect.n} blocks"))
    if primary != "ar_tps":
        out.append(("Candidate AR", _sides(evaluation, _ar, "{:,.2f} tok/s")))
        out.append((f"{name} vs AR", _sides(evaluation, _against_ar, "{:.2f}x")))
    return out


def _ar(evaluation: Evaluation, side: str) -> float | None:
    return mean_of(evaluation, "ar_tps", side)


def _against_ar(evaluation: Evaluation, side: str) -> float | None:
    plain, fast = _ar(evaluation, side), mean_of(evaluation, evaluation.plan.primary, side)
    return fast / plain if plain and fast else None


def _sides(evaluation: Evaluation, of: Any, form: str) -> str:
    """Return `candidate (base x)` of a figure that both sides may have; empty where neither has."""
    candidate, base = of(evaluation, "candidate"), of(evaluation, "base")
    if candidate is None:
        return f"not measured (base {form.format(base)})" if base is not None else ""
    return form.format(candidate) + (f" (base {form.format(base)})" if base is not None else "")


def accuracy(evaluation: Evaluation, side: str = "candidate") -> list[tuple[str, bool, str]]:
    """Return each check of a side: name, passed, and how it came out over its cells."""
    checks: dict[str, list[Correctness]] = {}
    for one in evaluation.correctness:
        if one.side == side:
            checks.setdefault(one.check, []).append(one)
    return [(check, all(c.passed for c in many), _outcome(many)) for check, many in checks.items()]


def agreement(many: Sequence[Correctness]) -> str:
    """Return the original's figure, `640/640 = 1.0000`, over cells that counted tokens; empty where none did."""
    counted = [c.numbers for c in many if "agree" in c.numbers and c.numbers.get("tokens", 0) > 0]
    total = sum(numbers["tokens"] for numbers in counted)
    if not total:
        return ""
    equal = sum(numbers["agree"] * numbers["tokens"] for numbers in counted)
    return f"{equal:.0f}/{total:.0f} = {equal / total:.4f}"


def _outcome(many: Sequence[Correctness]) -> str:
    failed = [one for one in many if not one.passed]
    if failed:
        return f"{len(failed)} of {len(many)} failed; {failed[0].cell}: {clean(failed[0].detail)}"
    return clean(many[0].detail) if len(many) == 1 else f"{len(many)} of {len(many)} passed"


def _accuracy_rows(evaluation: Evaluation) -> list[tuple[str, str]]:
    """The original's accuracy line first, SPEC_AGREE, then the candidate's other checks."""
    first, others = [], []
    for check, passed, text in accuracy(evaluation):
        told = f"{'PASS' if passed else 'FAIL'}: {text}"
        if check == SPEC_AGREE:
            mine = [c for c in evaluation.correctness if (c.check, c.side) == (check, "candidate")]
            share = agreement(mine)
            first.append(("Accuracy", f"SPEC_AGREE {share + ', ' if share else ''}{told}"))
        else:
            others.append((f"Accuracy, {clean(check, 60)}", told))
    return first + others or [("Accuracy", "not checked")]


def guard_text(judgement: Judgement) -> str:
    """Return how the guards came out, the worst of them by name."""
    guards = cell_effects(judgement, guard=True)
    if not guards:
        return "not in this record"
    states = [effect.state for effect in guards]
    worst = min(guards, key=lambda effect: effect.low if effect.low is not None else effect.point)
    counts = [f"{states.count(state)} {state}" for state in STATES]
    told = ", ".join(text for text in counts if not text.startswith("0 ")) or f"{len(guards)} read"
    return f"{told}; lowest: {worst.cell} {name_of(worst.metric)} {change(worst)}"


def aa_text(judgement: Judgement) -> str:
    """Return what the base against itself gave."""
    if judgement.aa_ok is None:
        return "not made"
    found = f": {change(judgement.aa)}" if judgement.aa is not None else ""
    return ("passed" if judgement.aa_ok else "FAILED") + found


def plan_text(evaluation: Evaluation) -> str:
    """Return where the engines' plans of the sides differ, `threads: 2 to 1`; empty where they do not."""
    plans = evaluation.machine.get("plans")
    if not isinstance(plans, Mapping):
        return ""
    base, candidate = (dict(_flat(plans.get(side))) for side in SIDES)
    if not (base and candidate):  # one side never ran
        return ""
    differing = [name for name in base | candidate if base.get(name) != candidate.get(name)]
    told = [f"{n}: {base.get(n, 'none')} to {candidate.get(n, 'none')}" for n in differing[:8]]
    return "; ".join(told + ([f"{len(differing) - 8} more"] if len(differing) > 8 else []))


def _flat(values: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield short names, counts and switches of nested mappings; neither lists nor what was measured."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            if name == "costs":  # measured anew by every process
                continue
            # The level called "plan" says nothing by itself.
            inner = f"{place}.{name}" if place and place != "plan" else str(name)
            yield from _flat(value, inner)
    elif isinstance(values, str | int) and len(str(values)) <= 40:
        yield clean(place, 60), clean(values)


def machine_rows(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return the machine's plain facts; nested ones stay in the record, but graphics cards are named."""
    rows = []
    for name, value in evaluation.machine.items():
        if isinstance(value, str | int | float):
            rows.append((str(name), str(value)))
        elif name == "gpus" and isinstance(value, list):
            named = [
                str(gpu.get("name", gpu)) if isinstance(gpu, Mapping) else str(gpu) for gpu in value
            ]
            rows += [("gpu", gpu) for gpu in named]
    return rows


def receipt_text(receipt: Mapping[str, Any] | None) -> str:
    """Return the receipt's id, level of assurance and key; empty without one."""
    if receipt is None:
        return ""
    predicate = statement_of(payload_of(receipt))["predicate"]
    key = PublicKey.from_hex(predicate["signer"]["ed25519"]).fingerprint
    return f"{receipt_id(receipt)} ({predicate['assurance']['level']}, key {key[:16]})"


def path_lines(judgement: Judgement) -> list[str]:
    """Return one line for each cell in which a path's share of steps changed."""
    places: dict[tuple[str, str], list[PathShift]] = {}
    for shift in judgement.path_mix:
        if shift.changed:
            places.setdefault((shift.cell, shift.metric), []).append(shift)
    return [
        f"{cell}, {name_of(metric)}, share of steps: " + ", ".join(map(_shift, shifts))
        for (cell, metric), shifts in places.items()
    ]


def _shift(shift: PathShift) -> str:
    return f"{shift.path} {100 * shift.base:.0f} to {100 * shift.candidate:.0f} %"


def why(judgement: Judgement) -> list[str]:
    """Return the judge's reasons without those that `path_lines` says already."""
    said = {shift_sentence(shift) for shift in judgement.path_mix if shift.changed}
    return [reason for reason in judgement.reasons if reason not in said]


def is_ratio(effect: Effect) -> bool:
    """Whether an effect is one rate over another of the same side (the floor), not a change."""
    return "/" in effect.metric


def floor_text(evaluation: Evaluation, judgement: Judgement) -> str:
    """Return how speculation came out against plain decoding; empty where that was not judged."""
    floors = [effect for effect in judgement.effects if effect.guard and is_ratio(effect)]
    if not floors:
        return ""
    floor, ends = floors[0], ""
    if floor.low is not None and floor.high is not None:
        ends = f", {level_of(floor)} % interval {floor.low:.3f} to {floor.high:.3f}"
    state = floor.state or "below it, as the base is"
    return f"{floor.point:.3f}x{ends}; at least {evaluation.scope.bars.floor:g}x: {state}"


def cell_effects(judgement: Judgement, *, guard: bool) -> list[Effect]:
    """Return the changes to show; a metric's only cell says what "all" of it says, so it is left out."""
    mine = [e for e in judgement.effects if e.guard == guard and not is_ratio(e)]
    summed = {effect.metric for effect in mine if effect.cell == "all"}
    cells = Counter(effect.metric for effect in mine if effect.cell != "all")
    return [e for e in mine if e.cell == "all" or e.metric not in summed or cells[e.metric] > 1]


def block_changes(evaluation: Evaluation, metric: str, cell: str) -> list[tuple[int, float]]:
    """Return, for each block, its number and the change in per cent: mean logarithms, candidate less base.

    `cell` "all" is the mean over the cells that the block has on both sides.
    """
    logs: dict[tuple[int, str], dict[str, list[float]]] = {}
    for s in evaluation.samples:
        if s.metric == metric and not s.guard and cell in ("all", s.cell):
            logs.setdefault((s.block, s.cell), {}).setdefault(s.side, []).append(math.log(s.value))
    blocks: dict[int, list[float]] = {}
    for (block, _), sides in logs.items():
        if len(sides) == 2:
            blocks.setdefault(block, []).append(fmean(sides["candidate"]) - fmean(sides["base"]))
    return [(block, 100 * math.expm1(fmean(many))) for block, many in sorted(blocks.items())]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Mean milliseconds of a step of one side in one cell, by part; `parts` has one entry where no split is known."""

    cell: str
    side: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def step_costs(evaluation: Evaluation) -> list[StepCost]:
    """Return what a step costs: as measured by part, else from the rate and the tokens a step."""
    out = []
    primary = [s for s in evaluation.samples if _primary(evaluation, s)]
    for cell in dict.fromkeys(s.cell for s in primary):
        for side in SIDES:
            mine = [s for s in primary if (s.cell, s.side) == (cell, side)]
            parts = _step_parts(mine)
            if parts:
                out.append(StepCost(cell, side, parts))
    return out


def _step_parts(samples: Iterable[Sample]) -> dict[str, float]:
    samples = list(samples)
    split = [s.step_ms for s in samples if s.step_ms is not None]
    if split:
        return {part: fmean(sane(getattr(one, part)) for one in split) for part in PARTS}
    whole = [sane(1e3 * sane(s.accept) / s.value) for s in samples if s.accept]
    return {"step": fmean(whole)} if whole else {}


def acceptance(evaluation: Evaluation) -> dict[tuple[str, str], list[float]]:
    """Return tokens a step of every run by (cell, side), in the order of the run."""
    out: dict[tuple[str, str], list[float]] = {}
    for s in sorted(evaluation.samples, key=lambda s: (s.block, s.slot)):
        if s.accept is not None and _primary(evaluation, s):
            out.setdefault((s.cell, s.side), []).append(sane(s.accept))
    return out


def slot_shares(evaluation: Evaluation) -> list[tuple[str, str, list[float]]]:
    """Return cell, side and for each place after the anchor the share of its judged drafts that were kept, per cent."""
    sums: dict[tuple[str, str], list[list[float]]] = {}
    for s in evaluation.samples:
        if s.slots and _primary(evaluation, s):
            mine = sums.setdefault((s.cell, s.side), [])
            mine += [[0.0, 0.0] for _ in range(len(s.slots) - len(mine))]
            for place, (judged, kept) in zip(mine, s.slots, strict=False):
                place[0] += sane(judged)
                place[1] += sane(kept)
    return [
        (cell, side, [100 * kept / judged if judged else 0.0 for judged, kept in places])
        for (cell, side), places in sorted(sums.items())
    ]


def path_shares(evaluation: Evaluation) -> list[tuple[str, str, dict[str, float]]]:
    """Return cell, side and each path's share of the primary metric's steps, per cent."""
    steps: dict[tuple[str, str], dict[str, float]] = {}
    for s in evaluation.samples:
        if _primary(evaluation, s):
            mine = steps.setdefault((s.cell, s.side), {})
            for path, count in s.paths.items():
                mine[path] = mine.get(path, 0.0) + sane(count)
    shares = []
    for (cell, side), paths in sorted(steps.items()):
        total = sum(paths.values())
        if total:
            shares.append((cell, side, {p: 100 * n / total for p, n in sorted(paths.items())}))
    return shares
