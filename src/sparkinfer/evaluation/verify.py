"""Checks a receipt by doing it all again (digests, signature, verdict, chain); says what that proves and what not."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkinfer.errors import MissingFileError, OptionError, SparkError
from sparkinfer.evaluation import dsse
from sparkinfer.evaluation.keys import PublicKey, fingerprints
from sparkinfer.evaluation.ledger import Entry, LedgerError, read
from sparkinfer.evaluation.receipt import (
    NOT_PROVEN,
    assurance_of,
    plan_digest,
    statement_of,
    subjects,
)
from sparkinfer.evaluation.record import Evaluation
from sparkinfer.evaluation.report_facts import clean
from sparkinfer.evaluation.verdict import judge

# Another machine's numpy may add in another order; the verdict itself has to be equal.
CLOSE = 1e-9


class MismatchError(SparkError):
    """Something in a receipt or ledger is not as it has to be."""


@dataclass(slots=True)
class Verification:
    """What was found. `failed` empty: every check that could be made was passed."""

    receipt: str = ""
    fingerprint: str = ""
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    assurance: list[str] = field(default_factory=list)
    proven: list[str] = field(default_factory=list)
    not_proven: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def lines(self) -> list[str]:
        """Return the whole finding, one short line each, without anything that could steer a terminal."""
        told = [("receipt", self.receipt or "unreadable")]
        told += [("key", self.fingerprint)] if self.fingerprint else []
        told += [("passed", text) for text in self.passed]
        told += [("FAILED", text) for text in self.failed]
        if self.ok:
            told += [("assurance", text) for text in self.assurance]
            told += [("proven", text) for text in self.proven]
            told += [("not proven", text) for text in self.not_proven]
        lines = [f"{name:<12}{clean(text, 600)}" for name, text in told]
        return (
            lines
            if self.ok
            else [*lines, "This receipt proves nothing: it does not hold together."]
        )


def verify(
    path: Path | str,
    *,
    trusted: str | Path | Iterable[str | Path] | None = None,
    ledger: Path | str | None = None,
    head: str | None = None,
) -> Verification:
    """Check the receipt in `path`; a mismatch is in the result, never raised.

    `trusted`: fingerprints or public key files, one of which must have signed. `ledger`: the file that must hold the
    receipt. `head`: a hash of the ledger that was published, which must be in its chain.

    Raises: MissingFileError for a file that is not there, OptionError for a bad `trusted` or a `head` without a
    ledger, DeviceError where a
    library is missing.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise MissingFileError(f"receipt {path}: {error.strerror}") from None
    return examine(data, trusted=trusted, ledger=ledger, head=head)


def examine(
    data: bytes,
    *,
    trusted: str | Path | Iterable[str | Path] | None = None,
    ledger: Path | str | None = None,
    head: str | None = None,
) -> Verification:
    """Check the bytes of a receipt's file; see `verify`."""
    allowed = None if trusted is None else fingerprints(trusted)
    found = Verification()
    try:
        statement = _signature(data, allowed, found)
        evaluation = _content(statement, found)
    except (dsse.EnvelopeError, MismatchError) as error:
        found.failed.append(str(error))
        return found
    _verdict(evaluation, statement["predicate"], found)
    if head is not None and ledger is None:
        raise OptionError("a published head needs the ledger that it is to be found in")
    if ledger is not None and found.ok:
        _order(Path(ledger), head, evaluation, statement["predicate"], found)
    _conclude(statement, allowed is not None, ledger is not None, found)
    return found


