"""The ledger: a chain that shows what was changed, removed or moved, and how often a pair was evaluated."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluation_records import evaluation, scope

from sparkinfer.errors import MissingFileError, OptionError
from sparkinfer.evaluation import ledger, receipt
from sparkinfer.evaluation.keys import SigningKey, generate
from sparkinfer.evaluation.record import Evaluation
from sparkinfer.evaluation.verdict import judge
from sparkinfer.evaluation.verify import Verification, verify

KEY = generate()


def record(name: str, speed: float = 1.05, seed: int = 1) -> Evaluation:
    small = scope(looks=(6,), aa_blocks=2)
    return evaluation(speed, blocks=6, seed=seed, scope_of=small, id=name)


def begin(path: Path, one: Evaluation) -> ledger.Entry:
    return ledger.start(path, one.id, one.scope, one.plan, one.base, one.candidate)


def attempt(path: Path, one: Evaluation, key: SigningKey = KEY) -> dict[str, Any]:
    """A whole evaluation: written down, measured, signed, appended."""
    started = begin(path, one)
    issued = receipt.issue(one, judge(one), key, started=started)
    ledger.append(path, issued)
    return issued


def checked(folder: Path, issued: dict[str, Any], path: Path, **more: Any) -> Verification:
    receipt.write(folder / "r.json", issued)
    return verify(folder / "r.json", ledger=path, **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "ledger.jsonl"


def test_every_attempt_stays(tmp_path: Path, path: Path) -> None:
    attempt(path, record("e1", 1.0))
    ledger.abort(path, begin(path, record("e2")).evaluation, "the machine was busy")
    begin(path, record("e3"))
    other = evaluation(1.1, candidate=replace(record("x").candidate, sha="9" * 40))
    begin(path, other)
    issued = attempt(path, record("e4"))
    found = checked(tmp_path, issued, path)
    assert found.ok, found.failed
    told = next(text for text in found.passed if "these two builds" in text)
    assert told.endswith("4 (1 BETTER, 1 EQUIVALENT, 1 aborted, 1 without an end)")
    kinds = [entry.kind for entry in ledger.read(path)]
    assert kinds == ["started", "receipt", "started", "aborted", *["started"] * 3, "receipt"]
    assert any("order: among the lines" in text for text in found.proven)
    assert not any("no ledger" in text for text in found.not_proven)


def test_a_published_head_has_to_be_in_the_chain(tmp_path: Path, path: Path) -> None:
    attempt(path, record("e1"))
    head = ledger.read(path)[-1].sha256
    issued = attempt(path, record("e2"))
    assert checked(tmp_path, issued, path, head=head).ok
    path.unlink()  # the first attempt did not please
    issued = attempt(path, record("e2"))
    found = checked(tmp_path, issued, path, head=head)
    assert "published head" in found.failed[0] and found.exit_code == 1


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def _swap(lines: list[bytes]) -> list[bytes]:
    return [lines[2], lines[3], lines[0], lines[1], *lines[4:]]


def _verdict(lines: list[bytes]) -> list[bytes]:
    assert b"BETTER" in lines[1]
    return [lines[0], lines[1].replace(b"BETTER", b"WORSER"), *lines[2:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:-1], "stands in 0 lines"),
        (lambda lines: [*lines[:-1], lines[-1][:-20]], "cut off"),
        (lambda lines: [*lines[:-1], lines[-1].rstrip()], "cut off"),
        (lambda lines: lines[1:], "line 1 does not follow"),
        (lambda lines: [*lines[:1], *lines[2:]], "line 2 does not follow"),
        (_swap, "line 1 does not follow"),
        (_verdict, "line 3 does not follow"),
        (lambda lines: [*lines, lines[-1]], "line 5 does not follow"),
        (lambda lines: [lines[0].replace(b":", b": ", 1), *lines[1:]], "line 1 is damaged"),
        (lambda lines: [b"\n", *lines], "line 1 is damaged"),
        (lambda lines: [b"[1]\n", *lines], "line 1 is damaged"),
        (lambda lines: [b'{"a":"\\ud800"}\n', *lines], "line 1 is damaged"),
        (lambda lines: [b"\xff\n", *lines], "line 1 is damaged"),
        (lambda lines: [], "stands in 0 lines"),
    ],
)
def test_what_was_done_to_the_chain_is_found(
    tmp_path: Path, path: Path, change: Callable[[list[bytes]], list[bytes]], message: str
) -> None:
    attempt(path, record("e1"))
    issued = attempt(path, record("e2"))
    assert checked(tmp_path, issued, path).ok
    path.write_bytes(b"".join(change(lines_of(path))))
    found = checked(tmp_path, issued, path)
    assert found.exit_code == 1 and message in found.failed[0], found.failed


def test_a_changed_byte_in_any_line_that_others_follow_fails(path: Path) -> None:
    attempt(path, record("e1"))
    attempt(path, record("e2"))
    good, last = path.read_bytes(), len(lines_of(path)[-1])
    assert len(ledger.parse(good, path)) == 4
    for place in range(len(good) - last):
        bad = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
        with pytest.raises(ledger.LedgerError):
            ledger.parse(bad, path)


def test_a_changed_last_line_says_something_else_than_the_receipt(
    tmp_path: Path, path: Path
) -> None:
    """No line follows it, so the chain is whole; the receipt is what contradicts it."""
    issued = attempt(path, record("e1"))
    good = path.read_bytes()
    for before, after in ((b"BETTER", b"WORSER"), (b'"evaluation":"e1"', b'"evaluation":"e2"')):
        assert before in lines_of(path)[-1]
        path.write_bytes(lines_of(path)[0] + lines_of(path)[1].replace(before, after))
        assert "says something else" in checked(tmp_path, issued, path).failed[0]
        path.write_bytes(good)


def test_the_plan_has_to_be_the_one_that_was_written_down(tmp_path: Path, path: Path) -> None:
    planned = record("e1", seed=1)
    other = record("e1", seed=2)  # another seed, so another order of sides
    started = begin(path, planned)
    issued = receipt.issue(other, judge(other), KEY, started=started)
    ledger.append(path, issued)
    assert "another one before the run" in checked(tmp_path, issued, path).failed[0]


def test_the_named_beginning_has_to_be_there(tmp_path: Path, path: Path) -> None:
    started = begin(path, record("e1"))
    issued = receipt.issue(record("e2"), judge(record("e2")), KEY, started=started)
    ledger.append(path, issued)
    assert "names as its beginning" in checked(tmp_path, issued, path).failed[0]
    elsewhere = replace(started, sha256="0" * 64)
    issued = receipt.issue(record("e1"), judge(record("e1")), KEY, started=elsewhere)
    ledger.append(path, issued)
    assert "names as its beginning" in checked(tmp_path, issued, path).failed[0]


def test_a_receipt_that_fails_is_not_looked_for(tmp_path: Path, path: Path) -> None:
    issued = attempt(path, record("e1"))
    broken = {**issued, "payloadType": "x"}
    found = checked(tmp_path, broken, path)
    assert len(found.failed) == 1 and "payload type" in found.failed[0]


def test_a_head_needs_its_ledger(tmp_path: Path, path: Path) -> None:
    receipt.write(tmp_path / "r.json", attempt(path, record("e1")))
    with pytest.raises(OptionError, match="needs the ledger"):
        verify(tmp_path / "r.json", head="0" * 64)


def test_a_receipt_twice_in_a_ledger(tmp_path: Path, path: Path) -> None:
    issued = attempt(path, record("e1"))
    ledger.append(path, issued)
    assert "stands in 2 lines" in checked(tmp_path, issued, path).failed[0]


def test_a_damaged_ledger_is_not_written_to(path: Path) -> None:
    attempt(path, record("e1"))
    path.write_bytes(path.read_bytes()[:-5])
    before = path.read_bytes()
    with pytest.raises(ledger.LedgerError, match="cut off"):
        begin(path, record("e2"))
    assert path.read_bytes() == before


def test_a_ledger_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ledger.LedgerError, match="cannot be written"):
        begin(tmp_path / "file" / "ledger.jsonl", record("e1"))


def test_a_line_is_plain_json_and_names_the_line_before(path: Path) -> None:
    attempt(path, record("e1"))
    first, second = (json.loads(line) for line in lines_of(path))
    entries = ledger.read(path)
    assert first["previous"] == "0" * 64 and second["previous"] == entries[0].sha256
    assert second["verdict"] == "BETTER" and second["key"] == KEY.fingerprint
    with pytest.raises(MissingFileError):
        ledger.read(path.with_name("none"))


def test_two_processes_that_append_do_not_break_the_chain(path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:  # each call opens and locks the file for itself
        list(pool.map(lambda n: begin(path, record(f"e{n}")), range(12)))
    assert sorted(entry.evaluation for entry in ledger.read(path)) == sorted(
        f"e{n}" for n in range(12)
    )
