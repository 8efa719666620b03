"""The signing key: made once, readable by its owner only, known by its fingerprint."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from sparkinfer.errors import MissingFileError, OptionError
from sparkinfer.evaluation import keys


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "config" / "eval-key.pem"
    monkeypatch.setattr(keys, "default_path", lambda: place)
    return place


def test_a_key_is_made_on_first_use_and_then_kept(home: Path) -> None:
    first = keys.load_or_create()
    assert first.made_now and first.path == home
    assert home.stat().st_mode & 0o777 == 0o600
    assert list(home.parent.iterdir()) == [home], "no half-written file stays"
    again = keys.load_or_create()
    assert not again.made_now and again.fingerprint == first.fingerprint


def test_processes_that_begin_together_get_one_key(home: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(6) as pool:  # each call opens and locks the folder for itself
        made = list(pool.map(lambda _: keys.load_or_create(), range(12)))
    assert len({key.fingerprint for key in made}) == 1
    assert sum(key.made_now for key in made) == 1 and list(home.parent.iterdir()) == [home]


def test_where_no_key_can_be_made_it_is_said(home: Path) -> None:
    home.parent.parent.joinpath("config").write_text("a file where the folder should be")
    with pytest.raises(OptionError, match="--no-receipt"):
        keys.load_or_create()


def test_the_private_key_is_in_no_text(home: Path) -> None:
    key = keys.load_or_create()
    body = b"".join(home.read_bytes().splitlines()[1:-1]).decode()
    assert body not in repr(key) and body not in str(key)


def test_a_named_key_has_to_exist(tmp_path: Path, home: Path) -> None:
    with pytest.raises(MissingFileError, match=r"mine\.pem"):
        keys.load_or_create(tmp_path / "mine.pem")
    assert not home.exists()


def test_a_key_that_others_may_read_is_refused(home: Path) -> None:
    keys.load_or_create()
    home.chmod(0o640)
    with pytest.raises(OptionError, match="mode 0640"):
        keys.load_or_create()


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_a_file_that_is_no_key(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "k.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(OptionError, match="PKCS#8"):
        keys.load_or_create(path)


def test_another_kind_of_key_is_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    path = tmp_path / "k.pem"
    other = X25519PrivateKey.generate()
    path.write_bytes(
        other.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    )
    path.chmod(0o600)
    with pytest.raises(OptionError, match="another kind of key"):
        keys.load_or_create(path)


def test_trusted_keys_by_fingerprint_and_by_file(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key = keys.generate()
    path = tmp_path / "public.pem"
    public = Ed25519PublicKey.from_public_bytes(key.public.raw)
    path.write_bytes(public.public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo))
    der = public.public_bytes(form.Encoding.DER, form.PublicFormat.SubjectPublicKeyInfo)
    assert key.fingerprint == hashlib.sha256(der).hexdigest()
    assert keys.fingerprints(path) == {key.fingerprint}
    assert keys.fingerprints([key.fingerprint.upper(), f"SHA256:{key.fingerprint}"]) == {
        key.fingerprint
    }
    path.write_text("x")
    with pytest.raises(OptionError, match="no public key"):
        keys.fingerprints(path)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")
def test_openssl_reads_the_key_and_gives_the_same_fingerprint(home: Path) -> None:
    key = keys.load_or_create()
    command = ["openssl", "pkey", "-in", str(home), "-pubout", "-outform", "DER"]
    der = subprocess.run(command, check=True, capture_output=True).stdout
    assert hashlib.sha256(der).hexdigest() == key.fingerprint
