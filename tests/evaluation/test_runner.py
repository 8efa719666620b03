"""The runner's logic with a made-up measuring program: stages, schedule, failures, interruption, resuming."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sparkinfer.errors import OptionError
from sparkinfer.evaluation import preflight, run
from sparkinfer.evaluation.builds import Environment
from sparkinfer.evaluation.finish import begin, exit_code, finish
from sparkinfer.evaluation.inputs import Files
from sparkinfer.evaluation.process import Runner
from sparkinfer.evaluation.record import (
    Build,
    Check,
    Evaluation,
    Event,
    EventKind,
    Guard,
    Metric,
    Scope,
    Side,
    load_evaluation,
)
from sparkinfer.evaluation.run import RECORD, Evaluator, Settings
from sparkinfer.evaluation.verdict import judge

FAKE = Path(__file__).with_name("runner_fake.py")
SCOPE = Scope(
    name="fake",
    title="made-up figures",
    device="cpu",
    target="fake",
    draft="auto",
    prompts={"chat": ("one two three four", "five six"), "code": ("seven eight nine",)},
    metrics=(Metric("dflash_tps", "primary"), Metric("ar_tps")),
    tokens=40,
    looks=(4,),
    guards=(Guard("target", (16, 64)),),
    warmup=4,
    aa_blocks=2,
    delta=0.02,
    alpha=0.2,  # so that four blocks can decide
    noise_limit=0.2,
)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other processes do while tests run is not what is tested."""
    checks = (Check("load, one minute", 0.1, "ok"), Check("disk free", "9 GiB", "ok"))
    monkeypatch.setattr(run, "preflight", lambda *_args, **_named: checks)


def side(folder: Path, name: str, **behaviour: str) -> Environment:
    cache = folder / f"cache-{name}"
    (cache / "costs").mkdir(parents=True, exist_ok=True)
    build = Build("options", name, sha="a" * 40, tree_sha="b" * 64, options={"spec": "auto"})
    environment = {f"FAKE_{key.upper()}": value for key, value in behaviour.items()}
    return Environment(build, Runner(Path(sys.executable), environment), cache)


def evaluator(
    folder: Path,
    *,
    scope: Scope = SCOPE,
    base: dict[str, str] | None = None,
    say: Callable[[str], None] = lambda _text: None,
    silence: float = 30.0,
    **candidate: str,
) -> Evaluator:
    model = folder / "model.gguf"
    model.write_bytes(b"weights")
    settings = Settings(scope, Files(model), folder / "out", 5, silence=silence, harness=FAKE)
    sides = side(folder, "base", **(base or {})), side(folder, "candidate", **candidate)
    return Evaluator(settings, *sides, notes=("a note",), say=say)


def test_a_slower_candidate_is_rejected_and_the_record_tells_everything(tmp_path: Path) -> None:
    said: list[str] = []
    started: list[Evaluation] = []
    record = evaluator(tmp_path, speed="0.9", say=said.append).run(started.append)
    judgement = judge(record)
    assert (judgement.verdict, judgement.label) == ("WORSE", "eval-dflash:REJECT"), judgement
    assert judgement.primary is not None
    assert judgement.primary.point == pytest.approx(0.9, abs=0.01)
    assert exit_code(judgement) == 0
    assert exit_code(judgement, gate=True) == 1
    assert started[0].samples == started[0].aa == ()  # announced before anything was measured
    assert started[0].plan == record.plan
    assert {sample.side for sample in record.aa} == {"a1", "a2"}
    places = {(sample.block, sample.slot) for sample in record.samples}
    assert places == {(block, slot) for block in range(4) for slot in range(4)}
    cells = {(s.metric, s.cell) for s in record.samples if s.guard}
    assert cells == {
        (metric, f"target ctx {context}")
        for metric in ("decode_tps", "prefill_tps")
        for context in (16, 64)
    }
    assert {cost.what for cost in record.one_time} >= {"load", "load: compile", "warm-up"}
    assert {check.check for check in record.correctness} >= {"spec_agree", "logits", "content"}
    assert record.machine["harness_sha256"] and record.inputs["model"].bytes == 7
    assert any("block 4 of 4, at most about" in line for line in said), said
    assert load_evaluation(tmp_path / "out" / RECORD) == record


