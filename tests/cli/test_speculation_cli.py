"""What `run` and `chat` say about speculation, and `run --compare`, over toy models."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_draft import A, B, BrokenPaths, C, toy_engine

from sparkinfer.cli import app
from sparkinfer.cli.flags import SPECULATION
from sparkinfer.cli.speculation import closing_words
from sparkinfer.engine import Engine
from sparkinfer.options import OPTIONS, configure

TEXT = [A, B, C] * 6
DRAFT = ("-md", "draft.gguf")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(engine: Engine) -> Engine:
        monkeypatch.setattr("sparkinfer.cli.loading.load_engine", lambda *_: engine)
        return engine

    return install


def run(*arguments: str) -> int:
    return app.main(["run", "-m", "toy", "a", *arguments])


def test_start_and_end_say_what_is_drafted_and_gained(use: Any, capsys: Any) -> None:
    engine = use(toy_engine(TEXT, [3]))
    assert run(*DRAFT) == 0
    out, err = capsys.readouterr()
    assert out == "abc" * 6 + "\n"
    first, last = err.splitlines()
    assert first == f"speculation: {engine.speculation}"
    assert first.startswith("speculation: on (scripted acceptance")
    assert " · speculation: on, 3." in last
    assert last.endswith(" tokens a step, too few steps to tell what that gains")


def test_a_draft_that_is_switched_off_is_said_at_both_ends(use: Any, capsys: Any) -> None:
    engine = toy_engine(TEXT, [3])
    use(Engine(engine.target, engine.tokenizer, engine.template, off="spec off"))
    assert run(*DRAFT, "--spec", "off") == 0
    first, last = capsys.readouterr().err.splitlines()
    assert first == "speculation: off (spec off)"
    assert last.endswith(" · speculation: off (spec off)")


def result_of(**changes: Any) -> Any:
    result = toy_engine(TEXT, [3], plain=changes.pop("plain", 1.0)).chat(
        [{"role": "user", "content": "a"}], max_tokens=changes.pop("max_tokens", None)
    )
    assert result.speculation is not None
    return replace(result, speculation=replace(result.speculation, **changes))


def test_the_closing_words_name_the_reason() -> None:
    start = "on (d)"
    accepted = result_of(plain=0.0, gain=0.9, drafted=50, accepted=4, widths={1: 2, 4: 9})
    assert closing_words(accepted, start) == (
        "on, but it gained nothing here: 0.90x plain decoding (estimated; run --compare measures it), "
        "drafts accepted 8 %"
    )
    gained = result_of(widths={1: 2, 4: 9}, gain=1.8)
    assert closing_words(gained, start).endswith(" tokens a step, 1.80x plain decoding (estimated)")
    short = result_of(widths={1: 3, 4: 4}, gain=0.4)
    assert closing_words(short, start).startswith("on, ")
    assert closing_words(short, start).endswith("too few steps to tell what that gains")
    plain = result_of(widths={1: 9, 4: 1}, drafted=3, accepted=0)
    words = "on, but plain steps were faster here: "
    assert closing_words(plain, start) == words + "drafts accepted 0 %"
    never = result_of(widths={1: 9}, steps=0, drafted=0, accepted=0)
    assert closing_words(never, start) == words + "nothing was drafted"
    assert closing_words(result_of(max_tokens=1), start) == "on, no step was left to draft for"
    declined = replace(result_of(), speculation=None)
    assert closing_words(declined, start) == "off (this request)"
    assert closing_words(declined, "off (no draft given)") == "off (no draft given)"


def test_stats_have_a_row_for_everything(use: Any, capsys: Any) -> None:
    use(toy_engine(TEXT, [3, 0], turns=[(4, "compact"), (6, "compact")]))
    assert run(*DRAFT, "--stats") == 0
    out, err = capsys.readouterr()
    assert out == "abc" * 6 + "\n"
    rows = [" ".join(line.split()) for line in err.splitlines()]
    expected = (
        "path prefill 1 steps, 0 rows, 1 tokens",
        "path compact ",
        "path window ",
        "milliseconds a step ",
        "draft scripted acceptance",
        "policy, acceptance forced, match",
        "tokens a step ",
        "rows chosen ",
        "acceptance by slot 1 ",
        "refused compact: 6 rows, at most 4 (x",
        "planner's last choice ",
        "against plain decoding expected 1.00x, came out at ",
    )
    for start in expected:
        assert any(row.startswith(start) for row in rows), (start, rows)


def test_json_has_the_report(use: Any, capsys: Any) -> None:
    use(toy_engine(TEXT, [3]))
    assert run(*DRAFT, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    told = record["speculation"]
    assert told["draft"] == "scripted acceptance" and told["policy"] == "forced"
    assert told["tau"] == pytest.approx(1 + told["accepted"] / told["steps"])
    assert sum(told["widths"].values()) == told["steps"]
    assert record["options"]["draft"] == {"value": "draft.gguf", "origin": "flag"}


def test_compare_prints_the_answer_once_and_both_speeds(use: Any, capsys: Any) -> None:
    engine = use(toy_engine(TEXT, [3]))
    assert run(*DRAFT, "--compare") == 0
    out, err = capsys.readouterr()
    assert out == "abc" * 6 + "\n"
    lines = [line for line in err.splitlines() if line.startswith("compare: ")]
    assert lines[0].startswith("compare: plain ") and " tok/s, speculative " in lines[0]
    assert " in 2 rounds, " in lines[0] and lines[0].endswith(" tokens a step")
    assert lines[1].startswith("compare: prompt and answer together, ratio ")
    assert lines[2] == "compare: all 5 outputs are identical (19 tokens)"
    prompts = 6 * 4  # the answer, one warm-up and two rounds of two: every prompt anew
    assert engine.target.computed > prompts + 3 * 19


def test_compare_gives_json_with_every_round(use: Any, capsys: Any) -> None:
    use(toy_engine(TEXT, [3]))
    assert run(*DRAFT, "--compare", "--rounds", "3", "--json") == 0
    compare = json.loads(capsys.readouterr().out)["compare"]
    assert len(compare["plain_tok_s"]) == len(compare["speculative_tok_s"]) == 3
    assert compare["identical"] is True and compare["first_difference"] is None
    assert compare["ratio"]["count"] == 3
    assert compare["tokens_a_step"] > 3


def test_compare_uses_the_answers_seed(use: Any, capsys: Any) -> None:
    use(toy_engine(TEXT, [3]))
    assert run(*DRAFT, "--compare", "--temp", "2", "-n", "12") == 0
    assert "all 5 outputs are identical" in capsys.readouterr().err


def test_outputs_that_differ_are_exit_1(use: Any, capsys: Any) -> None:
    use(toy_engine(TEXT, [3], paths=BrokenPaths))
    assert run(*DRAFT, "--compare") == 1
    err = capsys.readouterr().err
    assert "compare: the outputs DIFFER from token 2 on; please report it" in err


def test_rejection_promises_no_equal_tokens(use: Any, capsys: Any) -> None:
    use(toy_engine(TEXT, [3], paths=BrokenPaths))
    flags = ("--dflash-accept", "rejection", "--temp", "1", "-n", "6")
    assert run(*DRAFT, "--compare", *flags) == 0
    assert "compare: outputs not compared" in capsys.readouterr().err


def test_one_token_leaves_nothing_to_compare_but_the_output(use: Any, capsys: Any) -> None:
    use(toy_engine(TEXT, [3]))
    assert run(*DRAFT, "--compare", "-n", "1") == 0
    err = capsys.readouterr().err
    assert "compare: nothing was decoded after the first token" in err
    assert "compare: all 5 outputs are identical (1 tokens)" in err


@pytest.mark.parametrize("rounds", ["1", "101", "x"])
def test_rounds_are_checked(rounds: str, capsys: Any) -> None:
    assert run(*DRAFT, "--compare", "--rounds", rounds) == 2
    assert "invalid value for '--rounds'" in capsys.readouterr().err
    assert run(*DRAFT, "--rounds", "3") == 2
    assert "--rounds says how often --compare runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "--compare needs a draft; -md takes a GGUF file or a folder"),
        ([*DRAFT, "--spec", "off"], "--compare needs speculation, which --spec off switches off"),
    ],
)
def test_compare_needs_speculation(use: Any, flags: list[str], reason: str, capsys: Any) -> None:
    plain = toy_engine(TEXT, [3])
    use(Engine(plain.target, plain.tokenizer, plain.template))
    assert run("--compare", *flags) == 2
    assert capsys.readouterr().err == f"error: {reason}\n"


def test_chat_says_it_too(use: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    use(toy_engine([C], [3]))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"/stats\na\n/stats\n")))
    assert app.main(["chat", "-m", "toy", *DRAFT]) == 0
    out, err = capsys.readouterr()
    assert out == "c\n"
    lines = err.splitlines()
    assert lines[0].startswith("speculation: on (") and lines[1] == "no answer yet"
    assert " · speculation: on, " in lines[2]
    assert any(line.startswith("rows chosen") for line in lines)


def test_the_flags_have_the_names_people_know() -> None:
    flags = {option.name: option.flag for option in OPTIONS}
    assert {"-md", "--model-draft"} <= set(flags["draft"])
    assert "--draft-max" in flags["dflash_proposals"] and "--spec" in flags["spec"]


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_both_verbs_take_them(verb: str, capsys: Any, tmp_path: Path) -> None:
    arguments = [verb, "-m", str(tmp_path / "none.gguf"), "-md", "d", "--spec", "on"]
    assert app.main([*arguments, "--draft-max", "3", *(["hi"] if verb == "run" else [])]) == 66
    options = configure({"draft": Path("d"), "spec": "on", "dflash_proposals": 3})
    assert options.integer("dflash_proposals") == 3
    assert "none.gguf" in capsys.readouterr().err


def test_a_bad_value_is_one_line(capsys: Any) -> None:
    assert run("--spec", "maybe") == 2
    assert capsys.readouterr().err == (
        "error: --spec=maybe is not accepted; expected auto | on | off\n"
    )


def test_every_option_of_drafting_has_a_flag() -> None:
    names = {option.name for option in OPTIONS}
    assert {name for name in names if name.startswith("dflash_")} <= set(SPECULATION)
