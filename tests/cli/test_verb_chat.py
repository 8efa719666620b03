"""`chat` from a pipe over a toy model: commands, turns and what is remembered."""

import io
import sys
from typing import Any

import numpy as np
import pytest
from test_verb_run import CHAT_START, TOKENIZER, A, B, C, scripted
from toy_model import BOS, END, TURN, ToyTarget, ToyTemplate

from sparkinfer.cli import app
from sparkinfer.cli.chat import read_lines
from sparkinfer.engine import Engine


def talk(engine: Engine, text: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr("sparkinfer.cli.loading.load_engine", lambda *_: engine)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    return app.main(["chat", "-m", "toy", *flags])


def test_each_turn_goes_on_from_the_one_before(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    engine = scripted([C])
    assert talk(engine, "a\n\nb\n", monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == "c\n\n"
    assert err.splitlines()[1].startswith("prompt 8 tokens (5 kept from before)")
    assert engine.target.states[-1].tokens == [BOS, TURN, A, TURN, C, TURN, B, TURN]


def test_reset_and_system_start_over(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    engine = scripted([C])
    text = "a\n/reset\na\n/system\n/system b\n/system\na\n/exit\na\n"
    assert talk(engine, text, monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == "c\nc\n\n"
    assert engine.target.states[-1].tokens == [BOS, TURN, B, TURN, A, TURN]
    assert err.count("conversation forgotten") == 2
    assert "no system message set" in err and "\nb\n" in err


def test_commands_are_listed_and_unknown_ones_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert talk(scripted([]), "/help\n/plan\n/quitt\n/quit\na\n", monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "/system TEXT" in err and "plan: isa = toy" in err
    assert "unknown command /quitt; /help lists them" in err


def test_a_question_that_does_not_fit_leaves_the_chat_going(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    target = ToyTarget(lambda _: ALWAYS_END, context=CHAT_START + 1)
    engine = Engine(target, TOKENIZER, ToyTemplate(TOKENIZER))
    assert talk(engine, "aaaa\na\n", monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == "\n"
    assert "error: the prompt has 7 tokens, the context holds 5" in err
    assert "; /reset starts over\n" in err


ALWAYS_END = np.eye(TOKENIZER.n_vocab, dtype=np.float32)[END]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\nb", ["a", "b"]),
        ("a\\\nb\nc\n", ["a\nb", "c"]),
        ("a\\\n", ["a"]),
        ("", []),
    ],
)
def test_a_backslash_joins_lines(
    text: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert list(read_lines()) == lines
