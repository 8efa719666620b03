"""An append-only list of evaluations: JSON lines, each holding the hash of the line before.

Every attempt begins with a line before anything is measured, so a run that was given up leaves a trace.
The chain proves an order among its own lines. Whoever keeps the file can cut off its end or write it anew;
a head that was published elsewhere (a tag, a mail, a log) rules that out for the lines before it.
"""

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkinfer.errors import MissingFileError, SparkError
from sparkinfer.evaluation.codec import RecordError, canonical, parse_json
from sparkinfer.evaluation.dsse import digest, key_of
from sparkinfer.evaluation.receipt import payload_of, plan_digest, statement_of
from sparkinfer.evaluation.record import Build, Evaluation, Plan, Scope

START = "0" * 64
KINDS = ("started", "receipt", "aborted")
HASH = re.compile(r"[0-9a-f]{64}")


class LedgerError(SparkError):
    """A ledger cannot be written, or it is damaged: a line was changed, removed, moved or cut off."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. `sha256` is that of the line's bytes, `previous` that of the line before."""

    index: int
    previous: str
    kind: str
    evaluation: str
    at: str
    facts: Mapping[str, Any]
    sha256: str


def default_path() -> Path:
    """Return the user's own ledger."""
    from platformdirs import user_data_path

    return user_data_path("sparkinfer", appauthor=False) / "evaluations.jsonl"


def start(
    path: Path, evaluation_id: str, scope: Scope, plan: Plan, base: Build, candidate: Build
) -> Entry:
    """Write down, before anything is measured, what will be; the entry goes to `receipt.issue`.

    Raises: LedgerError for a damaged ledger, which is not written to.
    """
    facts = {
        "base": _build(base),
        "candidate": _build(candidate),
        "scope": scope.name,
        "seed": plan.seed,
        "plan": plan_digest(scope, plan, base, candidate),
    }
    return _write(path, "started", evaluation_id, facts)


def abort(path: Path, evaluation_id: str, reason: str) -> Entry:
    """Write down that an evaluation that was started has ended without a receipt, and why."""
    return _write(path, "aborted", evaluation_id, {"reason": reason})


def append(path: Path, receipt: Mapping[str, Any]) -> Entry:
    """Add a receipt: the digest of its signed content, its verdict, its label and its key.

    Raises: LedgerError for a damaged ledger, which is not written to.
    """
    payload = payload_of(receipt)
    predicate = statement_of(payload)["predicate"]
    evaluation = Evaluation.from_dict(predicate["evaluation"])
    facts = {
        "receipt": digest(payload),
        "verdict": predicate["judgement"]["verdict"],
        "label": predicate["judgement"]["label"],
        "key": key_of(receipt),
        "base": _build(evaluation.base),
        "candidate": _build(evaluation.candidate),
        "scope": evaluation.scope.name,
    }
    return _write(path, "receipt", evaluation.id, facts)


def read(path: Path) -> list[Entry]:
    """Return all entries in order, the chain checked.

    Raises: MissingFileError, LedgerError.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MissingFileError(f"ledger {path}: {error.strerror}") from None
    return parse(data, path)


def parse(data: bytes, path: Path) -> list[Entry]:
    """Return the entries of a ledger's bytes. Raises: LedgerError with the number of the bad line."""
    if data and not data.endswith(b"\n"):
        raise LedgerError(f"ledger {path}: the last line is cut off")
    entries: list[Entry] = []
    for index, line in enumerate(data.split(b"\n")[:-1]):
        try:
            entry = _entry(line)
        except (RecordError, KeyError, TypeError, ValueError) as error:
            raise LedgerError(f"ledger {path}: line {index + 1} is damaged ({error})") from None
        expected = entries[-1].sha256 if entries else START
        if (entry.index, entry.previous) != (index, expected):
            raise LedgerError(f"ledger {path}: line {index + 1} does not follow the line before it")
        entries.append(entry)
    return entries


def _build(build: Build) -> dict[str, str | None]:
    return {"name": build.name, "sha": build.sha, "wheel_sha256": build.wheel_sha256}


def _entry(line: bytes) -> Entry:
    found = parse_json(line, "the line")
    if not isinstance(found, dict) or canonical(found) != line:
        raise RecordError("not in the form in which it was written")
    known = {name: found.pop(name) for name in ("index", "previous", "kind", "evaluation", "at")}
    if known["kind"] not in KINDS or not HASH.fullmatch(known["previous"]):
        raise RecordError("unknown kind or bad hash")
    return Entry(**known, facts=found, sha256=digest(line))


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise LedgerError(f"ledger {path} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)  # gives the lock back as well


def _write(path: Path, kind: str, evaluation: str, facts: Mapping[str, Any]) -> Entry:
    with _locked(path) as descriptor:
        entries = parse(path.read_bytes(), path)
        line = canonical(
            {
                **facts,
                "index": len(entries),
                "previous": entries[-1].sha256 if entries else START,
                "kind": kind,
                "evaluation": evaluation,
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
            }
        )
        if os.write(descriptor, line + b"\n") != len(line) + 1:
            raise LedgerError(f"ledger {path}: a line could not be written whole")
        os.fsync(descriptor)
    return _entry(line)
