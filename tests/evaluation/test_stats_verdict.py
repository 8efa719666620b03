"""The verdict: what follows from which record, and in which order."""

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from evaluation_records import FILE, evaluation, scope
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from judge_simulator import MACHINES, SCOPE, simulate, swapped

from sparkinfer.evaluation.record import (
    Build,
    Check,
    Correctness,
    Evaluation,
    Event,
    Guard,
    Metric,
    Plan,
    Sample,
    Verdict,
)
from sparkinfer.evaluation.verdict import decided, judge

LABEL = "eval-dflash:"


@pytest.mark.parametrize(
    ("speed_up", "verdict", "label"),
    [
        (1.25, "BETTER", "XL"),
        (1.12, "BETTER", "L"),
        (1.07, "BETTER", "M"),
        (1.045, "BETTER", "S"),
        (1.03, "BETTER", "XS"),
        (1.015, "BETTER", "none"),
        (1.0, "EQUIVALENT", "none"),
        (0.985, "WORSE", "none"),
        (0.96, "WORSE", "REJECT"),
    ],
)
def test_verdicts_and_labels(speed_up: float, verdict: Verdict, label: str) -> None:
    judgement = judge(evaluation(speed_up))
    assert (judgement.verdict, judgement.label) == (verdict, LABEL + label)
    assert judgement.basis == "interval" and judgement.looks_used == 1
    primary = judgement.primary
    assert primary is not None and primary.low is not None and primary.high is not None
    assert primary.low <= primary.point <= primary.high
    assert primary.point == pytest.approx(speed_up, abs=0.01)
    assert primary.candidate / primary.base == pytest.approx(speed_up, abs=0.01)
    assert judgement.correctness_passed and judgement.aa_ok and judgement.aa is not None


def test_a_judgement_is_a_function_of_the_record() -> None:
    record = evaluation(1.02, noise=0.02)
    assert judge(record) == judge(Evaluation.from_json(record.to_json()))
    assert judge(record) != judge(evaluation(1.02, noise=0.02, seed=2))


def test_the_label_needs_the_whole_interval() -> None:
    judgement = judge(evaluation(1.025, noise=0.012))
    primary = judgement.primary
    assert primary is not None and primary.low is not None
    assert primary.point > 1.02 > primary.low > 1.0
    assert (judgement.verdict, judgement.label) == ("BETTER", LABEL + "none")


def test_noise_is_inconclusive_and_says_how_much_is_missing() -> None:
    record = evaluation(1.0, noise=0.04, seed=3, scope_of=scope(noise_limit=0.5))
    judgement = judge(record)
    assert (judgement.verdict, judgement.looks_used) == ("INCONCLUSIVE", 2)
    assert judgement.more_blocks is not None and judgement.more_blocks > 10
    sentence = f"about {judgement.more_blocks} more blocks would probably settle it"
    assert any(sentence in reason for reason in judgement.reasons)


def test_mixed() -> None:
    judgement = judge(evaluation(1.06, cells={"code": 0.95}))
    assert (judgement.verdict, judgement.label) == ("MIXED", LABEL + "REJECT")
    assert any("faster in chat; slower in code" in text for text in judgement.reasons)
    small = judge(evaluation(1.06, cells={"code": 0.985}, noise=0.002))
    assert (small.verdict, small.label) == ("MIXED", LABEL + "none")


@pytest.mark.parametrize(("speed_up", "verdict"), [(1.1, "MIXED"), (1.0, "WORSE"), (0.9, "WORSE")])
def test_a_failed_guard_rejects(speed_up: float, verdict: Verdict) -> None:
    judgement = judge(evaluation(speed_up, guards=0.95))
    assert (judgement.verdict, judgement.label) == (verdict, LABEL + "REJECT")
    assert any(reason.startswith("guard failed: decode_tps") for reason in judgement.reasons)
    states = {e.cell: e.state for e in judgement.effects if e.guard}
    assert states["target ctx 128"] == "failed"


def test_a_guard_is_judged_by_its_interval() -> None:
    held = judge(evaluation(1.1, guards=0.99))
    assert {e.state for e in held.effects if e.metric == "prefill_tps"} == {"clear"}
    assert held.verdict == "BETTER"
    noisy = evaluation(1.3, noise=0.03, guards=0.972, scope_of=scope(noise_limit=0.5))
    judgement = judge(noisy)
    open_ones = [e for e in judgement.effects if e.state == "open" and e.point < 0.98]
    assert open_ones and judgement.verdict == "INCONCLUSIVE"
    assert judgement.label == LABEL + "none" and judgement.more_blocks is not None
    assert any("guard not settled" in reason for reason in judgement.reasons)