def _signature(data: bytes, allowed: frozenset[str] | None, found: Verification) -> dict[str, Any]:
    """Return the statement once its signature is checked; nothing of it is believed before."""
    envelope, payload = dsse.open_envelope(data)
    found.receipt = dsse.digest(payload)
    statement = statement_of(payload)
    signer = statement["predicate"]["signer"]
    try:
        public = PublicKey.from_hex(signer["ed25519"])
    except (KeyError, TypeError, ValueError):
        raise MismatchError("the receipt holds no Ed25519 public key") from None
    if signer != {"ed25519": public.raw.hex(), "fingerprint": public.fingerprint}:
        raise MismatchError("key: the fingerprint in the receipt is not that of the key in it")
    if dsse.key_of(envelope) != public.fingerprint:
        raise MismatchError("key: the signature names another key than the receipt")
    dsse.check_signature(envelope, public)
    found.fingerprint = public.fingerprint
    found.passed.append("signature: Ed25519, over every byte of the content")
    if allowed is not None:
        if public.fingerprint not in allowed:
            raise MismatchError(f"key: {public.fingerprint} is none of the trusted keys")
        found.passed.append("key: it is one of the trusted keys")
    return statement


def _content(statement: Mapping[str, Any], found: Verification) -> Evaluation:
    """Return the record once it is well formed and the statement's subjects are its builds and inputs."""
    predicate = statement["predicate"]
    try:
        evaluation = Evaluation.from_dict(predicate["evaluation"])
        expected = subjects(evaluation)
        limits = assurance_of(predicate["assurance"]["level"], predicate["assurance"]["run"])
    except (SparkError, KeyError, TypeError) as error:
        raise MismatchError(f"record: {error}") from None
    if statement["subject"] != expected:
        raise MismatchError("subjects: they are not the builds and inputs of the record")
    if predicate["assurance"] != limits:
        raise MismatchError("assurance: the words are not those that belong to its level")
    found.passed.append(f"subjects: {len(expected)} digests, those of the record")
    return evaluation


def _verdict(evaluation: Evaluation, predicate: Mapping[str, Any], found: Verification) -> None:
    try:
        derived = judge(evaluation).to_dict()
    except (SparkError, ArithmeticError, ValueError, LookupError) as error:
        found.failed.append(f"verdict: the samples cannot be judged ({error})")
        return
    differences = list(differing(predicate["judgement"], derived))
    for place, stated, again in differences[:5]:
        found.failed.append(f"verdict: {place} is {stated!r:.100}; the samples give {again!r:.100}")
    if len(differences) > 5:
        found.failed.append(f"verdict: {len(differences) - 5} more differences of this kind")
    if differences:
        found.failed.append(f"verdict: it was judged by {predicate['judge']!r:.60}")
        return
    count = f"{len(evaluation.samples)} samples"
    label = derived["label"] or "no label"
    found.passed.append(f"verdict: {derived['verdict']}, {label}: derived again from {count}")


def differing(
    stated: Any, derived: Any, place: str = "judgement"
) -> Iterator[tuple[str, Any, Any]]:
    """Yield place, stated and derived value wherever two JSON values differ; numbers may by a share of 1e-9."""
    if isinstance(stated, dict) and isinstance(derived, dict) and set(stated) == set(derived):
        for name in derived:
            yield from differing(stated[name], derived[name], f"{place}.{name}")
    elif isinstance(stated, list) and isinstance(derived, list) and len(stated) == len(derived):
        for index, (one, other) in enumerate(zip(stated, derived, strict=True)):
            yield from differing(one, other, f"{place}[{index}]")
    elif isinstance(derived, float) and type(stated) in (int, float):
        if not math.isclose(stated, derived, rel_tol=CLOSE, abs_tol=1e-12):
            yield place, stated, derived
    elif type(stated) is not type(derived) or stated != derived:
        yield place, stated, derived


def _order(
    ledger: Path,
    head: str | None,
    evaluation: Evaluation,
    predicate: Mapping[str, Any],
    found: Verification,
) -> None:
    try:
        entries = read(ledger)
        mine = _entry_of(entries, evaluation, predicate, found.receipt)
        begun = _beginning(entries, mine, evaluation, predicate)
        if head is not None and head not in {entry.sha256 for entry in entries}:
            raise MismatchError(f"ledger: the published head {head!r:.80} is not in its chain")
    except (LedgerError, MismatchError) as error:
        found.failed.append(str(error))
        return
    place = f"ledger: {len(entries)} lines in one chain, this receipt is line {mine.index + 1}"
    found.passed.append(place)
    if begun is not None:
        found.passed.append(
            f"ledger: the plan stands in line {begun.index + 1}, before the receipt"
        )
    if head is not None:
        found.passed.append("ledger: the published head is in its chain")
    found.passed.append(f"ledger: {attempts(entries, evaluation)}")
    found.proven.append(
        f"order: among the lines of this ledger, whose head is {entries[-1].sha256}"
    )


