"""The report as one HTML file: no script, nothing fetched, charts inside, readable in light and dark.

The page's policy forbids scripts and requests, and every text of the record is escaped.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from sparkinfer.evaluation import report_facts as facts
from sparkinfer.evaluation import svg
from sparkinfer.evaluation.record import Effect, Evaluation, Judgement
from sparkinfer.evaluation.report_compare import disagreement
from sparkinfer.evaluation.report_style import STYLE

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
TONE = {
    "BETTER": "good",
    "EQUIVALENT": "plain",
    "WORSE": "bad",
    "MIXED": "open",
    "INCONCLUSIVE": "open",
    "INVALID": "bad",
    "INFRASTRUCTURE": "open",
}
LABEL_TONE = {"REJECT": "bad", "none": "plain", "BASELINE": "plain"}  # the others are tiers
GUARD_STATE = {"clear": "same", "open": "unclear", "failed": "worse"}
GUARD_TONE = {"clear": "good", "open": "open", "failed": "bad", None: "plain"}
GUARD_SIGN = {"clear": "\u2713", "open": "?", "failed": "\u2717", None: "\u00b7"}


def render(
    evaluation: Evaluation,
    judgement: Judgement,
    *,
    receipt: Mapping[str, Any] | None = None,
    other: Evaluation | None = None,
) -> str:
    """Return the page. `receipt` adds its id; `other`, another evaluation of the same change, where they differ."""
    title = facts.title(evaluation)
    sections = [
        _head(evaluation, judgement),
        _paths_changed(judgement),
        _summary(evaluation, judgement, receipt),
        _why(judgement),
        _other(evaluation, other),
        _paired(evaluation, judgement),
        _effects(evaluation, judgement),
        _steps(evaluation),
        _acceptance(evaluation),
        _paths(evaluation),
        _guards(evaluation, judgement),
        _correctness(evaluation),
        _conditions(evaluation),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(facts.headline(judgement))}: {text(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{chr(10).join(part for part in sections if part)}\n</main></body></html>\n"
    )


def text(words: object) -> str:
    """Return plain text as HTML that shows exactly it."""
    return escape(facts.clean(words, 1000))


def _section(title: str, inside: str, note: str = "") -> str:
    told = f'<p class="soft">{text(note)}</p>' if note else ""
    return f"<section><h2>{text(title)}</h2>{told}{inside}</section>"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{text(line)}</li>" for line in lines) + "</ul>"


def _figure(chart: str, title: str = "") -> str:
    return (f"<h3>{text(title)}</h3>" if title else "") + f"<figure>{chart}</figure>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table of plain texts; `numbers` are the columns that stand to the right."""
    if not rows:
        return ""

    def row(tag: str, cells: Sequence[str]) -> str:
        classes = [' class="number"' if place in numbers else "" for place in range(len(cells))]
        inside = (f"<{tag}{c}>{text(cell)}</{tag}>" for c, cell in zip(classes, cells, strict=True))
        return f"<tr>{''.join(inside)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f'<div class="wide"><table class="grid">{row("th", head)}{body}</table></div>'


def _head(evaluation: Evaluation, judgement: Judgement) -> str:
    tone = TONE.get(judgement.verdict, "plain")
    label = judgement.label or "no label"
    kind = LABEL_TONE.get(label.rpartition(":")[2], "good" if judgement.label else "plain")
    when = f"{evaluation.created}, {evaluation.scope.title}, evaluation {evaluation.id}"
    return (
        f'<header><span class="badge {kind}">{text(label)}</span>'
        f'<span class="badge {tone}">{text(judgement.verdict)}</span>'
        f'<h1>{text(facts.title(evaluation))}</h1><p class="soft">{text(when)}</p></header>'
    )


def _paths_changed(judgement: Judgement) -> str:
    shifted = facts.path_lines(judgement)
    if not shifted:
        return ""
    return f'<div class="notice"><strong>The mix of paths changed</strong>{_list(shifted)}</div>'


def _summary(
    evaluation: Evaluation, judgement: Judgement, receipt: Mapping[str, Any] | None
) -> str:
    rows = facts.rows(evaluation, judgement, receipt)
    body = "".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in rows)
    return f'<section><h2>Result</h2><table class="facts">{body}</table></section>'


def _why(judgement: Judgement) -> str:
    reasons = facts.why(judgement)
    return _section("Why", _list(reasons)) if reasons else ""


def _other(evaluation: Evaluation, other: Evaluation | None) -> str:
    if other is None:
        return ""
    return _section("Against the other evaluation", _list(disagreement(evaluation, other)))


