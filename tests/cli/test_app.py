"""The program as a person meets it: help without weight, one-line errors, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparkinfer.cli import app
from sparkinfer.cli.foreign import FOREIGN, VERBS
from sparkinfer.errors import MemoryLimitError
from sparkinfer.options import OPTIONS

HEAVY = ("numba", "numpy", "tokenizers", "huggingface_hub", "jinja2", "torch", "llvmlite")


def run(*arguments: str) -> int:
    return app.main(arguments)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys; from sparkinfer.cli import main; code = main(sys.argv[1:]);"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "Usage: sparkinfer" in done.stdout


def test_the_module_runs_and_prints_its_version() -> None:
    command = [sys.executable, "-m", "sparkinfer", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("sparkinfer 0.")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["runn"], "no such command 'runn'. Did you mean 'run'?"),
        (["run", "--threadz", "2"], "no such option: --threadz (nearest: --threads)"),
        (
            ["run", "-n", "x"],
            "invalid value for '-n' / '--predict' / '--n-predict': 'x'; expected a valid integer",
        ),
        (["run", "-n", "-2", "hi"], "-n -2 is not accepted; expected a whole number, or -1 until"),
        (["run", "--rounds", "1"], "'--rounds': '1'; expected greater than or equal to 2"),
        (
            ["run", "why", "is"],
            "unexpected extra argument(s) (is); a prompt of several words needs",
        ),
        (["run", "--stop", "", "hi"], "a stop string must have 1 to 1024 characters, not 0"),
        (["run", "-m", "", "hi"], "no model given; -m takes a GGUF file"),
        (["run", "--cache-dir", "", "hi"], "--cache-dir= is not accepted; expected a path"),
        (["run", "-m", "x", "\udcff"], "the prompt is not UTF-8 text at byte 0"),
        (["bench", "-m", "x", "-p", "0", "-n", "0"], "nothing to measure: -p, -n and --widths"),
        (["run", "--threads", "0", "hi"], "--threads=0 is not accepted; expected a whole number"),
        (["run", "hi"], "no model given; -m takes a GGUF file"),
        (["run", "--temp", "-1", "hi"], "temperature must be a number from 0 to 100, not -1.0"),
        (["bench", "-m", "smollm2", "-p", "1,x"], "-p '1,x' is not a list of whole numbers"),
        (["run", "-ngl", "99", "hi"], "no option -ngl here, as llama.cpp has it: --device (auto,"),
        (["chat", "-hf", "a/b"], "-hf here, as llama.cpp has it: use -m hf:user/repo[:quant]"),
        (["run", "--cache-type-k=q8_0"], "as llama.cpp has it: use --kv-cache (f16, f32, q8_0)"),
        (["bench"], "missing option '-m' / '--model'"),
        (["inspect", "hf:x"], "model 'hf:x' is not hf:user/repo"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert expected in err


def test_flags_of_llama_cpp_that_are_refused_are_none_of_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for verb in VERBS:
        assert run(verb, "--help") == 0
        words = {word.strip(",") for word in capsys.readouterr().out.split()}
        assert words & FOREIGN.keys() == set()


def test_a_text_may_look_like_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "-m", "/none.gguf", "-p", "-v", "--stop", "-i") == 66
    assert run("run", "-m", "/none.gguf", "--", "-v") == 66
    assert run("verify", "-v") == 2
    assert "llama.cpp" not in capsys.readouterr().err


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    out, err = capsys.readouterr()
    assert "Usage: sparkinfer" in out + err and "error" not in err


def test_a_missing_file_is_66_and_a_broken_one_65(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", str(tmp_path / "none.gguf")) == 66
    (tmp_path / "page.gguf").write_text("<!DOCTYPE html><html></html>")
    assert run("inspect", str(tmp_path / "page.gguf")) == 65
    assert capsys.readouterr().err.count("error: ") == 2


def test_an_unknown_environment_name_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARKINFER_TREADS", "2")
    assert run("options") == 2
    assert "SPARKINFER_TREADS; nearest is SPARKINFER_THREADS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryLimitError("needs 9 GiB"), 71),
        (MemoryError(), 71),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("division by zero"), 70),
    ],
)
def test_every_error_has_a_code_and_a_traceback_only_on_request(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("sparkinfer.cli.options._print_table", fail)
    assert run("options") == code
    assert "Traceback" not in capsys.readouterr().err
    assert run("options", "--debug") == code
    assert ("Traceback" in capsys.readouterr().err) == (code != 130)


def test_a_closed_pipe_ends_quietly() -> None:
    command = f"{sys.executable} -m sparkinfer options --markdown | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "141")


def test_help_cuts_nothing_short_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for verb in ("run", "chat"):
        assert run(verb, "--help") == 0
        out = capsys.readouterr().out
        flags = [flag for option in OPTIONS for flag in option.flag]
        assert [flag for flag in flags if flag.partition("/")[0] not in out] == []
    assert run("--help") == 0
    _, commands = capsys.readouterr().out.split("Commands:")
    assert "..." not in commands and commands.count("\n") == 12
    assert run("eval") == 2
    assert "sparkinfer eval run --help" in capsys.readouterr().err


def test_options_show_value_and_origin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARKINFER_ISA", "portable")
    assert run("options", "--threads", "3", "--json") == 0
    block = json.loads(capsys.readouterr().out)
    assert block["threads"] == {"value": 3, "origin": "flag"}
    assert block["isa"] == {"value": "portable", "origin": "env"}
    assert run("options", "-t", "3") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["threads", "3", "flag", "--threads", "SPARKINFER_THREADS"] in rows


def test_pull_without_a_name_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pull") == 0
    out, _ = capsys.readouterr()
    assert out.startswith("smollm2 ") and "(not fetched)" in out


def test_doctor_reports_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("doctor", "--json") == 0
    names = {(item["section"], item["name"]) for item in json.loads(capsys.readouterr().out)}
    assert {("cpu", "instruction set"), ("memory", "available"), ("gpu", "torch")} <= names
    (tmp_path / "file").write_text("")
    assert run("doctor", "--cache-dir", str(tmp_path / "file"), "-t", "200") == 1
    out = capsys.readouterr().out
    assert "cannot be written: File exists; --cache-dir names another" in out
    assert "more than the" in out and "2 to look at" in out