def test_many_guards_are_corrected_for_their_number() -> None:
    watched = scope(guards=(Guard("target", tuple(range(128, 1408, 128))),), noise_limit=0.5)
    judgement = judge(evaluation(guards=0.98, noise=0.02, scope_of=watched, seed=11))
    guards = [e for e in judgement.effects if e.guard and e.cell != "floor"]
    assert len(guards) == 20
    assert not any(e.state == "failed" for e in guards)
    for effect in guards:
        assert effect.p is not None and effect.p_holm is not None and effect.p_holm >= effect.p
    gross = judge(evaluation(guards=0.7, scope_of=watched))  # few blocks are enough for this
    assert all(e.state == "failed" for e in gross.effects if e.guard and e.cell != "floor")


def test_a_guard_that_was_not_measured_blocks_better() -> None:
    record = evaluation(1.2)
    samples = tuple(s for s in record.samples if s.metric != "prefill_tps")
    judgement = judge(replace(record, samples=samples))
    assert (judgement.verdict, judgement.label) == ("INCONCLUSIVE", LABEL + "none")
    assert "guard not measured: prefill_tps target ctx 128" in judgement.reasons


def _with_plain(record: Evaluation, base: float, candidate: float) -> Evaluation:
    """The record with plain decoding at these multiples of the speculative speed."""
    factors = {"base": base, "candidate": candidate}
    speed = {(s.block, s.slot, s.cell): s.value for s in record.samples if s.metric == "dflash_tps"}
    samples = tuple(
        replace(s, value=speed[s.block, s.slot, s.cell] * factors[s.side])
        if s.metric == "ar_tps"
        else s
        for s in record.samples
    )
    return replace(record, samples=samples)


def test_the_floor_of_plain_decoding() -> None:
    def floor(judgement: Any) -> Any:
        return next(e for e in judgement.effects if e.cell == "floor")

    fine = judge(_with_plain(evaluation(1.1), 0.7, 0.7))
    assert fine.verdict == "BETTER" and floor(fine).state == "clear"
    assert floor(fine).point == pytest.approx(1 / 0.7)
    lost = judge(_with_plain(evaluation(1.1), 0.7, 1.2))
    assert (lost.verdict, lost.label) == ("MIXED", LABEL + "REJECT")
    as_before = judge(_with_plain(evaluation(1.1), 1.3, 1.2))
    assert as_before.verdict == "BETTER" and floor(as_before).state is None


def test_looks() -> None:
    record = evaluation(1.1, blocks=7)
    early = judge(record)
    assert (early.verdict, early.more_blocks, early.looks_used) == ("INCONCLUSIVE", 1, 0)
    assert not decided(record) and decided(evaluation(1.1, blocks=8))
    late = judge(evaluation(1.1, blocks=12))
    assert late.looks_used == 1 and late.effects == judge(evaluation(1.1, blocks=8)).effects
    assert "settled after 8 blocks; 4 more are unused" in late.reasons


def test_the_last_block_may_be_incomplete_but_none_before_it() -> None:
    record = evaluation(1.1, blocks=9)
    cut = replace(record, samples=record.samples[:-1])
    assert judge(cut).verdict == "BETTER"
    hole = tuple(s for s in record.samples if (s.block, s.slot, s.cell) != (3, 2, "chat"))
    judgement = judge(replace(record, samples=hole))
    assert (judgement.verdict, judgement.label) == ("INVALID", None)
    assert judgement.reasons == ("block 3 is incomplete, yet there are samples of block 8",)


def _correct(**changes: Any) -> tuple[Correctness, ...]:
    fine = Correctness("spec_agree", "chat", "candidate", True, "64/64", {"agree": 1.0})
    return (replace(fine, **changes),)


@pytest.mark.parametrize(
    ("correctness", "label", "reason"),
    [
        (_correct(passed=False, detail="62/64"), "REJECT", "62/64"),
        (_correct(numbers={"agree": 0.97}), "REJECT", "agree is 0.97; expected at least 1"),
        (_correct(numbers={"kl": 0.5}), "REJECT", "kl is 0.5; expected at most 0.01"),
        (_correct(numbers={"top1": 0.5}), "REJECT", "top1 is 0.5; expected at least 0.99"),
        ((*_correct(), *_correct(side="base", passed=False)), None, "of base"),
        (_correct(side="base"), None, "the candidate's output was not checked"),
        ((), None, "the candidate's output was not checked"),
    ],
)
def test_a_wrong_output_has_no_speed(
    correctness: tuple[Correctness, ...], label: str | None, reason: str
) -> None:
    judgement = judge(evaluation(1.3, correctness=correctness))
    assert judgement.verdict == "INVALID" and not judgement.correctness_passed
    assert judgement.label == (LABEL + label if label else None)
    assert judgement.effects == () and reason in judgement.reasons[0]