def _paired(evaluation: Evaluation, judgement: Judgement) -> str:
    """One chart for all cells together, one for each cell where there are several."""
    primary = evaluation.plan.primary
    own = [e for e in facts.cell_effects(judgement, guard=False) if e.metric == primary]
    delta = 100 * evaluation.plan.delta
    figures = []
    for effect in own:
        values = facts.block_changes(evaluation, primary, effect.cell)
        if len(values) > 1:
            name = "all cells together" if effect.cell == "all" else effect.cell
            chart = svg.paired(
                values, effect.n, 100 * (effect.point - 1), _interval(effect), delta, name
            )
            figures.append(_figure(chart, name))
    if not figures:
        return ""
    small = f"\u00b1{delta:g} %"
    note = (
        "A dot is one block: the candidate's change against the base, per cent. The line is the estimate, "
        f"the coloured area its interval, the grey area changes too small to matter ({small}). "
        "Hollow dots are blocks after the verdict was settled."
    )
    first, *rest = figures
    if len(rest) > 1:
        first += f"<details><summary>By cell ({len(rest)})</summary>{''.join(rest)}</details>"
        rest = []
    return _section(
        f"{facts.name_of(primary)}: paired differences by block", first + "".join(rest), note
    )


def _interval(effect: Effect) -> tuple[float, float] | None:
    """The interval in per cent."""
    if effect.low is None or effect.high is None:
        return None
    return 100 * (effect.low - 1), 100 * (effect.high - 1)


def _state(effect: Effect, delta: float) -> str:
    """Where an interval lies, as a colour and (in the hover text) a word; a guard has the judge's own state."""
    if effect.state is not None:
        return GUARD_STATE[effect.state]
    if effect.low is None or effect.high is None:
        return "unclear"
    if effect.low >= 1 / (1 + delta) and effect.high <= 1 + delta:
        return "same"
    if effect.low > 1:
        return "better"
    return "worse" if effect.high < 1 else "unclear"


def _effects(evaluation: Evaluation, judgement: Judgement) -> str:
    effects = [e for guard in (False, True) for e in facts.cell_effects(judgement, guard=guard)]
    if not effects:
        return ""
    delta = evaluation.plan.delta
    rows = []
    for e in effects:
        kind = " (guard)" if e.guard else ""
        name = facts.clean(f"{e.cell}, {facts.name_of(e.metric)}{kind}", 44)
        rows.append(svg.Interval(name, 100 * (e.point - 1), _interval(e), _state(e, delta)))
    bar = 100 * (evaluation.scope.bars.guard - 1)
    has_guards = any(e.guard for e in effects)
    chart = svg.forest(rows, 100 * delta, bar if has_guards else None, "changes with intervals")
    note = "Point and interval of each metric and cell. The grey area is \u00b1 the least relevant change"
    note += "; the dashed line is the guards' lower limit." if has_guards else "."
    table = _table(
        ("cell", "metric", "base", "candidate", "change", "p (Holm)", "found from", "blocks"),
        [_effect_row(e) for e in effects],
        numbers=(2, 3, 5, 6, 7),
    )
    return _section(
        "Every metric and cell",
        _figure(chart) + f"<details><summary>As a table</summary>{table}</details>",
        note,
    )


def _effect_row(e: Effect) -> tuple[str, ...]:
    return (
        e.cell,
        facts.name_of(e.metric),
        facts.rate(e.base, e.unit),
        facts.rate(e.candidate, e.unit),
        facts.change(e),
        "" if e.p_holm is None else f"{e.p_holm:.4f}",
        "" if e.mde is None else f"{100 * e.mde:.2f} %",
        str(e.n),
    )


def _steps(evaluation: Evaluation) -> str:
    costs = facts.step_costs(evaluation)
    if not costs:
        return ""
    chart = svg.stacked(
        [(facts.clean(f"{cost.cell}, {cost.side}", 40), cost.parts) for cost in costs],
        "ms",
        "cost of a step by part",
    )
    return _section("What a step costs", _figure(chart), "Mean milliseconds of a step, by part.")


def _acceptance(evaluation: Evaluation) -> str:
    found = facts.acceptance(evaluation)
    if not found:
        return ""
    series = [
        (side, facts.clean(f"{cell}, {side}", 40), values) for (cell, side), values in found.items()
    ]
    chart = svg.sides(sorted(series, key=lambda row: row[1]), "", "tokens a step, run by run")
    note = "Tokens a step: what was accepted and the bonus token. A dot is one run, the stroke the mean."
    return _section("Acceptance", _figure(chart) + _slots(evaluation), note)


