"""From a record to what people get: judgement, reports, receipt, a line in the ledger, and an exit code."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkinfer.evaluation import dsse, ledger, receipt, report_html, report_markdown
from sparkinfer.evaluation.labels import REJECT
from sparkinfer.evaluation.record import Evaluation, Judgement
from sparkinfer.evaluation.verdict import judge

if TYPE_CHECKING:
    from sparkinfer.evaluation.keys import SigningKey

# `sparkinfer eval` ends with one of these, or with the program's own: 2 wrong use (unknown revision, dirty tree, a
# build that is too old to be measured), 73 the candidate cannot be merged, 130 Ctrl-C.
EXIT_JUDGED = 0
EXIT_REJECTED = 1  # only where it is asked for
EXIT_INFRASTRUCTURE = 74
EXIT_INVALID = 75

MARKDOWN, PAGE, RECEIPT = "report.md", "report.html", "receipt.json"


@dataclass(frozen=True, slots=True)
class Signing:
    """What signs a receipt. `run`: the address of the CI's run, "" where no CI signs."""

    key: "SigningKey"
    ledger: Path
    run: str = ""


def begin(evaluation: Evaluation, place: Path) -> ledger.Entry:
    """Write the ledger's line before anything is measured; a resumed evaluation has one already."""
    if place.exists():
        mine = [
            entry
            for entry in ledger.read(place)
            if entry.kind == "started" and entry.evaluation == evaluation.id
        ]
        if mine:
            return mine[0]
    return ledger.start(
        place,
        evaluation.id,
        evaluation.scope,
        evaluation.plan,
        evaluation.base,
        evaluation.candidate,
    )


def finish(
    evaluation: Evaluation,
    folder: Path,
    *,
    signing: Signing | None = None,
    started: ledger.Entry | None = None,
) -> Judgement:
    """Judge the record and write the reports, and with `signing` the receipt and its line in the ledger.

    What broke for reasons that are neither side's has no receipt; the ledger says that it was given up.
    """
    judgement = judge(evaluation)
    signed = None
    if signing is not None and judgement.verdict == "INFRASTRUCTURE":
        ledger.abort(signing.ledger, evaluation.id, "; ".join(judgement.reasons)[:500])
    elif signing is not None:
        signed = receipt.issue(
            evaluation,
            judgement,
            signing.key,
            assurance="ci" if signing.run else "self-signed",
            run=signing.run,
            started=started,
        )
        receipt.write(folder / RECEIPT, signed)
        ledger.append(signing.ledger, signed)
    write_reports(evaluation, judgement, folder, signed)
    return judgement


def write_reports(
    evaluation: Evaluation,
    judgement: Judgement,
    folder: Path,
    signed: Mapping[str, Any] | None = None,
    other: Evaluation | None = None,
) -> str:
    """Write the Markdown and the HTML report and return the Markdown; `other`: as `report_markdown.render`."""
    text = report_markdown.render(evaluation, judgement, receipt=signed, other=other)
    (folder / MARKDOWN).write_text(text, encoding="utf-8")
    page = report_html.render(evaluation, judgement, receipt=signed, other=other)
    (folder / PAGE).write_text(page, encoding="utf-8")
    return text


def receipt_of(evaluation: Evaluation, folder: Path) -> Mapping[str, Any] | None:
    """Return the receipt in the folder if it is of this very record, None without one or for another's."""
    try:
        found, payload = dsse.open_envelope((folder / RECEIPT).read_bytes())
        inside = receipt.statement_of(payload)["predicate"]["evaluation"]
    except (OSError, dsse.EnvelopeError):
        return None
    return found if inside == evaluation.to_dict() else None


def exit_code(judgement: Judgement, *, gate: bool = False) -> int:
    """Return the exit code: 0 for every label, 75 where nothing could be judged, 74 for broken surroundings.

    `gate`: 1 for a rejected candidate.
    """
    if judgement.verdict == "INFRASTRUCTURE":
        return EXIT_INFRASTRUCTURE
    if judgement.label is None:
        return EXIT_INVALID
    return EXIT_REJECTED if gate and judgement.label == REJECT else EXIT_JUDGED