@pytest.mark.parametrize(
    ("changes", "verdict", "label", "reason"),
    [
        (
            {"events": (Event("infrastructure", "build", "no space left"),)},
            "INFRASTRUCTURE",
            None,
            "build: no space left",
        ),
        (
            {"preflight": (Check("load", 9.5, "refuse", "two cores"),)},
            "INFRASTRUCTURE",
            None,
            "preflight refused: load is 9.5 (two cores)",
        ),
        (
            {"events": (Event("failure", "build", "does not build", "candidate"),)},
            "INVALID",
            "REJECT",
            "candidate failed, build: does not build",
        ),
        (
            {"events": (Event("failure", "run", "crashed", "base"),)},
            "INVALID",
            None,
            "base failed, run: crashed",
        ),
        ({"aa": ()}, "INVALID", None, "the base was not compared with itself"),
        ({"base": Build("none", "-")}, "INCONCLUSIVE", "BASELINE", "there is no base"),
    ],
)
def test_what_comes_before_speed(
    changes: dict[str, Any], verdict: Verdict, label: str | None, reason: str
) -> None:
    judgement = judge(evaluation(1.3, **changes))
    assert (judgement.verdict, judgement.label) == (verdict, LABEL + label if label else None)
    assert reason in judgement.reasons[0] and judgement.effects == ()


def test_notes_and_retries_stop_nothing() -> None:
    events = (Event("note", "run", "warm"), Event("retry", "run", "slow start", "base"))
    assert judge(evaluation(1.3, events=events)).verdict == "BETTER"


def test_the_base_against_itself() -> None:
    record = evaluation(1.1)
    biased = tuple(replace(s, value=s.value * (1.08 if s.side == "a2" else 1.0)) for s in record.aa)
    judgement = judge(replace(record, aa=biased))
    assert (judgement.verdict, judgement.label, judgement.aa_ok) == ("INVALID", None, False)
    assert "the base differs from itself: 1.08" in judgement.reasons[0]
    noisy = judge(evaluation(1.1, noise=0.3))
    assert noisy.verdict == "INVALID" and "too noisy" in noisy.reasons[0]
    without = judge(evaluation(1.1, scope_of=scope(aa_blocks=0)))
    assert without.verdict == "BETTER" and without.aa_ok is None


def _replanned(record: Evaluation, **changes: Any) -> Evaluation:
    return replace(record, plan=replace(record.plan, **changes))


def test_a_record_that_contradicts_its_plan() -> None:
    record = evaluation(1.1)
    other_side = replace(record.samples[0], slot=1)
    order = tuple(("base", "candidate", "candidate", "base") for _ in record.plan.blocks)
    in_order = tuple(replace(s, slot=0) for s in record.aa)
    for changed, reason in (
        (_replanned(record, looks=(8,)), "the plan's looks is (8,), its scope's (8, 12)"),
        (_replanned(record, alpha=0.2), "the plan's alpha is 0.2"),
        (_replanned(record, delta=0.4), "the plan's delta is 0.4"),
        (_replanned(record, primary="ar_tps"), "the plan's primary is ar_tps"),
        (_replanned(record, blocks=order), "the plan's order is not the one that its seed 1 gives"),
        (_replanned(record, seed=2), "not the one that its seed 2 gives"),
        (replace(record, aa=in_order), "aa sample"),
        (replace(record, source="published"), "published figures are one a side"),
        (replace(record, samples=(other_side, *record.samples[1:])), "sample 0 is"),
        (
            replace(record, samples=(*record.samples, replace(record.samples[0], cell="new"))),
            "of the cell 'new'",
        ),
    ):
        judgement = judge(changed)
        assert judgement.verdict == "INVALID" and judgement.label is None
        assert any(reason in text for text in judgement.reasons), judgement.reasons


def published(base: float, candidate: float, accept: tuple[float, float]) -> Evaluation:
    """The figures of one run a side, as a record."""
    chosen = scope(prompts={"fixed": ("-",)}, looks=(1,), aa_blocks=0, guards=())
    figures = zip(("candidate", "base"), (candidate, base), (accept[1], accept[0]), strict=True)
    samples = tuple(
        Sample(0, slot, side, "dflash_tps", "fixed", False, value, "tok/s", 128, 128 / value, {}, a)
        for slot, (side, value, a) in enumerate(figures)
    )
    plan = Plan(0, (("candidate", "base"),), (1,), 0.01, 0.05, "dflash_tps", 0)
    return evaluation(
        blocks=0, scope_of=chosen, plan=plan, samples=samples, aa=(), source="published"
    )