def _entry_of(
    entries: list[Entry], evaluation: Evaluation, predicate: Mapping[str, Any], receipt: str
) -> Entry:
    same = [e for e in entries if e.kind == "receipt" and e.facts.get("receipt") == receipt]
    if len(same) != 1:
        raise MismatchError(f"ledger: this receipt stands in {len(same)} lines; expected one")
    judgement, signer = predicate["judgement"], predicate["signer"]
    expected = (
        evaluation.id,
        judgement.get("verdict"),
        judgement.get("label"),
        signer["fingerprint"],
    )
    entry = same[0]
    if (entry.evaluation, *(entry.facts.get(n) for n in ("verdict", "label", "key"))) != expected:
        raise MismatchError(f"ledger: line {entry.index + 1} says something else than the receipt")
    return entry


def _beginning(
    entries: list[Entry], mine: Entry, evaluation: Evaluation, predicate: Mapping[str, Any]
) -> Entry | None:
    """Return the line that was written before the run and that the receipt names."""
    named = predicate["ledger"]
    if named is None:
        return None
    before = [e for e in entries[: mine.index] if {"index": e.index, "sha256": e.sha256} == named]
    if not before or before[0].kind != "started" or before[0].evaluation != evaluation.id:
        raise MismatchError("ledger: it lacks the line that the receipt names as its beginning")
    plan = plan_digest(evaluation.scope, evaluation.plan, evaluation.base, evaluation.candidate)
    if before[0].facts.get("plan") != plan:
        raise MismatchError("ledger: the plan was another one before the run")
    return before[0]


def attempts(entries: Iterable[Entry], evaluation: Evaluation) -> str:
    """Return in words how often these two builds were evaluated in this scope, and with what outcome."""
    pair = [
        {"name": b.name, "sha": b.sha, "wheel_sha256": b.wheel_sha256}
        for b in (evaluation.base, evaluation.candidate)
    ]
    outcome: dict[str, str] = {}
    for entry in entries:
        if entry.kind == "aborted" and entry.evaluation in outcome:
            outcome[entry.evaluation] = "aborted"
        elif [entry.facts.get("base"), entry.facts.get("candidate")] == pair and (
            entry.facts.get("scope") == evaluation.scope.name
        ):
            ended = entry.kind == "receipt"
            outcome[entry.evaluation] = (
                str(entry.facts.get("verdict")) if ended else "without an end"
            )
    counts = ", ".join(f"{n} {what}" for what, n in sorted(Counter(outcome.values()).items()))
    return f"evaluations of these two builds in this scope: {len(outcome)} ({counts})"


def _conclude(
    statement: Mapping[str, Any], trusted: bool, ordered: bool, found: Verification
) -> None:
    """Fill in what is proven and what is not; read only where nothing failed."""
    assurance = statement["predicate"]["assurance"]
    named = ", ".join(subject["name"] for subject in statement["subject"])
    run = f", run {assurance['run']}" if assurance["run"] else ""
    found.assurance.append(f"{assurance['level']}{run}. {assurance['meaning']}")
    found.proven[:0] = [
        "integrity: not a byte was changed since it was signed",
        f"who signed: the holder of the {'trusted ' if trusted else ''}key above",
        f"inputs, by digest: {named}",
        "the verdict and the label follow from the raw samples inside",
    ]
    found.not_proven.extend(NOT_PROVEN)
    if not trusted:
        found.not_proven.append(
            "whose key it is: no trusted key was given, and anyone can make a key"
        )
    if not ordered:
        found.not_proven.append("its place among other evaluations: no ledger was given")
