"""`bench --spec`: prompts, the order of runs, figures, and the lines and records they become."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_draft import PROMPT, TOKENIZER, A, B, BrokenPaths, C, toy_costs, toy_engine
from toy_model import END, ToyTarget, ToyTemplate, hashed_logits

from sparkinfer.bench import sides, sweep
from sparkinfer.bench.answers import Side, answer, decoding_steps, tokens_a_step
from sparkinfer.bench.oracle import Oracle
from sparkinfer.bench.prompts import DOMAINS, Prompt, builtin_prompts, file_prompts
from sparkinfer.bench.sides import Drafting, parse_depths, plain_side, sweep_sides
from sparkinfer.bench.spread import Spread, in_turns
from sparkinfer.bench.sweep import Measured, Run, Task
from sparkinfer.bench.sweep_report import json_line, metric_lines, planner_line, slot_table
from sparkinfer.cli import app
from sparkinfer.dflash.scripted import acceptance_script
from sparkinfer.engine import Engine, Result
from sparkinfer.errors import MissingFileError, OptionError
from sparkinfer.options import resolve

TASKS = [Task("chat", tuple(PROMPT)), Task("code", (*PROMPT, A)), Task("chat", (*PROMPT, B))]


@pytest.fixture(autouse=True)
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "measured_costs", lambda *_: toy_costs())
    monkeypatch.setattr("sparkinfer.options._flags", {})


def quiet(*_: Any) -> None:
    pass


def hashed_engine() -> Engine:
    """Any token but the end may follow any text."""
    hashed = hashed_logits(TOKENIZER.n_vocab)

    def endless(tokens: Sequence[int]) -> Any:
        row = hashed(tokens)
        row[END] = -9.0
        return row

    target = ToyTarget(endless, 256)
    return Engine(target, TOKENIZER, ToyTemplate(TOKENIZER))


def measured(tokens: int = 12, rounds: int = 2, mean: float = 3.0) -> list[Measured]:
    engine = hashed_engine()
    oracle = Oracle(TOKENIZER.n_vocab, None)
    drafting = Drafting.over(engine, oracle.draft, resolve({}, {}), quiet)
    prepare = oracle.load(acceptance_script(mean - 1, drafting.most))
    return sweep.sweep(
        engine,
        sweep_sides(engine, drafting, [1, 4], prepare),
        TASKS,
        tokens=tokens,
        rounds=rounds,
        report=quiet,
        recorded=oracle.record,
    )


# Prompts


def test_the_first_prompts_cover_every_domain() -> None:
    assert [prompt.domain for prompt in builtin_prompts(6)] == list(DOMAINS)
    every = builtin_prompts()
    assert len(every) == len({prompt.text for prompt in every}) == 24
    with pytest.raises(OptionError, match="--prompts 25 is not accepted; there are 24"):
        builtin_prompts(25)


def test_prompts_of_a_file_take_turns_by_domain(tmp_path: Path) -> None:
    lines = [("one", "x"), ("two", "x"), ("three", "y"), ("four", None)]
    rows = [{"prompt": t} | ({"domain": d} if d else {}) for t, d in lines]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    assert file_prompts(file) == (
        Prompt("x", "one"),
        Prompt("y", "three"),
        Prompt("other", "four"),
        Prompt("x", "two"),
    )
    assert len(file_prompts(file, 2)) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "line 1 is not"),
        ('{"prompt": "a"}\n[]', "line 2 is not"),
        ('{"prompt": ""}', "line 1 is not"),
        ('{"prompt": "a", "domain": 3}', "line 1 is not"),
        ("", "has 0 prompts; expected 1 to"),
    ],
)
def test_a_file_of_prompts_is_checked(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(OptionError, match=reason):
        file_prompts(file)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"none\.jsonl: No such file"):
        file_prompts(tmp_path / "none.jsonl")
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(OptionError, match="not UTF-8 text at byte 0"):
        file_prompts(tmp_path / "latin")


# Figures


def test_sides_go_forwards_and_backwards() -> None:
    assert [list(in_turns(3, turn)) for turn in range(3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]


def test_a_spread_is_median_and_range() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([1.0, 2.0]).text(1) == "1.5 (1.0 to 2.0)"
    assert Spread.of([1.25]).text() == "1.25"


@pytest.mark.parametrize("text", ["0", "16", "1,,2", "x", "²", ""])
def test_depths_beyond_the_draft_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="expected all, or numbers from 1 to 15"):
        parse_depths("--depths", text, 15)


def test_depths() -> None:
    assert parse_depths("--depths", "all", 4) == [1, 2, 3, 4]
    assert parse_depths("--depths", "5, 2,5", 15) == [2, 5]


def test_tokens_a_step_counts_plain_steps_and_not_the_prompts_token() -> None:
    engine = toy_engine([A, B, C] * 5, [3, 0], turns=[(4, "window"), (1, "ar")])
    result = engine.generate(PROMPT, max_tokens=12, ignore_eos=True)
    steps = decoding_steps(result)
    assert steps.tokens == 11 == result.usage.completion_tokens - 1
    assert tokens_a_step(steps) == (steps.steps + steps.accepted) / steps.steps
    assert result.paths["ar"].steps > 0
    assert tokens_a_step(decoding_steps(engine.generate(PROMPT, max_tokens=1))) is None


def test_an_answer_leaves_the_engines_decoder_alone() -> None:
    engine = toy_engine([A, B, C], [3])
    before, seen = engine.decoder, []
    side = Side("plain", plain_side(engine).decoder, prepare=seen.append)
    for number in range(2):
        result = answer(engine, side, PROMPT, number, max_tokens=3)
        assert result.usage.cached_tokens == 0 and result.speculation is None
    assert engine.decoder is before and seen == [0, 1]


# The sweep


def test_every_side_answers_every_prompt_in_every_round_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[tuple[str, int]] = []
    real = sweep.answer

    def noting(engine: Engine, side: Side, prompt: Any, number: int, **more: Any) -> Result:
        order.append((side.name, number))
        return real(engine, side, prompt, number, **more)

    monkeypatch.setattr(sweep, "answer", noting)
    results = measured()
    names = ["plain", "depth 1", "depth 4", "planner"]
    reference, warm_up = [("plain", n) for n in range(3)], [(name, 0) for name in names]
    forwards = [[(name, n) for name in names] for n in range(3)]
    backwards = [turn[::-1] for turn in forwards]
    first = forwards[0] + backwards[1] + forwards[2]
    second = backwards[0] + forwards[1] + backwards[2]
    assert order == reference + warm_up + first + second
    assert [result.side.name for result in results] == names
    for result in results:
        assert [(run.round, run.task) for run in result.runs] == [
            (turn, task) for turn in range(2) for task in range(3)
        ]
        assert result.identical


def test_scripted_acceptance_is_what_comes_out() -> None:
    plain, one, four, planner = measured(tokens=100, mean=3.0)
    assert plain.tokens_a_step == 1.0 and plain.slots == []
    assert one.tokens_a_step is not None and one.tokens_a_step == pytest.approx(2.0, abs=0.1)
    assert four.tokens_a_step is not None and four.tokens_a_step == pytest.approx(3.0, abs=0.15)
    assert four.slots[0][0] == four.slots[0][1] and len(four.slots) <= 4
    assert planner.widths and set(planner.widths) - {1}


def with_times(result: Measured, seconds: float) -> Measured:
    """The same runs as if each token had taken `seconds`."""

    def timed(run: Run) -> Run:
        times = replace(run.result.timings, decode_s=seconds * run.tokens)
        return replace(run, result=replace(run.result, timings=times))

    return replace(result, runs=tuple(map(timed, result.runs)))


def timed_results() -> list[Measured]:
    plain, one, four, planner = measured()
    slow = with_times(plain, 0.01)
    fast = [with_times(r, s) for r, s in ((one, 0.008), (four, 0.005), (planner, 0.004))]
    return [slow, *(replace(result, plain=slow.runs) for result in fast)]


def test_ratios_are_of_the_same_round_and_speeds_of_all_prompts() -> None:
    plain, one, _, planner = timed_results()
    assert plain.speed is not None and plain.speed.median == pytest.approx(100)
    assert one.speed is not None and one.speed.median == pytest.approx(125)
    assert planner.ratio is not None
    assert (planner.ratio.median, planner.ratio.count) == (pytest.approx(2.5), 2)
    code = planner.of_tasks([1])
    assert {run.task for run in code.runs} == {run.task for run in code.plain} == {1}
    assert code.ratio is not None and code.ratio.median == pytest.approx(2.5)


def test_parts_add_up_to_the_step() -> None:
    for result in measured():
        parts = dict(result.step_parts)
        assert parts.pop("step") == pytest.approx(sum(parts.values()))
        assert set(parts) == {"draft", "target", "sample", "commit", "other"}


# What it becomes


def test_the_originals_lines() -> None:
    lines = metric_lines(timed_results())
    assert lines[0] == "METRIC AR_TPS 100.0000"
    pattern = r"METRIC DFLASH_TPS (\d+\.\d{4})   MEAN_ACCEPT (\d+\.\d{4})   (DEPTH \d+|PLANNER)"
    found = [re.fullmatch(pattern, line) for line in lines[1:]]
    assert [match and (match[1], match[3]) for match in found] == [
        ("125.0000", "DEPTH 1"),
        ("200.0000", "DEPTH 4"),
        ("250.0000", "PLANNER"),
    ]
    assert all(
        line.endswith("   SCRIPTED 3") for line in metric_lines(timed_results(), "SCRIPTED 3")
    )


def test_the_planner_is_held_against_the_best_fixed_depth() -> None:
    line = planner_line(timed_results())
    assert line is not None
    assert line.startswith("planner: 1.25 (1.25 to 1.25) of the best (depth 4); rows chosen: ")
    assert planner_line(timed_results()[:-1]) is None
    alone = planner_line([timed_results()[0], timed_results()[-1]])
    assert alone is not None and "2.50 (2.50 to 2.50) of the best (plain)" in alone


def test_acceptance_by_slot_and_domain(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    Console(width=120).print(slot_table(measured(tokens=60)[2], TASKS))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["slot,", "all", "chat", "code"]
    assert rows[1][1:3] == ["1.00", "1.00"]


def test_a_record_holds_all_that_led_to_it() -> None:
    planner = timed_results()[-1]
    options = resolve({"threads": "2"}, {})
    record = json.loads(json_line(planner, TASKS, {"scripted": 3.0}, {"isa": "toy"}, options))
    assert record["side"] == "planner" and record["scripted"] == 3.0
    assert record["ratio"]["median"] == 2.5 and record["identical"] is True
    assert set(record["domains"]) == {"chat", "code"}
    assert len(record["runs"]) == 6
    assert record["planner"]["policy"] == "auto" and record["planner"]["costs"]["lengths"] == [64]
    assert record["paths"]["prefill"]["steps"] == 6
    assert record["plan"] == {"isa": "toy"}
    assert record["options"]["threads"] == {"value": 2, "origin": "flag"}
    assert record["environment"]["cores"] >= 1


# The verb


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(engine: Engine) -> None:
        monkeypatch.setattr("sparkinfer.cli.loading.load_engine", lambda *_: engine)

    return install


def verb(*arguments: str) -> int:
    small = ("--prompts", "2", "-n", "12", "-r", "2", "--draft-depths", "1,3")
    return app.main(["bench", "-m", "toy", *small, *arguments])


def test_the_verb_measures_scripted_acceptance(use: Any, capsys: Any) -> None:
    use(hashed_engine())
    assert verb("--spec", "--scripted", "1,2.5") == 0
    out, err = capsys.readouterr()
    metrics = [line for line in out.splitlines() if line.startswith("METRIC ")]
    assert len(metrics) == 2 * 4
    assert all(line.endswith("SCRIPTED 1") for line in metrics[:4])
    assert all(line.endswith("SCRIPTED 2.5") for line in metrics[4:])
    assert "SCRIPTED 1: answers replayed with 1 tokens a step, no real draft" in out
    assert "by domain" in out and "acceptance by slot" in out and "planner: " in out
    assert "SCRIPTED 2.5: scripted acceptance, costs given" in err
    accept = [re.search(r"MEAN_ACCEPT (\S+)", line) for line in metrics[1:3]]
    assert [match and match[1] for match in accept] == ["1.0000", "1.0000"]


def test_the_verb_measures_a_draft(use: Any, capsys: Any) -> None:
    use(toy_engine([A, B, C] * 9, [2]))
    assert verb("-md", "draft", "--json") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["side"] for record in records] == ["plain", "depth 1", "depth 3", "planner"]
    for record in records:
        assert record["model"] == {"name": "toy"}
        assert record["draft"] == "scripted acceptance"  # the toy's own
        assert record["costs"]["plain_ms"] == [1.0]
        assert record["options"]["draft"]["value"] == "draft"


def test_answers_that_differ_are_exit_1(
    use: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "Paths", BrokenPaths)
    use(toy_engine([A, B, C] * 9, [2]))
    assert verb("--scripted", "3") == 1
    assert "answers DIFFER from plain decoding" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--spec"], "--spec needs something that drafts; use -md MODEL or --scripted 1,2,3"),
        (["--scripted", "0.5"], "--scripted '0.5' is not accepted; expected tokens a step from 1"),
        (["--scripted", "x"], "--scripted 'x' is not accepted"),
        (["--scripted", "nan"], "--scripted 'nan' is not accepted"),
        (["--scripted", "2", "-n", "1"], "-n '1' is not accepted with --spec"),
        (["--scripted", "2", "-n", "8,16"], "-n '8,16' is not accepted with --spec"),
        (["--scripted", "2", "-d", "0"], "-p, -d and --widths measure single forwards"),
        (["--scripted", "2", "--draft-depths", "16"], "--draft-depths '16' is not accepted"),
    ],
)
def test_what_the_verb_does_not_accept(
    flags: list[str], reason: str, use: Any, capsys: Any
) -> None:
    use(hashed_engine())
    assert verb(*flags) == 2
    assert reason in capsys.readouterr().err
