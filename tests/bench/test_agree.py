"""The agreement check: what it compares, what it finds, and what it must not let pass."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_draft import PROMPT, SPACE, TOKENIZER, A, B, BrokenPaths, C, toy_costs, toy_engine
from toy_model import END, ToyTarget, ToyTemplate, hashed_logits

from sparkinfer.bench import agree, sides
from sparkinfer.bench.agree import Agreement, Setting, Tally, check, compare_results
from sparkinfer.bench.answers import Side
from sparkinfer.bench.oracle import Oracle
from sparkinfer.bench.sides import Drafting, check_settings, scripted_settings
from sparkinfer.cli import app
from sparkinfer.dflash.verify import Paths
from sparkinfer.engine import Engine
from sparkinfer.options import resolve

TEXT = [A, B, C, B] * 30
GOLDEN = Path(__file__).parent.parent / "data" / "golden"


@pytest.fixture(autouse=True)
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "measured_costs", lambda *_: toy_costs())
    monkeypatch.setattr("sparkinfer.options._flags", {})


def quiet(*_: Any) -> None:
    pass


def hashed_engine(context: int = 256) -> Engine:
    """Any token may follow any text, and a wrong state shows at once."""
    target = ToyTarget(hashed_logits(TOKENIZER.n_vocab), context)
    return Engine(target, TOKENIZER, ToyTemplate(TOKENIZER))


def run_check(
    engine: Engine,
    *,
    paths: type[Paths] = Paths,
    depths: Sequence[int] = (1, 3, 6),
    tokens: int = 24,
    repeats: int = 1,
    monkeypatch: pytest.MonkeyPatch | None = None,
    **options: Any,
) -> Agreement:
    if monkeypatch is not None:
        monkeypatch.setattr(sides, "Paths", paths)
    oracle = Oracle(TOKENIZER.n_vocab, None)
    drafting = Drafting.over(engine, oracle.draft, resolve({}, {}), quiet)
    names = [path.name for path in drafting.decoder.paths.order]
    settings, _ = check_settings(drafting, oracle, names, depths)
    return check(
        engine,
        [PROMPT, [*PROMPT, A, B]],
        settings,
        tokens=tokens,
        repeats=repeats,
        options=options,
        oracle=oracle,
        report=quiet,
    )


def test_every_path_and_depth_agrees_on_a_target_that_remembers_everything() -> None:
    agreement = run_check(hashed_engine(), repeats=2)
    assert agreement.passed, [difference.line() for difference in agreement.differences]
    # compact at 1 and 3, the others at 1, 3 and 6, the planner, and all of them in turn
    assert len(agreement.tallies) == 2 + 3 * 3 + 2
    assert agreement.pairs == agreement.agreeing == 13 * 2
    assert agreement.tokens >= 13 * 2 * 2 * 24
    for name, tally in agreement.tallies.items():
        assert (tally.pairs, tally.runs) == (2, 4)
        if name != "planner":
            assert 0 < tally.steps.accepted < tally.steps.drafted, name
    assert agreement.lines()[0] == "METRIC SPEC_AGREE 26/26 = 1.0000"
    assert agreement.lines()[-1] == "VERDICT PASS"


def test_sampled_answers_agree_too() -> None:
    agreement = run_check(hashed_engine(), temperature=1.3, seed=5)
    assert agreement.passed


def test_a_wrong_row_is_found_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    agreement = run_check(
        toy_engine(TEXT, [0]), paths=BrokenPaths, depths=[2], tokens=16, monkeypatch=monkeypatch
    )
    assert not agreement.passed and agreement.lines()[-1] == "VERDICT FAIL"
    first = agreement.differences[0]
    assert (first.setting, first.part, first.got) == ("compact, depth 2", "tokens", SPACE)
    assert first.position is not None and first.plain in (A, B, C)
    assert re.fullmatch(
        rf"prompt 0, compact, depth 2, run 1: tokens differ at token {first.position}: plain \d,"
        rf" speculative {SPACE}",
        first.line(),
    )


def test_a_difference_of_one_bit_in_a_logprob_is_one() -> None:
    engine = hashed_engine()
    plain = engine.generate(PROMPT, max_tokens=6, logprobs=2)
    again = engine.generate(PROMPT, max_tokens=6, logprobs=2, reuse_prefix=False)
    assert compare_results(plain, again) is None
    changed = list(plain.logprobs)
    changed[3] = replace(changed[3], logprob=changed[3].logprob * (1 + 2**-50))
    found = compare_results(plain, replace(plain, logprobs=tuple(changed)))
    assert found == ("logprobs", 3, plain.logprobs[3], changed[3])


@pytest.mark.parametrize(
    ("change", "part", "position"),
    [
        ({"tokens": (1, 2)}, "tokens", 0),
        ({"finish_reason": "context"}, "finish_reason", None),
        ({"text": "x"}, "text", None),
        ({"usage": None}, "usage", None),
        ({"stop": 1}, "stop", None),
    ],
)
def test_every_part_of_a_result_counts(
    change: dict[str, Any], part: str, position: int | None
) -> None:
    plain = hashed_engine().generate(PROMPT, max_tokens=6)
    found = compare_results(plain, replace(plain, **change))
    assert found is not None and found[:2] == (part, position)


def test_an_answer_that_is_longer_differs_where_the_other_ends() -> None:
    plain = hashed_engine().generate(PROMPT, max_tokens=6, ignore_eos=True)
    longer = replace(plain, tokens=(*plain.tokens, 9))
    assert compare_results(plain, longer) == ("tokens", 6, None, 9)


def test_nothing_compared_is_a_failure() -> None:
    assert not Agreement().passed
    assert Agreement().lines() == [
        "METRIC SPEC_AGREE 0/0 = 0.0000",
        "METRIC TOKENS_COMPARED 0",
        "VERDICT FAIL",
    ]
    assert not Agreement({"window": Tally(pairs=1, agreeing=1)}).passed


def test_a_path_that_no_step_took_is_a_failure() -> None:
    engine = toy_engine(TEXT, [2], turns=[(4, "window")])
    oracle = Oracle(TOKENIZER.n_vocab, None)
    agreement = check(
        engine,
        [PROMPT],
        [Setting(Side("block, depth 3", engine.decoder), "block")],
        tokens=16,
        repeats=1,
        options={},
        oracle=oracle,
        report=quiet,
    )
    assert not agreement.passed
    assert agreement.differences[0].line() == (
        "prompt 0, block, depth 3, run 1: paths differ: plain block, speculative prefill, window"
    )


def test_plain_decoding_must_agree_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = hashed_engine()
    rows: list[int] = []

    def flaky(tokens: Sequence[int]) -> Any:
        rows.append(len(tokens))
        row = hashed_logits(TOKENIZER.n_vocab)(tokens)
        row[END if len(rows) == 60 else SPACE] += 50.0 if len(rows) >= 60 else 0.0
        return row

    monkeypatch.setattr(engine.target, "logits", flaky)
    agreement = run_check(engine, depths=[1])
    assert not agreement.passed
    assert agreement.differences[0].setting == "plain"


def test_answers_end_at_a_new_token_where_there_is_one() -> None:
    assert agree._late_token([5, 6, 7, 8], 3) == 7
    assert agree._late_token([5, 6, 5, 6, 5], 3) is None
    varied = toy_engine([A, B] * 10 + [C] + [A, B] * 10, [0])
    agreement = run_check(varied, depths=[3], tokens=16)
    assert agreement.passed and agreement.stops >= 1


def test_scripted_settings_cover_full_and_empty_acceptance() -> None:
    engine = hashed_engine()
    oracle = Oracle(TOKENIZER.n_vocab, None)
    drafting = Drafting.over(engine, oracle.draft, resolve({}, {}), quiet)
    settings = scripted_settings(drafting.scripted(oracle), oracle)
    agreement = check(
        engine, [PROMPT], settings, tokens=100, repeats=1, options={}, oracle=oracle, report=quiet
    )
    assert agreement.passed
    changing = agreement.tallies["scripted drafts, another path each step"].steps
    assert 0 < changing.accepted < changing.drafted


# The verb


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(engine: Engine) -> None:
        monkeypatch.setattr("sparkinfer.cli.loading.load_engine", lambda *_: engine)

    return install


def verb(*arguments: str) -> int:
    return app.main(["check", "-m", "toy", "--prompts", "2", "-n", "16", *arguments])


def test_the_verb_passes_with_a_line_for_scripts(use: Any, capsys: Any) -> None:
    use(hashed_engine())
    assert verb("--depths", "1,5", "--paths", "window,compact") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[-3:-1] == ["METRIC SPEC_AGREE 10/10 = 1.0000", lines[-2]]
    assert re.fullmatch(r"METRIC TOKENS_COMPARED \d\d\d", lines[-2])
    assert lines[-1] == "VERDICT PASS"
    assert "draft: scripted acceptance\n2 prompts x 5 settings, 1 runs each\n" in err
    assert "left out: compact at depth 5: 6 rows, at most 4" in err


def test_the_verb_fails_with_the_first_differences(
    use: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "Paths", BrokenPaths)
    use(toy_engine(TEXT, [3]))
    assert verb("--depths", "3", "--paths", "window") == 1
    out = capsys.readouterr().out
    assert "prompt 0, window, depth 3, run 1: tokens differ at token " in out
    assert "(domain chat)" in out and out.endswith("VERDICT FAIL\n")


def test_the_verb_prints_json(use: Any, capsys: Any) -> None:
    use(hashed_engine())
    assert verb("--depths", "2", "--paths", "block", "--json", "--repeats", "2") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["verdict"], record["pairs"], record["agreeing"]) == ("PASS", 6, 6)
    assert record["settings"]["block, depth 2"]["runs"] == 4
    assert record["prompts"][0]["domain"] == "chat"
    assert record["plan"]["isa"] == "toy" and record["differences"] == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            ["--depths", "16"],
            "--depths '16' is not accepted; expected all, or numbers from 1 to 15",
        ),
        (["--depths", ""], "--depths '' is not accepted"),
        (["--paths", "windows"], "--paths has 'windows'; expected all or some of compact,window"),
        (["--prompts", "99"], "--prompts 99 is not accepted; there are 24 built-in prompts"),
        (["--temp", "-1"], "temperature must be a number from 0 to 100"),
    ],
)
def test_what_the_verb_does_not_accept(
    flags: list[str], reason: str, use: Any, capsys: Any
) -> None:
    use(hashed_engine())
    assert verb(*flags) == 2
    assert reason in capsys.readouterr().err


def test_a_draft_that_is_switched_off_is_an_error(use: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("SPARKINFER_SPEC", "off")
    use(hashed_engine())
    assert verb("-md", "draft") == 2
    assert "spec=off (env) leaves nothing to measure with a draft" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama-tiny-F32", "qwen35-tiny-F32"])
def test_a_real_target_agrees(name: str) -> None:
    with Engine.load(GOLDEN / f"{name}.gguf", context=96, threads=2) as engine:
        oracle = Oracle(engine.tokenizer.n_vocab, None)
        drafting = Drafting.over(engine, oracle.draft, resolve({}, {}), quiet)
        names = [path.name for path in drafting.decoder.paths.order]
        settings, _ = check_settings(drafting, oracle, names, [1, 3, 15])
        agreement = check(
            engine,
            [[5, 6, 7, 8, 9]],
            settings,
            tokens=40,
            repeats=1,
            options={},
            oracle=oracle,
            report=quiet,
        )
    assert agreement.passed, [difference.line() for difference in agreement.differences]
    assert agreement.pairs == 13
