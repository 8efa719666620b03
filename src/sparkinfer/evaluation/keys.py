"""The Ed25519 key that signs receipts: made on first use, kept in a file that only its owner reads."""

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sparkinfer.errors import DeviceError, MissingFileError, OptionError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from securesystemslib.signer import CryptoSigner, SSlibKey  # type: ignore[attr-defined]

FINGERPRINT_DIGITS = 64


def need_libraries() -> None:
    """Raises: DeviceError where a library that signs and checks is missing; the line names the extra."""
    for name in ("cryptography", "securesystemslib"):
        if find_spec(name) is None:
            raise DeviceError(
                f"receipts need {name}, which is not installed; pip install 'sparkinfer[eval]'"
            )


@dataclass(frozen=True, slots=True)
class PublicKey:
    """An Ed25519 public key, 32 bytes."""

    raw: bytes

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the key's DER form, 64 hex digits: `openssl pkey -pubout -outform DER | sha256sum`."""
        # RFC 8410: the SubjectPublicKeyInfo of every Ed25519 key is this prefix and the key.
        return hashlib.sha256(bytes.fromhex("302a300506032b6570032100") + self.raw).hexdigest()

    def for_checking(self) -> "SSlibKey":
        from securesystemslib.signer import SSlibKey  # type: ignore[attr-defined]

        return SSlibKey(self.fingerprint, "ed25519", "ed25519", {"public": self.raw.hex()})

    @classmethod
    def from_hex(cls, text: str) -> "PublicKey":
        """Raises: ValueError for anything but 64 lower-case hex digits."""
        raw = bytes.fromhex(text)
        if len(raw) != 32 or raw.hex() != text:
            raise ValueError(f"an Ed25519 public key is 64 lower-case hex digits, not {text!r:.80}")
        return cls(raw)


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key and where it came from; never printed."""

    signer: "CryptoSigner"
    public: PublicKey
    path: Path | None = None
    made_now: bool = False

    @property
    def fingerprint(self) -> str:
        return self.public.fingerprint


def default_path() -> Path:
    """Return the key's place in the user's configuration folder."""
    from platformdirs import user_config_path

    return user_config_path("sparkinfer", appauthor=False) / "eval-key.pem"


def load_or_create(path: Path | None = None) -> SigningKey:
    """Return the key of `path`, which has to exist, or the user's own key, made where there is none.

    Raises: MissingFileError for a named file that is not there, OptionError for a file that is no
    Ed25519 key or that others may read and where none can be made, DeviceError where a library is missing.
    """
    need_libraries()
    if path is not None:
        return _load(path.expanduser())
    place = default_path()
    made = not place.exists() and _create(place)
    return _load(place, made_now=made)


def generate() -> SigningKey:
    """Return a new key that is in no file."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    need_libraries()
    return _wrap(Ed25519PrivateKey.generate())


def pem(key: SigningKey) -> bytes:
    """Return the private key as PKCS#8 PEM, for the secret of a CI."""
    return key.signer.private_bytes


def _wrap(
    private: "Ed25519PrivateKey", path: Path | None = None, *, made_now: bool = False
) -> SigningKey:
    from securesystemslib.signer import CryptoSigner  # type: ignore[attr-defined]

    public = PublicKey(private.public_key().public_bytes_raw())
    return SigningKey(CryptoSigner(private, public.for_checking()), public, path, made_now)


def _create(place: Path) -> bool:
    """Write a new key to `place`, whole or not at all; False where another process was faster."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(place.parent):
            if place.exists():
                return False
            # mkstemp makes the file with mode 0600, before a byte of the key is in it.
            descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=".eval-key-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(pem(generate()))
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(place)
    except OSError as error:
        raise OptionError(
            f"a signing key cannot be made in {place.parent}: {error.strerror}; name one with --key, "
            "or sign nothing with --no-receipt"
        ) from None
    return True


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder itself, so that no lock file is left behind."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _load(path: Path, *, made_now: bool = False) -> SigningKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except OSError as error:
        raise MissingFileError(f"signing key {path}: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OptionError(
            f"signing key {path} may be read or changed by others (mode {stat.S_IMODE(mode):04o}); chmod 600 it"
        )
    try:
        private = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise OptionError(
            f"{path} is no private key; give an unencrypted PKCS#8 PEM file"
        ) from None
    if not isinstance(private, Ed25519PrivateKey):
        raise OptionError(f"{path} holds another kind of key; give an Ed25519 key")
    return _wrap(private, path, made_now=made_now)


def fingerprints(trusted: str | Path | Iterable[str | Path]) -> frozenset[str]:
    """Return the fingerprints of trusted keys: each a fingerprint, or a file with a public key (PEM).

    Raises: OptionError for what is neither.
    """
    several = [trusted] if isinstance(trusted, str | Path) else list(trusted)
    if not several:
        raise OptionError("no trusted key was given; give a fingerprint or a public key's file")
    return frozenset(_fingerprint(one) for one in several)


def _fingerprint(one: str | Path) -> str:
    text = str(one).strip()
    plain = text.lower().removeprefix("sha256:")
    if len(plain) == FINGERPRINT_DIGITS and set(plain) <= set("0123456789abcdef"):
        return plain
    path = Path(text).expanduser()
    if not path.is_file():
        raise OptionError(
            f"trusted key {text!r} is neither a fingerprint ({FINGERPRINT_DIGITS} hex digits) nor a file"
        )
    return _public_from(path).fingerprint


def _public_from(path: Path) -> PublicKey:
    need_libraries()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        public = load_pem_public_key(path.read_bytes())
    except (ValueError, OSError):
        raise OptionError(f"{path} is no public key; give a PEM file (PUBLIC KEY)") from None
    if not isinstance(public, Ed25519PublicKey):
        raise OptionError(f"{path} holds another kind of key; give an Ed25519 public key")
    return PublicKey(public.public_bytes_raw())
