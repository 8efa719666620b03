"""Reports: what they say, that nothing from outside becomes markup, that a page is whole and fetches nothing."""

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from evaluation_records import evaluation, scope
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkinfer.evaluation import receipt, report_html, report_markdown
from sparkinfer.evaluation import report_facts as facts
from sparkinfer.evaluation.keys import generate
from sparkinfer.evaluation.record import (
    Build,
    Check,
    Correctness,
    Evaluation,
    Event,
    Guard,
    InputFile,
    StepMs,
)
from sparkinfer.evaluation.report_compare import disagreement
from sparkinfer.evaluation.verdict import judge

EVIL = "<script>alert(1)</script> <img src=//x> [a](http://b) @all | `x` \"' &lt; **b**\n# h \u202e\x1b[31m"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects the elements of a page, and fails where one is not closed in turn."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def both(record: Evaluation, **more: Any) -> Iterator[str]:
    judgement = judge(record)
    yield report_markdown.render(record, judgement, **more)
    yield Page(report_html.render(record, judgement, **more)).text


def table_of(markdown: str) -> dict[str, str]:
    rows = re.findall(r"^\| ([^|]*) \| ([^|]*) \|$", markdown, re.MULTILINE)
    return {name.strip(): value.strip() for name, value in rows}


def test_the_table_has_the_original_rows() -> None:
    record = evaluation(1.08)
    judgement = judge(record)
    issued = receipt.issue(record, judgement, generate())
    rows = table_of(report_markdown.render(record, judgement, receipt=issued))
    effect = judgement.primary
    assert effect is not None and effect.low is not None and effect.high is not None
    assert rows["Label"] == judgement.label == "eval-dflash:M"
    assert rows["Verdict"] == "BETTER"
    assert rows["Candidate DFlash"] == f"{effect.candidate:.2f} tok/s"
    assert rows["Base DFlash"] == f"{effect.base:.2f} tok/s"
    ends = f"interval +{100 * effect.low - 100:.1f} to +{100 * effect.high - 100:.1f} %"
    assert rows["Speed-up"].startswith(f"{effect.point:.3f}x (+") and rows["Speed-up"].endswith(
        ends
    )
    assert re.fullmatch(r"\d+\.\d\d tok/s \(base \d+\.\d\d tok/s\)", rows["Candidate AR"])
    assert rows["DFlash vs AR"].startswith("1.6")
    assert rows["Mean accept"].startswith("2.600 tokens a step")
    assert rows["Accuracy"] == "SPEC_AGREE PASS: 2 of 2 passed"
    assert "clear" in rows["Guards"] or "open" in rows["Guards"]
    assert rows["Receipt"].startswith(receipt.receipt_id(issued))
    assert "555555555555" in rows["Candidate"] and "merged onto 111111111111" in rows["Candidate"]


def test_a_changed_path_mix_comes_before_every_figure() -> None:
    record = evaluation()
    samples = tuple(
        replace(s, paths={"token_loop": 24}) if s.side == "candidate" and s.accept else s
        for s in record.samples
    )
    for text in both(replace(record, samples=samples)):
        told, figures = text.index("window 83 to 0 %"), text.index("Candidate DFlash")
        assert told < figures
        assert "path mix changed in" not in text, "said once"
    for text in both(record):
        assert "mix of paths changed" not in text


def test_the_reasons_of_the_judge_are_in_the_report() -> None:
    record = evaluation(0.95)
    for text in both(record):
        plain = text.replace("&#91;", "[").replace("&#93;", "]")
        for reason in judge(record).reasons:
            assert " ".join(reason.split()) in plain


def test_a_failed_check_is_named_first() -> None:
    bad = Correctness("spec_agree", "code", "candidate", False, "31/64 at token 31", {"agree": 0.5})
    record = evaluation()
    broken = replace(record, correctness=(*record.correctness[:-1], bad))
    rows = table_of(next(both(broken)))
    assert rows["Accuracy"] == "SPEC_AGREE FAIL: 1 of 2 failed; code: 31/64 at token 31"
    assert rows["Label"] == "eval-dflash:REJECT"


