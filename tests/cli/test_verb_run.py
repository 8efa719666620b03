"""`run` over a toy model: what goes where, prompts from anywhere, Ctrl-C, JSON."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_model import (
    BOS,
    END,
    TURN,
    ToyTarget,
    ToyTemplate,
    ToyTokenizer,
    scripted_logits,
)

from sparkinfer.cli import app
from sparkinfer.cli.run import plan_lines
from sparkinfer.engine import Engine

TOKENIZER = ToyTokenizer([b"a", b"b", b"c", b" ", b"\xc3", b"\xa9", b"\n"])
A, B, C, SPACE, E1, E2, NEWLINE = range(3, 10)
CHAT_START = 4  # <s> <turn> one letter <turn>


def scripted(script: list[int], start: int = CHAT_START, **more: Any) -> Engine:
    target = ToyTarget(scripted_logits(TOKENIZER.n_vocab, start, script), **more)
    return Engine(target, TOKENIZER, ToyTemplate(TOKENIZER))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make `run` load the given engine."""

    def install(engine: Engine) -> Engine:
        monkeypatch.setattr("sparkinfer.cli.loading.load_engine", lambda *_: engine)
        return engine

    return install


def run(*arguments: str) -> int:
    return app.main(["run", "-m", "toy", *arguments])


def pipe_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_the_answer_alone_is_on_standard_output(use: Any, capsys: Any) -> None:
    engine = use(scripted([A, SPACE, E1, E2, B]))
    assert run("a") == 0
    out, err = capsys.readouterr()
    assert out == "a éb\n"
    assert err.count("\n") == 1
    assert err.startswith("prompt 4 tokens")
    assert "answer 6 tokens" in err and "the answer is complete" in err
    assert err.endswith("speculation: off (no draft given)\n")
    assert engine.target.closed


def test_the_system_message_comes_first_and_raw_text_has_no_template(use: Any) -> None:
    engine = use(scripted([], start=0))
    assert run("-sys", "b", "-p", "a") == 0
    assert engine.target.states[-1].tokens == [BOS, TURN, B, TURN, A, TURN]
    engine = use(scripted([], start=0))
    assert run("--raw", "a b") == 0
    assert engine.target.states[-1].tokens == [BOS, A, SPACE, B]


@pytest.mark.parametrize(
    ("arguments", "expected", "end"),
    [
        (["-n", "2"], "ab\n", "cut at -n"),
        (["--stop", "c"], "ab\n", "the answer is complete"),
        (["--stop", "bc", "--stop", "x"], "a\n", "the answer is complete"),
        (["-n", "0"], "\n", "cut at -n"),
    ],
)
def test_length_and_stops(
    use: Any, capsys: Any, arguments: list[str], expected: str, end: str
) -> None:
    use(scripted([A, B, C, A]))
    assert run("a", *arguments) == 0
    out, err = capsys.readouterr()
    assert out == expected
    assert end in err


def test_a_full_context_is_named(use: Any, capsys: Any) -> None:
    use(scripted([A] * 50, context=10))
    assert run("a") == 0
    assert "the context is full (-c)" in capsys.readouterr().err


def test_a_prompt_that_does_not_fit_is_an_error(use: Any, capsys: Any) -> None:
    use(scripted([], context=3))
    assert run("a") == 2
    assert "error: the prompt has 4 tokens, the context holds 3" in capsys.readouterr().err