def test_equal_sides_are_equivalent_and_both_orders_were_run(tmp_path: Path) -> None:
    record = evaluator(tmp_path).run()
    assert judge(record).verdict == "EQUIVALENT"
    raw = tmp_path / "out" / "raw"
    order = record.plan.blocks[0]
    ids = []
    for slot, name in enumerate(order):
        lines = (raw / f"block-0-{slot}-{name}-model.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        ids.append([e["id"] for e in events if e["event"] == "start" and "warm-up" not in e["id"]])
    assert ids[0] == ids[1] == ids[2][::-1] == ids[3][::-1]
    assert order[0] == order[3] and order[1] == order[2] != order[0]


def test_costs_are_measured_anew_in_each_block(tmp_path: Path) -> None:
    bench = evaluator(tmp_path)
    kept = tmp_path / "cache-base" / "kernels"
    kept.mkdir()
    bench.run()
    assert not (tmp_path / "cache-base" / "costs").exists()
    assert not (tmp_path / "cache-candidate" / "costs").exists()
    assert kept.exists()


@pytest.mark.parametrize(
    ("mode", "check"),
    [
        ("lossy", "spec_agree"),
        ("other", "same_tokens"),
        ("shifted", "logits"),
        ("loop", "content"),
    ],
)
def test_a_wrong_candidate_is_not_timed(tmp_path: Path, mode: str, check: str) -> None:
    record = evaluator(tmp_path, speed="2", mode=mode).run()
    failed = {one.check for one in record.correctness if not one.passed}
    assert check in failed
    assert record.samples == ()
    judgement = judge(record)
    assert judgement.label == "eval-dflash:REJECT" and not judgement.correctness_passed


def test_a_bench_that_differs_from_itself_measures_nothing_more(tmp_path: Path) -> None:
    unsteady = {"mode": "stumbles", "mark": str(tmp_path / "count")}
    record = evaluator(tmp_path, base=unsteady).run()
    judgement = judge(record)
    assert (judgement.verdict, judgement.label, judgement.aa_ok) == ("INVALID", None, False)
    assert exit_code(judgement) == 75
    assert record.samples == () and record.correctness == ()


def test_a_crash_is_tried_again_and_noted(tmp_path: Path) -> None:
    mark = str(tmp_path / "crashed")
    record = evaluator(tmp_path, mode="crash once", mark=mark).run()
    retries = [event for event in record.events if event.kind == "retry"]
    assert [event.side for event in retries] == ["candidate"]
    assert "Segmentation fault" in retries[0].message
    assert judge(record).verdict == "EQUIVALENT"


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        ("crash", "failure", "exit code 9"),
        ("silent", "failure", "before its last line"),
        ("garbage", "failure", "not its own"),
        ("clock", "failure", "by its own clock"),
        ("memory", "infrastructure", "9 GiB"),
        ("hang", "infrastructure", "no answer for"),
    ],
)
def test_what_fails_again_ends_it_with_its_own_outcome(
    tmp_path: Path, mode: str, kind: str, words: str
) -> None:
    silence = 0.5 if mode == "hang" else 30.0
    record = evaluator(tmp_path, mode=mode, silence=silence).run()
    last = record.events[-1]
    assert (last.kind, last.side) == (kind, "candidate")
    assert words in last.message
    judgement = judge(record)
    if kind == "infrastructure":
        assert judgement.verdict == "INFRASTRUCTURE" and judgement.label is None
        assert exit_code(judgement) == 74
    else:
        assert judgement.label == "eval-dflash:REJECT"


@pytest.mark.parametrize(
    ("owner", "kind", "code", "label"),
    [
        ("candidate", "failure", 0, "eval-dflash:REJECT"),
        ("base", "failure", 75, None),
        ("base", "infrastructure", 74, None),
    ],
)
def test_a_side_that_cannot_be_built_is_an_outcome(
    tmp_path: Path, owner: Side, kind: EventKind, code: int, label: str | None
) -> None:
    bench = evaluator(tmp_path)
    bench._broken = Event(kind, "build", "its wheel cannot be built: no pyproject.toml", owner)
    record = bench.run()
    judgement = judge(record)
    assert (judgement.label, exit_code(judgement)) == (label, code)
    assert "no pyproject.toml" in " ".join(judgement.reasons)
    assert not (tmp_path / "out" / "raw").exists()


def test_a_build_that_is_too_old_is_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"candidate candidate cannot be measured: .*speculate"):
        evaluator(tmp_path, mode="old").run()


