"""A payload and its signature in a DSSE envelope (https://github.com/secure-systems-lab/dsse, version 1.0.2)."""

import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from sparkinfer.errors import SparkError
from sparkinfer.evaluation.codec import RecordError, parse_json
from sparkinfer.evaluation.keys import PublicKey, SigningKey, need_libraries

PAYLOAD_TYPE = "application/vnd.in-toto+json"
FIELDS = {"payload", "payloadType", "signatures"}


class EnvelopeError(SparkError):
    """A receipt's envelope is not what it has to be; the message says what is wrong."""


def wrap(payload: bytes, key: SigningKey) -> dict[str, Any]:
    """Return the signed envelope of `payload` as a JSON-ready dictionary."""
    from securesystemslib.dsse import Envelope

    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    envelope.sign(key.signer)
    return dict(envelope.to_dict())


def to_bytes(envelope: Mapping[str, Any]) -> bytes:
    """Return the one form in which an envelope is written to a file: sorted keys, one line each."""
    return (json.dumps(envelope, indent=1, sort_keys=True) + "\n").encode()


def open_envelope(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the envelope and its payload; the signature is not checked yet.

    Raises: EnvelopeError where `data` is not byte for byte the form `to_bytes` writes.
    """
    need_libraries()
    from securesystemslib.dsse import Envelope

    try:
        envelope = parse_json(data, "the receipt")
    except RecordError as error:
        raise EnvelopeError(str(error)) from None
    if not isinstance(envelope, dict) or set(envelope) != FIELDS:
        raise EnvelopeError("not a DSSE envelope with payload, payloadType and signatures")
    try:
        # from_dict changes the signatures it is given, so it gets its own copy.
        parsed = Envelope.from_dict(json.loads(json.dumps(envelope)))
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error):
        raise EnvelopeError("the envelope's fields are malformed") from None
    if envelope["payloadType"] != PAYLOAD_TYPE:
        raise EnvelopeError(f"payload type {envelope['payloadType']!r:.80}, not {PAYLOAD_TYPE!r}")
    if len(parsed.signatures) != 1:
        raise EnvelopeError(f"{len(parsed.signatures)} signatures where one is expected")
    # Base64 and JSON allow several spellings of one content; only the one we write is accepted.
    if to_bytes(parsed.to_dict()) != data:
        raise EnvelopeError("the file is not in the form in which it was written")
    return envelope, bytes(parsed.payload)


def key_of(envelope: Mapping[str, Any]) -> str:
    """Return the key id that the envelope's one signature names."""
    return str(envelope["signatures"][0]["keyid"])


def check_signature(envelope: Mapping[str, Any], public: PublicKey) -> None:
    """Raises: EnvelopeError where the envelope's signature is not one of `public` over its payload."""
    need_libraries()
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError

    parsed = Envelope.from_dict(json.loads(json.dumps(envelope)))
    try:
        parsed.verify([public.for_checking()], threshold=1)
    except VerificationError:
        raise EnvelopeError("the signature does not fit the content and the key") from None


def digest(data: bytes) -> str:
    """Return the SHA-256 of `data`, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()