def test_the_accuracy_line_counts_tokens_over_all_cells() -> None:
    record = evaluation()
    counted = tuple(
        replace(c, numbers={"agree": 1.0 if c.cell == "chat" else 0.75, "tokens": 64.0})
        for c in record.correctness
    )
    rows = table_of(next(both(replace(record, correctness=counted))))
    assert rows["Accuracy"].startswith("SPEC_AGREE 112/128 = 0.8750, PASS: 2 of 2 passed")


def test_plans_that_differ_are_told() -> None:
    plans = {
        "base": {"version": "1", "plan": {"threads": 2, "draft": {"depth": 3, "rope": "x"}}},
        "candidate": {"version": "1", "plan": {"threads": 1, "draft": {"depth": 5, "rope": "x"}}},
    }
    record = evaluation(machine={"cpu": "toy", "plans": plans, "gpus": [{"name": "H200"}]})
    rows = table_of(next(both(record)))
    assert rows["Plans differ in"] == "threads: 2 to 1; draft.depth: 3 to 5"
    assert facts.machine_rows(record) == [("cpu", "toy"), ("gpu", "H200")]
    same = {"base": plans["base"], "candidate": plans["base"]}
    assert "Plans differ in" not in table_of(next(both(evaluation(machine={"plans": same}))))


def hostile() -> Evaluation:
    wild = scope(
        name=EVIL,
        title=EVIL,
        prompts={EVIL: (EVIL,), "chat": (EVIL,)},
        guards=(Guard(EVIL, (128,)),),
    )
    record = evaluation(scope_of=wild)
    samples = tuple(
        replace(s, paths={EVIL: 24}) if s.accept and s.side == "base" else s for s in record.samples
    )
    return replace(
        record,
        id=EVIL,
        created=EVIL,
        base=Build("git", EVIL, EVIL, EVIL, EVIL, EVIL, EVIL, {EVIL: EVIL}),
        candidate=Build("options", EVIL, options={EVIL: EVIL}),
        inputs={EVIL: InputFile(EVIL, EVIL, 1)},
        machine={
            EVIL: EVIL,
            "plans": {"base": {EVIL: EVIL}, "candidate": {EVIL: "x"}},
            "gpus": [EVIL],
        },
        preflight=(Check(EVIL, EVIL, "warn", EVIL),),
        correctness=(
            *record.correctness,
            Correctness(EVIL, EVIL, "candidate", True, EVIL),
        ),
        samples=samples,
        events=(Event("note", EVIL, EVIL, "base"),),
    )


def test_nothing_from_outside_becomes_markup_in_html() -> None:
    record = hostile()
    html = report_html.render(record, judge(record), other=record)
    page = Page(html)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "link", "iframe", "a", "b", "object", "base", "form"}
    assert "<script>alert(1)</script>" in page.text, "shown as the text it is"
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
    assert "\u202e" not in html and "\x1b" not in html


def test_nothing_from_outside_becomes_markup_in_markdown() -> None:
    record = hostile()
    text = report_markdown.render(record, judge(record), other=record)
    assert "<script" not in text and "<img" not in text and "@all" not in text
    assert "http://" not in text and "[a]" not in text and "**b**" not in text and "`" not in text
    assert "\u202e" not in text and "\x1b" not in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.count("|") in (3, 9), line
        tags = re.findall(r"</?[a-z]+", line)
        assert set(tags) <= {"<details", "<summary", "</summary", "</details"}


@pytest.mark.parametrize(
    ("plain", "shown"),
    [
        ("spec_agree 32/32 = 1.0000", "spec_agree 32/32 = 1.0000"),
        ("eval-dflash:XL", "eval-dflash:XL"),
        ("_a_ __b__", "&#95;a&#95; &#95;&#95;b&#95;&#95;"),
        ("fix #12 by @x", "fix &#35;12 by &#64;x"),
        ("www.a.b https://c", "www&#46;a.b https&#58;//c"),
        (":tada: a:b", "&#58;tada: a:b"),
        ("- x", "&#45; x"),
        ("1. x", "1&#46; x"),
        ("a\nb\t c", "a b c"),
    ],
)
def test_escaping_keeps_plain_text_readable(plain: str, shown: str) -> None:
    assert report_markdown.escape(plain) == shown


