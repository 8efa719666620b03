"""The report as Markdown, for a pull request: one table, what changed on the way, reasons in words.

Every text of the record is escaped, so that a branch's name cannot become a link, a mention or a table cell.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparkinfer.evaluation import report_facts as facts
from sparkinfer.evaluation.record import Effect, Evaluation, Judgement
from sparkinfer.evaluation.report_compare import disagreement

# What Markdown or GitHub gives a meaning to: marks, tables, HTML, mentions, numbers of issues, mathematics; then
# addresses and emoji; emphasis by underscores; a list or a heading at the start. The rest stays readable as it is.
SPECIAL = re.compile(
    r"[\\`*{}\[\]<>|~@&#$]"
    r"|:(?=//)|(?<![0-9]):(?=[\w+-]+:)|(?<=www)\."
    r"|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])"
    r"|^[-+=]|(?<=^\d)[.)](?= )",
    re.IGNORECASE,
)
LABEL = re.compile(r"eval-dflash:[A-Za-z]+")


def render(
    evaluation: Evaluation,
    judgement: Judgement,
    *,
    receipt: Mapping[str, Any] | None = None,
    other: Evaluation | None = None,
) -> str:
    """Return the report. `receipt` adds its id; `other`, another evaluation of the same change, where they differ."""
    parts = [f"### {_headline(judgement)}", escape(facts.title(evaluation))]
    shifted = facts.path_lines(judgement)
    if shifted:
        parts.append(_list("**The mix of paths changed:**", shifted))
    parts.append(_table(("", ""), facts.rows(evaluation, judgement, receipt)))
    reasons = facts.why(judgement)
    if reasons:
        parts.append(_list("**Why:**", reasons))
    if other is not None:
        parts.append(_list("**Against the other evaluation:**", disagreement(evaluation, other)))
    cells = facts.cell_effects(judgement, guard=False)
    if len(cells) > 1:
        parts.append(_effects("Every metric and cell", cells))
    guards = facts.cell_effects(judgement, guard=True)
    if guards:
        parts.append(_effects(f"Guards ({len(guards)})", guards))
    parts.append(_details("How it was measured", _list("", _conditions(evaluation))))
    return "\n\n".join(part for part in parts if part) + "\n"


def escape(text: str) -> str:
    """Return plain text as Markdown that shows exactly it, on one line."""
    return SPECIAL.sub(lambda found: f"&#{ord(found[0])};", facts.clean(text, 1000))


def _headline(judgement: Judgement) -> str:
    label = judgement.label or "no label"
    return f"{label if LABEL.fullmatch(label) else escape(label)}: {escape(judgement.verdict)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(escape(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _list(title: str, lines: Sequence[str]) -> str:
    items = "\n".join(f"- {escape(line)}" for line in lines)
    return f"{title}\n\n{items}" if title else items


def _details(title: str, inside: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n\n{inside}\n\n</details>"


def _effects(title: str, effects: Sequence[Effect]) -> str:
    head = ("cell", "metric", "base", "candidate", "change", "p (Holm)", "blocks", "state")
    return _details(title, _table(head, [_effect(effect) for effect in effects]))


def _effect(effect: Effect) -> tuple[str, ...]:
    return (
        effect.cell,
        facts.name_of(effect.metric),
        facts.rate(effect.base, effect.unit),
        facts.rate(effect.candidate, effect.unit),
        facts.change(effect),
        "" if effect.p_holm is None else f"{effect.p_holm:.4f}",
        str(effect.n),
        effect.state or "",
    )


def _conditions(evaluation: Evaluation) -> list[str]:
    plan = evaluation.plan
    lines = [
        f"evaluation {evaluation.id}, {evaluation.created}, {evaluation.seconds:.0f} s",
        f"seed {plan.seed}; up to {len(plan.blocks)} blocks, looks after {', '.join(map(str, plan.looks))}; "
        f"least relevant change {100 * plan.delta:g} %, alpha {plan.alpha:g}",
    ]
    lines += [f"{name}: {value}" for name, value in facts.machine_rows(evaluation)]
    lines += [
        f"{check.level}: {check.name} {check.value} {check.note}".rstrip()
        for check in evaluation.preflight
        if check.level != "ok"
    ]
    lines += [
        f"{role}: {file.name}, sha256 {file.sha256}" for role, file in evaluation.inputs.items()
    ]
    lines += [f"{event.kind} ({event.stage}): {event.message}" for event in evaluation.events]
    return lines
