"""The pull request that the project began with: its published figures, read by our judge and our report."""

from dataclasses import replace
from pathlib import Path

import pytest

from sparkinfer.errors import OptionError
from sparkinfer.evaluation import receipt, report_html, report_markdown
from sparkinfer.evaluation.keys import generate
from sparkinfer.evaluation.record import Evaluation, load_evaluation
from sparkinfer.evaluation.report_compare import disagreement
from sparkinfer.evaluation.verdict import judge

DATA = Path(__file__).parent.parent / "data" / "evaluation"


@pytest.fixture(scope="module")
def evaluator() -> Evaluation:
    return load_evaluation(DATA / "seed_693_evaluator.json")


@pytest.fixture(scope="module")
def author() -> Evaluation:
    return load_evaluation(DATA / "seed_693_author.json")


def test_the_records_hold_what_was_published(evaluator: Evaluation, author: Evaluation) -> None:
    """Rates and tokens a step as printed; every other figure of a sample follows from them."""
    published = (
        (evaluator, {"base": (479.87, 3.657), "candidate": (438.40, 5.3333)}),
        (author, {"base": (572.71, 3.657), "candidate": (631.17, 5.3333)}),
    )
    for record, figures in published:
        assert {s.side: (s.value, s.accept) for s in record.samples} == figures
        assert all(s.seconds == pytest.approx(s.tokens / s.value) for s in record.samples)
        assert record.source == "published"
        assert any("pull request 693" in event.message for event in record.events)


def test_the_evaluator_rejects_with_the_row_of_minus_8_6_percent(evaluator: Evaluation) -> None:
    judgement = judge(evaluator)
    assert judgement.label == "eval-dflash:REJECT" and judgement.basis == "unreplicated"
    text = report_markdown.render(evaluator, judgement)
    assert text.startswith("### eval-dflash:REJECT")
    for row in (
        "| Label | eval-dflash:REJECT (from published single figures, not replicated) |",
        "| Candidate DFlash | 438.40 tok/s |",
        "| Base DFlash | 479.87 tok/s |",
        "| Speed-up | 0.914x (\u22128.6 %), no interval: one figure a side |",
        "| Mean accept | 5.333 tokens a step (base 3.657 tokens a step) |",
        "| Accuracy | SPEC_AGREE 32/32 = 1.0000, PASS: 32 tokens of one prompt |",
    ):
        assert row in text
    assert "1340617" in text and "unreplicated" in text


def test_the_author_would_have_had_a_tier(author: Evaluation) -> None:
    judgement = judge(author)
    assert (judgement.label, judgement.basis) == ("eval-dflash:L", "unreplicated")
    assert "1.102x (+10.2 %)" in report_markdown.render(author, judgement)


def test_the_note_finds_that_only_the_cost_of_a_step_differs(
    evaluator: Evaluation, author: Evaluation
) -> None:
    note = "\n".join(disagreement(author, evaluator))
    assert "+10.2 % in author, \u22128.6 % in evaluator" in note
    assert "candidate: both accept 5.333 tokens a step" in note
    assert "8.45 ms in author and 12.17 ms in evaluator" in note
    assert "6.39 ms in author and 7.62 ms in evaluator" in note
    assert "acceptance is equal in both, so they differ in step cost alone" in note
    assert "1.46x the tokens and costs 1.32x in author, 1.60x in evaluator" in note
    for render in (report_markdown.render, report_html.render):
        assert "step cost alone" in render(evaluator, judge(evaluator), other=author)


def test_the_note_is_derived_and_not_written_down(
    evaluator: Evaluation, author: Evaluation
) -> None:
    accepted = tuple(replace(s, accept=4.0) for s in author.samples)
    note = "\n".join(disagreement(replace(author, samples=accepted), evaluator))
    assert "step cost alone" not in note and "4.000 and 5.333 tokens a step" in note


def test_published_figures_get_no_receipt(evaluator: Evaluation) -> None:
    with pytest.raises(OptionError, match="published elsewhere"):
        receipt.issue(evaluator, judge(evaluator), generate())
