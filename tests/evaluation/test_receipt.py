"""Receipts: what is signed, that a changed byte anywhere fails, that a verdict that does not follow is found."""

import copy
import importlib.util
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluation_records import evaluation, scope

from sparkinfer.errors import DeviceError, MissingFileError, OptionError
from sparkinfer.evaluation import codec, dsse, receipt
from sparkinfer.evaluation.keys import SigningKey, generate
from sparkinfer.evaluation.record import Build, Evaluation, InputFile
from sparkinfer.evaluation.verdict import judge
from sparkinfer.evaluation.verify import Verification, examine, verify


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return generate()


@pytest.fixture(scope="module")
def record() -> Evaluation:
    return evaluation(1.05, blocks=6, scope_of=scope(looks=(6,), aa_blocks=2))


@pytest.fixture(scope="module")
def issued(record: Evaluation, key: SigningKey) -> dict[str, Any]:
    return receipt.issue(record, judge(record), key)


def written(path: Path, envelope: dict[str, Any]) -> Path:
    receipt.write(path, envelope)
    return path


def statement(envelope: dict[str, Any]) -> dict[str, Any]:
    return receipt.statement_of(receipt.payload_of(envelope))


def signed_again(
    envelope: dict[str, Any], key: SigningKey, change: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The receipt with another content, its signature in order: what a liar would publish."""
    content = copy.deepcopy(statement(envelope))
    content["predicate"]["signer"] = {
        "ed25519": key.public.raw.hex(),
        "fingerprint": key.fingerprint,
    }
    change(content)
    return dsse.wrap(codec.canonical(content), key)


def failures(found: Verification) -> str:
    assert not found.ok and found.exit_code == 1
    assert "proves nothing" in found.lines()[-1]
    assert not any(line.startswith("proven") for line in found.lines())
    return "\n".join(found.failed)


def test_a_good_receipt(tmp_path: Path, issued: dict[str, Any], key: SigningKey) -> None:
    found = verify(written(tmp_path / "r.json", issued), trusted=key.fingerprint)
    assert found.ok and found.exit_code == 0
    assert (found.receipt, found.fingerprint) == (receipt.receipt_id(issued), key.fingerprint)
    text = "\n".join(found.lines())
    assert "BETTER" in text and "derived again from" in text
    assert "not proven  that the run happened" in text and "not proven  that it ran on" in text
    assert "not proven  its place among other evaluations: no ledger" in text
    assert "self-signed" in text and "verified" not in text.lower()


def test_without_a_trusted_key_it_is_said_that_anyone_can_make_one(
    tmp_path: Path, issued: dict[str, Any]
) -> None:
    found = verify(written(tmp_path / "r.json", issued))
    assert found.ok and any("anyone can make a key" in text for text in found.not_proven)


def test_the_form_is_an_in_toto_statement_in_a_dsse_envelope(
    issued: dict[str, Any], record: Evaluation, key: SigningKey
) -> None:
    assert set(issued) == {"payload", "payloadType", "signatures"}
    assert issued["payloadType"] == "application/vnd.in-toto+json"
    content = statement(issued)
    assert content["_type"] == "https://in-toto.io/Statement/v1"
    assert content["predicateType"].endswith("ab-eval/v1")
    assert Evaluation.from_dict(content["predicate"]["evaluation"]) == record
    by_name = {subject["name"]: subject["digest"] for subject in content["subject"]}
    assert by_name["base"] == {"gitCommit": "1" * 40, "gitTree": "2" * 40, "sha256": "3" * 64}
    assert by_name["candidate"]["gitCommit"] == "5" * 40
    assert by_name["model: tiny.gguf"] == {"sha256": "ab" * 32}


def test_the_signature_is_one_over_the_pre_authentication_encoding(
    issued: dict[str, Any], key: SigningKey
) -> None:
    """Checked without the library that made it (DSSE protocol: the encoding; RFC 8032: the signature)."""
    import base64

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    body, kind = base64.b64decode(issued["payload"]), issued["payloadType"].encode()
    encoded = b" ".join([b"DSSEv1", str(len(kind)).encode(), kind, str(len(body)).encode(), body])
    signature = base64.b64decode(issued["signatures"][0]["sig"])
    Ed25519PublicKey.from_public_bytes(key.public.raw).verify(signature, encoded)


def test_a_changed_byte_anywhere_fails(key: SigningKey) -> None:
    small = replace(evaluation(), samples=(), aa=(), correctness=())
    good = dsse.to_bytes(receipt.issue(small, judge(small), key))
    assert examine(good, trusted=key.fingerprint).ok
    bits = random.Random(6)
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << bits.randrange(8)
        assert not examine(bytes(bad)).ok, f"byte {place}"


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"\n",
        lambda data: b" " + data,
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: json.dumps(json.loads(data)).encode(),
        lambda data: data.replace(b"{", b'{"payload": "", ', 1),
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"[]",
        lambda data: b"[" * 100_000,
        lambda data: b"\xff\xfe",
    ],
)
def test_another_form_of_the_file_fails(
    tmp_path: Path, issued: dict[str, Any], change: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(change(dsse.to_bytes(issued)))
    assert failures(verify(path))


def test_another_payload_type_or_two_signatures_fail(
    tmp_path: Path, issued: dict[str, Any]
) -> None:
    other = {**issued, "payloadType": "application/json"}
    assert "payload type" in failures(verify(written(tmp_path / "r.json", other)))
    second = {**issued["signatures"][0], "keyid": "0" * 64}
    both = {**issued, "signatures": [*issued["signatures"], second]}
    assert "2 signatures" in failures(verify(written(tmp_path / "r.json", both)))


def _swap_subjects(content: dict[str, Any]) -> None:
    one, other = content["subject"][:2]
    one["digest"], other["digest"] = other["digest"], one["digest"]


def _better(content: dict[str, Any]) -> None:
    content["predicate"]["judgement"]["label"] = "eval-dflash:XL"


def _worse(content: dict[str, Any]) -> None:
    content["predicate"]["judgement"]["verdict"] = "WORSE"


def _faster_sample(content: dict[str, Any]) -> None:
    for sample in content["predicate"]["evaluation"]["samples"]:
        if sample["side"] == "candidate":
            sample["value"] *= 1.2


def _other_model(content: dict[str, Any]) -> None:
    content["predicate"]["evaluation"]["inputs"]["model"]["sha256"] = "cd" * 32


def _claim(content: dict[str, Any]) -> None:
    content["predicate"]["assurance"]["proven"].append("that it ran on an RTX 5090")


def _unknown_level(content: dict[str, Any]) -> None:
    content["predicate"]["assurance"]["level"] = "tee-scored"


def _reason(content: dict[str, Any]) -> None:
    content["predicate"]["judgement"]["reasons"] = ["it is very fast"]


def _interval(content: dict[str, Any]) -> None:
    content["predicate"]["judgement"]["effects"][0]["low"] += 1e-6


def _foreign_fingerprint(content: dict[str, Any]) -> None:
    content["predicate"]["signer"]["fingerprint"] = "0" * 64


def _no_judgement(content: dict[str, Any]) -> None:
    content["predicate"]["judgement"] = None


def _no_plan(content: dict[str, Any]) -> None:
    del content["predicate"]["evaluation"]["plan"]


def _more_fields(content: dict[str, Any]) -> None:
    content["predicate"]["note"] = "x"


def _no_key(content: dict[str, Any]) -> None:
    content["predicate"]["signer"] = None


def _other_kind(content: dict[str, Any]) -> None:
    content["predicateType"] = "https://slsa.dev/provenance/v1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_swap_subjects, "subjects: "),
        (_other_model, "subjects: "),
        (_better, "label is 'eval-dflash:XL'; the samples give"),
        (_worse, "verdict is 'WORSE'; the samples give 'BETTER'"),
        (_faster_sample, "verdict: judgement"),
        (_reason, "verdict: judgement.reasons"),
        (_interval, r"verdict: judgement.effects[0].low"),
        (_claim, "assurance: "),
        (_unknown_level, "assurance 'tee-scored'"),
        (_foreign_fingerprint, "fingerprint"),
        (_no_judgement, "verdict: judgement is None"),
        (_no_plan, "plan is missing"),
        (_more_fields, "fields are not"),
        (_no_key, "no Ed25519 public key"),
        (_other_kind, "another kind"),
    ],
)
def test_a_lie_that_is_signed_is_found(
    tmp_path: Path,
    issued: dict[str, Any],
    key: SigningKey,
    change: Callable[[dict[str, Any]], None],
    message: str,
) -> None:
    path = written(tmp_path / "r.json", signed_again(issued, key, change))
    assert message in failures(verify(path, trusted=key.fingerprint))


def test_another_key_is_found_where_one_is_trusted(
    tmp_path: Path, issued: dict[str, Any], key: SigningKey
) -> None:
    stranger = generate()
    path = written(tmp_path / "r.json", signed_again(issued, stranger, lambda content: None))
    assert verify(path).ok, "it holds together; only the key is another"
    assert "none of the trusted keys" in failures(verify(path, trusted=[key.fingerprint]))
    assert verify(path, trusted=[key.fingerprint, stranger.fingerprint]).ok


def test_a_receipt_signed_by_a_key_that_it_does_not_name(
    tmp_path: Path, issued: dict[str, Any], key: SigningKey
) -> None:
    other = dsse.wrap(receipt.payload_of(issued), generate())
    assert "another key" in failures(verify(written(tmp_path / "r.json", other)))
    other["signatures"][0]["keyid"] = key.fingerprint
    assert "does not fit" in failures(verify(written(tmp_path / "r.json", other)))


def test_ci_names_its_run(tmp_path: Path, record: Evaluation, key: SigningKey) -> None:
    run = "https://ci.example/run/7"
    made = receipt.issue(record, judge(record), key, assurance="ci", run=run)
    assert run in "\n".join(verify(written(tmp_path / "r.json", made)).lines())
    with pytest.raises(OptionError, match="needs the address"):
        receipt.issue(record, judge(record), key, assurance="ci")
    with pytest.raises(OptionError, match="only 'ci' has one"):
        receipt.issue(record, judge(record), key, run=run)
    for bad in ("x\x1b[2J", "x" * 501):
        with pytest.raises(OptionError, match="expected an address"):
            receipt.issue(record, judge(record), key, assurance="ci", run=bad)


def test_no_line_can_steer_a_terminal(
    tmp_path: Path, issued: dict[str, Any], key: SigningKey
) -> None:
    def change(content: dict[str, Any]) -> None:
        content["predicate"]["judgement"]["label"] = "\x1b[2J\r\u202epassed"
        content["predicate"]["judge"] = "a\nproven      everything"

    found = verify(written(tmp_path / "r.json", signed_again(issued, key, change)))
    assert not found.ok
    assert all(line.isprintable() for line in found.lines())


def test_what_has_no_digest_gets_no_receipt(record: Evaluation, key: SigningKey) -> None:
    bad = replace(record, inputs={"model": InputFile("m.gguf", "", 1)})
    with pytest.raises(OptionError, match="no SHA-256"):
        receipt.issue(bad, judge(record), key)
    with pytest.raises(OptionError, match="build 'base': it has no commit"):
        receipt.issue(replace(record, base=Build("wheel", "w")), judge(record), key)
    with pytest.raises(OptionError, match="'1340617'"):
        receipt.issue(replace(record, base=Build("git", "m", "1340617")), judge(record), key)
    with pytest.raises(OptionError, match="published elsewhere"):
        receipt.issue(replace(record, source="published"), judge(record), key)


def test_option_sets_are_subjects_by_the_package_and_their_options(record: Evaluation) -> None:
    sets = [
        Build("options", f"t{n}", tree_sha="a" * 64, options=o)
        for n, o in enumerate(({}, {"t": 2}))
    ]
    one, other = receipt.subjects(replace(record, base=sets[0], candidate=sets[1]))[:2]
    assert set(one["digest"]) == set(other["digest"]) == {"sparkinferPackage", "sparkinferOptions"}
    assert one["digest"]["sparkinferPackage"] == "a" * 64
    assert one["digest"]["sparkinferOptions"] != other["digest"]["sparkinferOptions"]


def test_the_first_of_a_kind_has_no_base(record: Evaluation) -> None:
    names = [s["name"] for s in receipt.subjects(replace(record, base=Build("none", "-")))]
    assert "base" not in names and "candidate" in names


def test_a_missing_file_and_a_bad_trusted_key(tmp_path: Path, issued: dict[str, Any]) -> None:
    with pytest.raises(MissingFileError, match="nothing"):
        verify(tmp_path / "nothing.json")
    path = written(tmp_path / "r.json", issued)
    for bad in ("abc", "g" * 64, str(tmp_path / "none.pem")):
        with pytest.raises(OptionError, match="neither a fingerprint"):
            verify(path, trusted=bad)
    with pytest.raises(OptionError, match="no trusted key"):
        verify(path, trusted=[])


def test_a_missing_library_is_one_line_that_names_the_extra(
    tmp_path: Path, issued: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "r.json", issued)
    known = importlib.util.find_spec
    monkeypatch.setattr(
        "sparkinfer.evaluation.keys.find_spec",
        lambda name: None if name == "securesystemslib" else known(name),
    )
    for action in (generate, lambda: verify(path)):
        with pytest.raises(DeviceError, match=r"pip install 'sparkinfer\[eval\]'") as caught:
            action()
        assert "securesystemslib" in str(caught.value) and "\n" not in str(caught.value)