def test_ctrl_c_leaves_whole_blocks_and_the_rest_can_be_resumed(tmp_path: Path) -> None:
    def interrupt(text: str) -> None:
        if text.startswith("block 2"):
            raise KeyboardInterrupt

    bench = evaluator(tmp_path, say=interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    partial = load_evaluation(tmp_path / "out" / RECORD)
    assert {sample.block for sample in partial.samples} == {0}
    assert judge(partial).verdict == "INCONCLUSIVE"
    said: list[str] = []
    again = evaluator(tmp_path, say=said.append)
    again.resume()
    record = again.run()
    steps = [line for line in said if line.startswith(("block", "base against"))]
    assert steps[0].startswith("block 2 of 4"), steps
    assert record.id == partial.id and record.samples[: len(partial.samples)] == partial.samples
    assert judge(record).verdict == "EQUIVALENT"
    assert [e.stage for e in record.events if e.stage in ("interrupted", "resume")] == [
        "interrupted",
        "resume",
    ]


def test_another_evaluation_is_not_gone_on_with(tmp_path: Path) -> None:
    bench = evaluator(tmp_path, mode="lossy")
    bench.run()
    other = evaluator(tmp_path, scope=replace(SCOPE, tokens=41))
    with pytest.raises(OptionError, match="another scope"):
        other.resume()


def test_a_wrong_candidate_is_not_timed_after_resuming_either(tmp_path: Path) -> None:
    bench = evaluator(tmp_path, mode="lossy")
    bench.run()
    again = evaluator(tmp_path, mode="lossy")
    again.resume()
    record = again.run()
    assert record.samples == () and judge(record).label == "eval-dflash:REJECT"


def test_what_was_refused_once_may_go_on_on_a_calm_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as busy:
        refused = (Check("disk free", "0 GiB", "refuse", "no room"),)
        busy.setattr(run, "preflight", lambda *_args, **_named: refused)
        assert exit_code(judge(evaluator(tmp_path).run())) == 74
    again = evaluator(tmp_path)
    again.resume()
    assert judge(again.run()).verdict == "EQUIVALENT"


def test_a_refusal_before_the_start_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = (Check("load, one minute", 9.0, "warn", "other work"),)
    monkeypatch.setattr(run, "preflight", lambda *_args, **_named: busy)
    bench = evaluator(tmp_path)
    bench._settings = replace(bench._settings, require_quiet=True)
    record = bench.run()
    assert record.preflight[0].level == "refuse"
    assert exit_code(judge(record)) == 74
    assert not (tmp_path / "out" / "raw").exists()


def test_reports_receipt_and_ledger_come_from_the_record(tmp_path: Path) -> None:
    pytest.importorskip("securesystemslib")
    from sparkinfer.evaluation.finish import Signing
    from sparkinfer.evaluation.keys import generate
    from sparkinfer.evaluation.verify import verify

    signing = Signing(generate(), tmp_path / "ledger.jsonl")
    started = []
    record = evaluator(tmp_path, speed="1.2").run(
        lambda plan: started.append(begin(plan, signing.ledger))
    )
    judgement = finish(record, tmp_path / "out", signing=signing, started=started[0])
    assert judgement.label == "eval-dflash:XL"
    report = (tmp_path / "out" / "report.md").read_text()
    assert "eval-dflash:XL" in report and "DFlash" in report
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    found = verify(tmp_path / "out" / "receipt.json", ledger=signing.ledger)
    assert found.ok, found.lines()
    assert begin(record, signing.ledger) == started[0]  # resumed: the line that is there


def test_the_preflight_of_this_machine_is_complete() -> None:
    found = {check.name: check for check in preflight.preflight(Path(), 1 << 20)}
    assert {"cpu", "load, one minute", "fixed work", "memory available", "disk free"} <= set(found)
    assert found["memory available"].level == "ok"
    refused = {check.name for check in preflight.preflight(Path(), 1 << 60)}
    assert "memory available" in refused


def test_nvidia_smi_is_read_by_field() -> None:
    row = "NVIDIA H200, 570.1, 143771, 5, 0, 31, 76.2, 700.0, 345, 1980, 3201, Enabled\n"
    (gpu,) = preflight.parse_gpus(row)
    assert (gpu["name"], gpu["clocks.max.sm"], gpu["power.limit"]) == (
        "NVIDIA H200",
        "1980",
        "700.0",
    )
    assert preflight.parse_gpus("No devices were found") == []