def test_the_page_is_whole_and_fetches_nothing() -> None:
    record = evaluation(1.02)
    html = report_html.render(record, judge(record))
    page = Page(html)
    policy = [a["content"] for tag, a in page.elements if a.get("http-equiv")]
    assert policy and "default-src 'none'" in (policy[0] or "")
    for tag, attributes in page.elements:
        assert tag != "script"
        assert not set(attributes) & {"src", "href", "srcset", "data", "action"}
    assert "url(" not in html and "@import" not in html and "prefers-color-scheme: dark" in html
    addresses = set(re.findall(r"https?://[^\"' <]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "the name of SVG, nothing to be fetched"


def test_every_chart_is_well_formed_and_named() -> None:
    record = evaluation(1.02)
    charts = re.findall(r"<svg.*?</svg>", report_html.render(record, judge(record)), re.DOTALL)
    names = [ET.fromstring(chart).attrib["aria-label"] for chart in charts]
    assert names == [
        "all cells together",
        "chat",
        "code",
        "changes with intervals",
        "cost of a step by part",
        "tokens a step, run by run",
        "share of steps by path",
    ]
    for chart in charts:
        width, height = map(float, ET.fromstring(chart).attrib["viewBox"].split()[2:])
        for node in ET.fromstring(chart).iter():
            for name, most in (("x", width), ("x1", width), ("x2", width), ("cx", width)):
                assert 0 <= float(node.attrib.get(name, 0)) <= most
            for name in ("y", "y1", "y2", "cy"):
                assert 0 <= float(node.attrib.get(name, 0)) <= height


def test_a_dot_for_each_block_and_hollow_ones_for_unused_blocks() -> None:
    record = evaluation(1.3, blocks=12, scope_of=scope(looks=(8, 12)))
    judgement = judge(record)
    used = judgement.effects[0].n
    assert used == 8, "settled at the first look"
    html = report_html.render(record, judgement)
    chart = re.findall(r"<svg.*?</svg>", html, re.DOTALL)[0]
    dots = [node.attrib["class"] for node in ET.fromstring(chart).iter() if "cx" in node.attrib]
    assert dots == ["candidate"] * 8 + ["candidate hollow"] * 4


def degenerate() -> list[Evaluation]:
    record = evaluation()
    one = scope(prompts={"chat": ("x",)}, guards=(), looks=(1,), aa_blocks=0)
    bare = tuple(replace(s, paths={}, accept=None, step_ms=None) for s in record.samples)
    return [
        replace(record, samples=(), aa=(), correctness=(), one_time=(), preflight=(), inputs={}),
        replace(record, samples=bare),
        replace(record, samples=record.samples[:3]),
        replace(record, events=(Event("infrastructure", "run", "the disk is full"),)),
        replace(record, events=(Event("failure", "build", "no compiler", "candidate"),)),
        replace(record, base=Build("none", "-")),
        replace(record, samples=tuple(s for s in record.samples if s.side == "candidate")),
        evaluation(scope_of=one, blocks=1),
        evaluation(noise=0.0),
        evaluation(1e6),
        evaluation(1e-6),
    ]


@pytest.mark.parametrize("place", range(len(degenerate())))
def test_a_report_of_every_record(place: int) -> None:
    record = degenerate()[place]
    judgement = judge(record)
    for text in both(record, other=record):
        assert judgement.verdict in text
        assert "nan" not in re.findall(r"\w+", text.lower())
    for chart in re.findall(r"<svg.*?</svg>", report_html.render(record, judgement), re.DOTALL):
        ET.fromstring(chart)


def test_step_costs_are_measured_parts_or_the_rate_and_the_tokens_a_step() -> None:
    record = evaluation(noise=0.0)
    costs = {(c.cell, c.side): c for c in facts.step_costs(record)}
    assert dict(costs["chat", "base"].parts) == pytest.approx(
        {"draft": 1.0, "target": 6.0, "sample": 0.2, "rest": 0.1}
    )
    unsplit = tuple(replace(s, step_ms=None) for s in record.samples)
    cost = facts.step_costs(replace(record, samples=unsplit))[0]
    assert dict(cost.parts) == pytest.approx({"step": 1e3 * 2.6 / 300})
    dearer = tuple(
        replace(s, step_ms=StepMs(2.0, 6.0, 0.2, 0.1)) if s.side == "candidate" and s.accept else s
        for s in record.samples
    )
    totals = [c.total for c in facts.step_costs(replace(record, samples=dearer))]
    assert totals == pytest.approx([7.3, 8.3, 7.3, 8.3])


def test_acceptance_is_that_of_the_primary_metric_with_every_cell_alike() -> None:
    record = evaluation()
    one = next(s for s in record.samples if s.accept and s.side == "base")
    three = (
        replace(one, cell="chat", accept=5.0),
        replace(one, cell="chat", accept=4.0),
        replace(one, cell="code", accept=1.5),
        replace(one, cell="code", metric="ar_tps", accept=1.0),
        replace(one, cell="g", guard=True, accept=9.0),
    )
    record = replace(record, samples=three)
    assert facts.accept_of(record, "base") == pytest.approx(3.0)
    assert facts.accept_of(record, "candidate") is None


def test_drafts_kept_by_their_place_are_counted_over_all_runs() -> None:
    record = evaluation()
    one = next(s for s in record.samples if s.slots and s.side == "base")
    runs = (
        replace(one, cell="chat", slots=((10, 5), (4, 1))),
        replace(one, cell="chat", slots=((10, 10),)),
        replace(one, cell="chat", metric="ar_tps", slots=((9, 9),)),
        replace(one, cell="chat", side="candidate", slots=()),
    )
    record = replace(record, samples=runs)
    assert facts.slot_shares(record) == [("chat", "base", [75.0, 25.0])]
    page = report_html.render(record, judge(record))
    assert "<td>chat, base</td>" in page and '<td class="number">25</td>' in page
    without = replace(record, samples=tuple(replace(s, slots=()) for s in runs))
    assert "drafts kept, %" not in report_html.render(without, judge(without))


def test_block_changes_are_paired_and_in_order() -> None:
    record = evaluation(noise=0.0, blocks=10, cells={"chat": 1.21, "code": 1.0})
    changes = facts.block_changes(record, "dflash_tps", "all")
    assert [block for block, _ in changes] == list(range(10))
    assert [value for _, value in changes] == pytest.approx([10.0] * 10)
    assert facts.block_changes(record, "dflash_tps", "chat")[0][1] == pytest.approx(21.0)
    effect = judge(evaluation(1.1)).primary
    noisy = [value for _, value in facts.block_changes(evaluation(1.1), "dflash_tps", "all")]
    assert effect is not None
    assert min(noisy) < 100 * (effect.point - 1) < max(noisy)


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [(0.91358, "\u22128.6"), (1.102, "+10.2"), (1.0, "0.0"), (0.9999, "0.0"), (1.00049, "0.0")],
)
def test_percentages_have_a_true_minus_and_no_signed_zero(ratio: float, shown: str) -> None:
    assert facts.percent(ratio) == shown


def test_two_evaluations_that_agree_have_nothing_to_explain() -> None:
    record = evaluation(1.05)
    assert not any("step cost alone" in line for line in disagreement(record, record))
    assert disagreement(record, replace(record, samples=())) == []


EXTREME = st.sampled_from([1e308, -1e308, 1e-308, -1.0, 0.0, 1.0, 1e12, 1e-12])


@given(
    accept=EXTREME,
    part=EXTREME,
    steps=st.sampled_from([0, 1, 10**30, -5]),
    value=st.sampled_from([1e-12, 1.0, 1e12]),
    tokens=st.sampled_from([0, 1, 10**30]),
)
@settings(max_examples=25, deadline=None)
def test_a_record_with_mad_figures_has_a_report(
    accept: float, part: float, steps: int, value: float, tokens: int
) -> None:
    record = evaluation(scope_of=scope(prompts={"chat": ("x",)}, guards=(), aa_blocks=0))
    samples = tuple(
        replace(
            s,
            value=value if s.side == "candidate" else s.value,
            accept=accept,
            step_ms=StepMs(part, part, 1.0, 1.0),
            paths={"window": steps, "ar": 1},
            tokens=tokens,
        )
        for s in record.samples
    )
    mad = replace(record, samples=samples)
    for text in both(mad, other=record):
        assert "Label" in text
    for chart in re.findall(r"<svg.*?</svg>", report_html.render(mad, judge(mad)), re.DOTALL):
        for node in ET.fromstring(chart).iter():
            for name in ("x", "y", "x1", "x2", "cx", "width", "height"):
                assert math.isfinite(float(node.attrib.get(name, 0)))
