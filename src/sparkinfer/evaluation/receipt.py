"""A signed account of an evaluation: an in-toto Statement v1 with the whole record, in a DSSE envelope.

Source of the form: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md. The predicate holds the
record with every raw sample, so whoever has the file can judge again; `verify.py` does.
"""

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparkinfer.errors import OptionError
from sparkinfer.evaluation import codec, dsse
from sparkinfer.evaluation.codec import RecordError, parse_json
from sparkinfer.evaluation.keys import SigningKey
from sparkinfer.evaluation.record import Build, Evaluation, Judgement, Plan, Scope

if TYPE_CHECKING:
    from sparkinfer.evaluation.ledger import Entry

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
STATEMENT_FIELDS = {"_type", "subject", "predicateType", "predicate"}
# A name, not an address: nothing is to be fetched there.
PREDICATE_TYPE = "urn:sparkinfer:ab-eval/v1"
PREDICATE_FIELDS = ("assurance", "evaluation", "judge", "judgement", "ledger", "signer")
Assurance = Literal["self-signed", "ci"]
HEX = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
SHA256 = re.compile(r"[0-9a-f]{64}")

PROVEN = (
    "integrity: the content is as it was when it was signed",
    "who signed: the holder of the key named here",
    "inputs: the builds, the model, the draft and the prompts are named by their digests",
    "the verdict and the label follow from the raw samples inside",
)
NOT_PROVEN = (
    "that the run happened and gave these samples",
    "that it ran on the machine that the record describes",
    "that it was not chosen from several runs",
)
ASSURANCE = {
    "self-signed": "Whoever ran the evaluation signed it: it is worth what you know of the key's holder.",
    "ci": "A key that a CI keeps as a secret signed it. The run is named by the signer; whoever may change the CI's "
    "jobs can sign anything.",
}


def issue(
    evaluation: Evaluation,
    judgement: Judgement,
    key: SigningKey,
    *,
    assurance: Assurance = "self-signed",
    run: str = "",
    started: "Entry | None" = None,
) -> dict[str, Any]:
    """Return the signed receipt as a JSON-ready dictionary.

    `run` is the address of the CI's run, for `ci` only. `started` is the ledger's line that was written before
    anything was measured; the receipt names it, which ties the receipt to that place of the chain.

    Raises: OptionError where a build or an input has no digest, or `assurance` and `run` do not fit.
    """
    if evaluation.source != "measured":
        raise OptionError(
            "a receipt is for measured samples; these figures were published elsewhere"
        )
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": subjects(evaluation),
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "assurance": assurance_of(assurance, run),
            "evaluation": evaluation.to_dict(),
            "judge": f"sparkinfer {version('sparkinfer')}",
            "judgement": judgement.to_dict(),
            "ledger": {"index": started.index, "sha256": started.sha256} if started else None,
            "signer": {"ed25519": key.public.raw.hex(), "fingerprint": key.fingerprint},
        },
    }
    return dsse.wrap(codec.canonical(statement), key)


def assurance_of(level: str, run: str) -> dict[str, Any]:
    """Return the part of a receipt that says what it proves and what it does not. Raises: OptionError."""
    if level not in ASSURANCE:
        raise OptionError(f"assurance {level!r}: expected {' or '.join(ASSURANCE)}")
    if not isinstance(run, str) or not run.isprintable() or len(run) > 500:
        raise OptionError(f"the CI's run {run!r:.80}: expected an address of up to 500 characters")
    if bool(run) != (level == "ci"):
        raise OptionError("assurance 'ci' needs the address of the CI's run, and only 'ci' has one")
    return {
        "level": level,
        "meaning": ASSURANCE[level],
        "run": run,
        "proven": list(PROVEN),
        "not_proven": list(NOT_PROVEN),
    }


def write(path: Path, receipt: Mapping[str, Any]) -> None:
    """Write the receipt in the one form that `verify` accepts."""
    path.write_bytes(dsse.to_bytes(receipt))


def receipt_id(receipt: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the receipt's signed content, 64 hex digits."""
    return dsse.digest(payload_of(receipt))


def payload_of(receipt: Mapping[str, Any]) -> bytes:
    """Return the signed content. Raises: EnvelopeError."""
    return dsse.open_envelope(dsse.to_bytes(receipt))[1]


def statement_of(payload: bytes) -> dict[str, Any]:
    """Return the in-toto statement. Raises: EnvelopeError where the content is none of ours."""
    try:
        statement = parse_json(payload, "the signed content")
    except RecordError as error:
        raise dsse.EnvelopeError(str(error)) from None
    if not isinstance(statement, dict) or set(statement) != STATEMENT_FIELDS:
        raise dsse.EnvelopeError("the signed content is no in-toto statement")
    kinds = (statement["_type"], statement["predicateType"])
    if kinds != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise dsse.EnvelopeError(f"the signed content is another kind of statement: {kinds!r:.200}")
    predicate = statement["predicate"]
    if not isinstance(predicate, dict) or set(predicate) != set(PREDICATE_FIELDS):
        raise dsse.EnvelopeError(f"the predicate's fields are not {', '.join(PREDICATE_FIELDS)}")
    return statement


def plan_digest(scope: Scope, plan: Plan, base: Build, candidate: Build) -> str:
    """Return the SHA-256 of what is fixed before a run: scope, plan and the two builds."""
    return codec.digest({"scope": scope, "plan": plan, "base": base, "candidate": candidate})


def subjects(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the statement's subjects: the builds and every input, each with its digests.

    Raises: OptionError where one has none.
    """
    found = []
    for side, build in (("base", evaluation.base), ("candidate", evaluation.candidate)):
        if build.kind != "none":  # there is no base yet
            found.append({"name": side, "digest": _build_digests(side, build)})
    for role, file in sorted(evaluation.inputs.items()):
        if not SHA256.fullmatch(file.sha256):
            raise OptionError(f"input {role!r} has no SHA-256 ({file.sha256!r:.80})")
        found.append({"name": f"{role}: {file.name}", "digest": {"sha256": file.sha256}})
    return found


def _build_digests(side: str, build: Build) -> dict[str, str]:
    """Digests by in-toto's names (gitCommit, gitTree, sha256 of the wheel) and two of our own.

    sparkinferPackage is over the files of the installed package that option sets share, sparkinferOptions over the
    options.
    """
    sets = build.kind == "options"
    named = {
        "gitCommit": build.sha,
        "sparkinferPackage" if sets else "gitTree": build.tree_sha,
        "sha256": build.wheel_sha256,
    }
    found = {name: value for name, value in named.items() if value is not None}
    wrong = [value for value in found.values() if not HEX.fullmatch(value)]
    if wrong or not found:
        raise OptionError(
            f"build {side!r}: {wrong or 'it has no commit, tree or wheel'}; expected full digests in hex"
        )
    return (
        {**found, "sparkinferOptions": codec.digest(build.options)}
        if sets or build.options
        else found
    )