@pytest.mark.parametrize(
    ("base", "candidate", "label"),
    [(479.87, 438.40, "REJECT"), (572.71, 631.17, "L"), (500.0, 505.0, "none")],
)
def test_published_figures(base: float, candidate: float, label: str) -> None:
    judgement = judge(published(base, candidate, (3.657, 5.333)))
    assert (judgement.verdict, judgement.label) == ("INCONCLUSIVE", LABEL + label)
    assert judgement.basis == "unreplicated"
    assert any("unreplicated" in reason for reason in judgement.reasons)
    primary = judgement.primary
    assert primary is not None and (primary.low, primary.high, primary.n) == (None, None, 1)
    assert primary.point == pytest.approx(candidate / base)


def test_one_change_on_two_machines_differs_in_step_cost_alone() -> None:
    author, bot = (
        judge(published(*figures, (3.657, 5.333))).reasons[0]
        for figures in ((572.71, 631.17), (479.87, 438.40))
    )
    assert "5.333 against 3.657 tokens a step, a step costs 8.45 ms against 6.39 ms" in author
    assert "5.333 against 3.657 tokens a step, a step costs 12.16 ms against 7.62 ms" in bot


def test_a_guard_under_its_bar_rejects_published_figures() -> None:
    record = published(100.0, 130.0, (2.0, 2.0))
    guards = tuple(
        Sample(0, slot, side, "decode_tps", "target ctx 128", True, value, "tok/s", 1, 1.0)
        for slot, side, value in ((0, "candidate", 90.0), (1, "base", 100.0))
    )
    judgement = judge(replace(record, samples=(*record.samples, *guards)))
    assert judgement.label == LABEL + "REJECT"


@pytest.mark.parametrize("machine", list(MACHINES))
def test_exchanging_the_sides_mirrors_the_verdict(machine: str) -> None:
    mirror = {"BETTER": "WORSE", "WORSE": "BETTER"}
    plain = replace(SCOPE, guards=())  # guards watch one side
    seen = set()
    for seed, effect in enumerate((0.96, 0.985, 1.0, 1.01, 1.05)):
        record = simulate(MACHINES[machine], seed, effect=effect, scope_of=plain)
        ours, theirs = judge(record), judge(swapped(record))
        seen.add(ours.verdict)
        assert theirs.verdict == mirror.get(ours.verdict, ours.verdict)
        assert ours.primary is not None and theirs.primary is not None
        assert ours.primary.point * theirs.primary.point == pytest.approx(1, abs=1e-12)
        assert ours.primary.low is not None and theirs.primary.high is not None
        assert ours.primary.low * theirs.primary.high == pytest.approx(1, abs=1e-12)
        assert ours.primary.p == theirs.primary.p and ours.more_blocks == theirs.more_blocks
    assert len(seen) > 1


def _without(record: Evaluation, draw: Any) -> Evaluation:
    kept = draw(st.lists(st.booleans(), min_size=24, max_size=24))
    samples = tuple(s for n, s in enumerate(record.samples) if kept[n % 24] or n % 3)
    return replace(record, samples=samples)


def _shaken(record: Evaluation, draw: Any) -> Evaluation:
    factors = draw(st.lists(st.sampled_from([1e-12, 0.5, 1.0, 1e12]), min_size=7, max_size=7))
    samples = tuple(replace(s, value=factors[n % 7]) for n, s in enumerate(record.samples))
    return replace(record, samples=samples)


def _equal(record: Evaluation, draw: Any) -> Evaluation:
    return replace(record, samples=tuple(replace(s, value=5.0) for s in record.samples))


def _renamed(record: Evaluation, draw: Any) -> Evaluation:
    cell = draw(st.sampled_from(["chat", "floor", "all", "target ctx 128", ""]))
    guard = draw(st.booleans())
    odd = replace(record.samples[-1], cell=cell, guard=guard, metric=draw(st.text(max_size=3)))
    return replace(record, samples=(*record.samples, odd))


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    st.data(),
    st.lists(st.sampled_from([_without, _shaken, _equal, _renamed]), min_size=1, max_size=3),
    st.booleans(),
)
def test_every_record_has_a_verdict(data: Any, changes: list[Any], measured: bool) -> None:
    record = evaluation(1.05, blocks=9) if measured else published(100.0, 105.0, (2.0, 2.0))
    for change in changes:
        record = change(record, data.draw)
    judgement = judge(record)
    assert judgement.verdict in get_args(Verdict) and judgement.reasons
    text = json.dumps(judgement.to_dict(), allow_nan=False)  # every number is finite
    assert judge(Evaluation.from_json(record.to_json())).to_dict() == json.loads(text)


def test_scopes_without_plain_decoding_or_guards() -> None:
    plain = scope(metrics=(Metric("decode_tps", "primary"),), guards=(), draft=None)
    judgement = judge(evaluation(1.05, scope_of=plain, inputs={"model": FILE}))
    assert judgement.verdict == "BETTER" and not any(e.guard for e in judgement.effects)