def _slots(evaluation: Evaluation) -> str:
    """Return a table of how often a draft was kept, by its place after the anchor; nothing where no run told."""
    shares = facts.slot_shares(evaluation)
    most = max((len(places) for _, _, places in shares), default=0)
    head = ("drafts kept, %", *(f"place {place + 1}" for place in range(most)))
    rows = [
        (
            f"{facts.clean(cell, 40)}, {side}",
            *(f"{share:.0f}" for share in places),
            *[""] * (most - len(places)),
        )
        for cell, side, places in shares
    ]
    return _table(head, rows, range(1, most + 1))


def _paths(evaluation: Evaluation) -> str:
    shares = facts.path_shares(evaluation)
    if not shares:
        return ""
    rows = [(facts.clean(f"{cell}, {side}", 40), paths) for cell, side, paths in shares]
    chart = svg.stacked(rows, "%", "share of steps by path", digits=0, total=False)
    return _section("Which paths ran", _figure(chart), "Share of steps by path, per cent.")


def _guards(evaluation: Evaluation, judgement: Judgement) -> str:
    """A matrix: one row a model and metric, one column a context."""
    guards = facts.cell_effects(judgement, guard=True)
    if not guards:
        return ""
    metrics = list(dict.fromkeys(e.metric for e in guards))
    places = list(dict.fromkeys(e.cell for e in guards))
    by_place = {(e.metric, e.cell): e for e in guards}
    head = "".join(f"<th>{text(facts.name_of(metric))}</th>" for metric in metrics)
    body = "".join(
        f"<tr><th>{text(cell)}</th>"
        + "".join(_guard_cell(by_place.get((metric, cell))) for metric in metrics)
        + "</tr>"
        for cell in places
    )
    limit = f"{100 * evaluation.scope.bars.guard:g} % of the base"
    note = f"No rate may fall below {limit}. {facts.guard_text(judgement)}."
    table = f'<div class="wide"><table class="matrix"><tr><th></th>{head}</tr>{body}</table></div>'
    return _section("Guards", table, note)


def _guard_cell(effect: Effect | None) -> str:
    if effect is None:
        return '<td class="plain">not measured</td>'
    interval = ""
    if effect.low is not None and effect.high is not None:
        interval = f"{facts.percent(effect.low)} to {facts.percent(effect.high)}"
    sign, state = GUARD_SIGN.get(effect.state, "\u00b7"), effect.state or "no state"
    return (
        f'<td class="{GUARD_TONE.get(effect.state, "plain")}">{sign} {facts.percent(effect.point)} % '
        f"{text(state)}<small>{text(interval)}</small></td>"
    )


def _correctness(evaluation: Evaluation) -> str:
    rows = [
        (c.check, c.cell, c.side, "passed" if c.passed else "FAILED", c.detail)
        for c in sorted(evaluation.correctness, key=lambda c: c.passed)
    ]
    table = _table(("check", "cell", "side", "outcome", "detail"), rows)
    if len(rows) > 12:
        failed = sum(row[3] == "FAILED" for row in rows)
        title = f"{len(rows)} checks, {failed} failed"
        table = f"<details{' open' if failed else ''}><summary>{title}</summary>{table}</details>"
    return _section("Correctness, before speed", table) if rows else ""


def _conditions(evaluation: Evaluation) -> str:
    plan = evaluation.plan
    planned = [
        ("seed", plan.seed),
        ("blocks, at most", len(plan.blocks)),
        ("looks after", ", ".join(map(str, plan.looks))),
        ("least relevant change", f"{100 * plan.delta:g} %"),
        ("alpha", plan.alpha),
        ("duration", f"{evaluation.seconds:.0f} s"),
        *facts.machine_rows(evaluation),
    ]
    inputs = [(role, f.name, f.sha256, f"{f.bytes:,}") for role, f in evaluation.inputs.items()]
    preflight = [(c.level, c.name, str(c.value), c.note) for c in evaluation.preflight]
    once = [
        (o.what, o.side, str(o.block), f"{o.seconds:.3f} s")
        for o in sorted(evaluation.one_time, key=lambda o: (o.what, o.side, o.block))
    ]
    events = [(e.kind, e.stage, e.side or "", e.message) for e in evaluation.events]
    inside = (
        _table(("", ""), [(str(name), str(value)) for name, value in planned])
        + _titled("Preflight", _table(("level", "check", "value", "note"), preflight))
        + _titled("Inputs", _table(("role", "name", "sha256", "bytes"), inputs, numbers=(3,)))
        + _titled(
            "Costs paid once", _table(("what", "side", "block", "time"), once, numbers=(2, 3))
        )
        + _titled("Events", _table(("kind", "stage", "side", "message"), events))
    )
    return _section(
        "How it was measured", f"<details><summary>All of it</summary>{inside}</details>"
    )


def _titled(title: str, table: str) -> str:
    return f"<h3>{text(title)}</h3>{table}" if table else ""