def test_prompts_from_a_file_and_from_a_pipe(
    use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt").write_text("c")
    engine = use(scripted([]))
    assert run("-f", str(tmp_path / "prompt")) == 0
    assert engine.target.states[-1].tokens == [BOS, TURN, C, TURN]
    for extra in ([], ["-f", "-"]):
        pipe_in(monkeypatch, b"b")
        engine = use(scripted([]))
        assert run(*extra) == 0
        assert engine.target.states[-1].tokens == [BOS, TURN, B, TURN]


def test_prompts_that_cannot_be(
    use: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(scripted([]))
    assert run("a", "-p", "b") == 2
    assert run("-f", str(tmp_path / "none")) == 66
    assert run("--raw", "--system", "a", "b") == 2
    pipe_in(monkeypatch, b"a\xff")
    assert run() == 2
    pipe_in(monkeypatch, b"")
    assert run() == 2
    (tmp_path / "nothing").touch()
    assert run("-f", str(tmp_path / "nothing")) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors == [
        "error: more than one prompt given; use one of PROMPT, -p and -f",
        f"error: cannot read the prompt file {tmp_path / 'none'}: No such file or directory",
        "error: --system needs the chat template that --raw leaves out",
        "error: standard input is not UTF-8 text at byte 1",
        "error: no prompt given, and standard input is empty; use -p TEXT or -f FILE, or pipe it in",
        f"error: the prompt file {tmp_path / 'nothing'} is empty",
    ]


def test_bytes_that_the_locale_did_not_read_are_utf_8(use: Any) -> None:
    engine = use(scripted([], start=0))
    assert run("--raw", b"a\xc3\xa9".decode("ascii", "surrogateescape")) == 0
    assert engine.target.states[-1].tokens == [BOS, A, E1, E2]


def test_minus_one_is_no_limit_and_no_seed(use: Any, capsys: Any) -> None:
    use(scripted([A] * 600, context=700))
    assert run("a", "-n", "-1", "--seed", "-1", "--temp", "0.1") == 0
    assert capsys.readouterr().out == "a" * 600 + "\n"


def test_the_plan_has_a_line_for_each_value() -> None:
    table = [{"path": "block", "ms": [1.23456, 2.0]}, {"path": "window", "ms": []}]
    plan = {"isa": "avx2", "costs": {"plain": 0.123456, "steps": table}}
    assert list(plan_lines(plan)) == [
        "isa = avx2",
        "costs.plain = 0.1235",
        "costs.steps: path block, ms 1.235 2",
        "costs.steps: path window, ms none",
    ]


def test_json_has_all_that_led_to_the_answer(use: Any, capsys: Any) -> None:
    use(scripted([A, B]))
    assert run("a", "--json", "--logprobs", "2", "--seed", "7", "-t", "3") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["text"], record["finish_reason"], record["seed"]) == ("ab", "stop", 7)
    assert record["tokens"] == [A, B, END]
    assert len(record["logprobs"]) == 3 and len(record["logprobs"][0]["top"]) == 2
    assert record["plan"]["isa"] == "toy"
    assert record["options"]["threads"] == {"value": 3, "origin": "flag"}
    assert record["usage"]["total_tokens"] == 7


def test_logprobs_and_the_plan_go_to_standard_error(use: Any, capsys: Any) -> None:
    use(scripted([A]))
    assert run("a", "--logprobs", "1", "--print-plan") == 0
    out, err = capsys.readouterr()
    assert out == "a\n"
    lines = err.splitlines()
    assert "plan: isa = toy" in lines
    assert any(line.startswith("'a' -0.0") and line.endswith("]") for line in lines)


def test_one_interrupt_keeps_the_text_and_exits_130(use: Any, capsys: Any) -> None:
    engine = use(scripted([A] * 100))

    def interrupt_at_the_third_token() -> None:
        if engine.target.computed == CHAT_START + 2:
            os.kill(os.getpid(), signal.SIGINT)

    engine.target.before_forward = interrupt_at_the_third_token
    assert run("a") == 130
    out, err = capsys.readouterr()
    assert out.strip("\n") in ("aaa", "aaaa")
    assert out.endswith("\n") and "interrupted" in err


def test_a_second_interrupt_ends_at_once() -> None:
    program = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from test_verb_run import A, scripted
import sparkinfer.cli.loading as loading
from sparkinfer.cli import main
engine = scripted([A] * 100)
def twice():
    if engine.target.computed == 6:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        print("still here")
engine.target.before_forward = twice
loading.load_engine = lambda *_: engine
main(["run", "-m", "toy", "a"])
print("not at once")
"""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", program, str(here)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{here}:{here.parent}", "PATH": os.defpath},
    )
    assert (done.returncode, done.stderr) == (130, "")
    assert done.stdout.strip("a") == ""
