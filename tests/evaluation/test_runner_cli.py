"""The commands on a golden tiny model: two option sets judged, the record judged again, wrong use in one line."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from sparkinfer.cli import main
from sparkinfer.evaluation.record import load_evaluation

MODEL = Path(__file__).parents[1] / "data" / "golden" / "llama-tiny-F32.gguf"
SCOPE = """
name = "tiny"
title = "a golden model with random weights"
device = "cpu"
target = "none"
draft = "auto"
tokens = 12
warmup = 2
looks = [4]
alpha = 0.2
delta = 0.05
aa_blocks = 0
metrics = [{ name = "decode_tps", role = "primary" }]
guards = [{ model = "target", contexts = [32] }]
[prompts]
chat = ["Once upon a time there was a"]
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiling takes longer than all else here: once for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("SPARKINFER_CACHE_DIR", str(cache))
    (tmp_path / "tiny.toml").write_text(SCOPE)
    return tmp_path


def evaluate(folder: Path, base: str, candidate: str, *more: str) -> int:
    sides = ["eval", base, candidate, "--scope", str(folder / "tiny.toml"), "-m", str(MODEL)]
    places = ["-o", str(folder / "out"), "--allow-dirty", "--seed", "3"]
    return main([*sides, *places, *more])


@pytest.mark.timeout(
    600
)  # nineteen processes, each of which imports and loads: 25 s on two idle cores
def test_two_option_sets_are_judged_signed_and_judged_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("securesystemslib")
    assert evaluate(folder, "options:threads=1", "options:threads=1") == 0
    said = capsys.readouterr()
    assert "verdict" in said.out and "block 4 of 4" in said.err
    record = load_evaluation(folder / "out" / "evaluation.json")
    assert record.base.options == {"threads": "1"} and record.plan.seed == 3
    assert len({(s.block, s.slot) for s in record.samples}) == 16
    assert all(check.passed for check in record.correctness)
    assert {check.check for check in record.correctness} == {
        "encoding",
        "content",
        "logits",
        "same_tokens",
    }
    assert record.machine["plans"]["candidate"]["plan"]["threads"] == 1
    # Judged again elsewhere, from the record alone.
    away = folder / "away.json"
    shutil.copy(folder / "out" / "evaluation.json", away)
    assert main(["eval", "report", str(away), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert f"verdict {again['verdict']}" in said.out
    assert main(["eval", "report", str(folder / "out")]) == 0
    assert "self-signed" in capsys.readouterr().out  # the receipt beside it is this record's
    receipt = folder / "out" / "receipt.json"
    ledger = folder / "XDG_DATA_HOME" / "sparkinfer" / "evaluations.jsonl"
    assert main(["verify", str(receipt), "--ledger", str(ledger)]) == 0
    assert "not proven" in capsys.readouterr().out
    receipt.write_bytes(receipt.read_bytes().replace(b'"sig": "', b'"sig": "A'))
    assert main(["verify", str(receipt)]) == 1
    # What is there is not overwritten.
    assert evaluate(folder, "options:", "options:") == 2
    assert "holds an evaluation; --resume" in capsys.readouterr().err


def test_a_revision_that_does_not_build_is_an_outcome_with_a_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = folder / "repository"
    repository.mkdir()
    settings = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "nothing"]):
        subprocess.run(["git", "-C", str(repository), *settings, *words], check=True)
    code = evaluate(folder, "HEAD", "HEAD", "--repo", str(repository), "--no-receipt")
    said = capsys.readouterr()
    assert code == 75 and "verdict INVALID, no label" in said.out
    assert "both sides are the same" in said.err
    report = (folder / "out" / "report.md").read_text()
    assert "its wheel cannot be built" in report


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["eval", "main"], 2, "missing argument 'candidate'"),
        (["eval", "a", "options:"], 2, "give two revisions, two wheels or two option sets"),
        (["eval", "options:", "options:", "--scope", "slow"], 2, "scope 'slow' is unknown"),
        (["eval", "options:", "options:", "--resume"], 2, "--resume needs the --output"),
        (["eval", "options:", "options:", "--option", "threads"], 2, "is not NAME=VALUE"),
        (["eval", "report", "nothing.json"], 66, "cannot read the evaluation record"),
        (["verify", "nothing.json"], 66, "nothing.json"),
    ],
)
def test_wrong_use_is_one_line(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    assert main([*arguments, *(["--no-receipt"] if "options:" in arguments else [])]) == code
    said = capsys.readouterr().err.strip()
    assert words in said and "\n" not in said


def test_two_records_of_one_change_are_set_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    seeds = Path(__file__).parents[1] / "data" / "evaluation"
    author, evaluator = (str(seeds / f"seed_693_{who}.json") for who in ("author", "evaluator"))
    assert main(["eval", "report", evaluator, "--against", author]) == 0
    said = capsys.readouterr().out
    assert "eval-dflash:REJECT" in said and "acceptance is equal in both" in said
    assert main(["eval", "report", evaluator, "--gate", "--json"]) == 1


@pytest.mark.timeout(600)
def test_a_scope_that_drafts_refuses_a_model_without_a_draft(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "tiny.toml").read_text().replace("decode_tps", "dflash_tps")
    (folder / "tiny.toml").write_text(text)
    assert evaluate(folder, "options:threads=1", "options:threads=1", "--no-receipt") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "speculation is off (no draft given); the scope needs a draft" in error
