"""Builds each side into its own clean environment: a wheel from an export of its tree, the same dependencies for both.

Below the cache folder: `builds/<key>` has a side's wheel, its virtual environment and its compiled code; the key is
made of the content (tree or wheel), the frozen dependencies and the Python. `locks/<key>` has the frozen
dependencies of all bases that ask for the same. A second evaluation of the same content finds everything
there; what no evaluation has used for two weeks is removed by the next one.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkinfer.errors import DeviceError, SparkError
from sparkinfer.evaluation.process import Runner, measured_environment
from sparkinfer.evaluation.record import Build, Side
from sparkinfer.evaluation.source import Git, Source, Sources
from sparkinfer.options import PREFIX, child_environment

Say = Callable[[str], None]
PACKAGE = "sparkinfer"
_TIMEOUT = 1800  # seconds a single pip call may take
_KEPT = 14 * 24 * 3600.0  # seconds
_READY = "ready.json"
_CUDA_EXTRA = "cuda"


class BuildFailedError(SparkError):
    """A side could not be built. `kind`: its own fault, or the surroundings' (network, disk, index)."""

    exit_code = 74

    def __init__(
        self, side: Side, kind: Literal["failure", "infrastructure"], message: str
    ) -> None:
        super().__init__(f"{side}: {message}")
        self.side, self.kind = side, kind


@dataclass(frozen=True, slots=True)
class Environment:
    """A built side: what it is, how to run it, and the folder of its compiled code and measurements."""

    build: Build
    runner: Runner
    cache: Path

    def forget_measurements(self) -> None:
        """Let the next process measure its step costs anew; compiled code is kept."""
        shutil.rmtree(self.cache / "costs", ignore_errors=True)


def prepare(
    sources: Sources, root: Path, *, device: str, say: Say
) -> tuple[Environment, Environment]:
    """Return both sides, built and installed below `root`.

    Raises: BuildFailedError, DeviceError for a folder that cannot be used.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeviceError(
            f"cannot make {root}: {error.strerror}; --cache-dir names another"
        ) from error
    _sweep(root)
    workshop = _Workshop(root, sources.repository, device, say)
    base_wheel, base_sha = workshop.wheel(sources.base, "base")
    lock = workshop.lock(base_wheel)
    base = workshop.environment(sources.base, "base", base_wheel, base_sha, lock)
    wheel, sha = workshop.wheel(sources.candidate, "candidate")
    return base, workshop.environment(sources.candidate, "candidate", wheel, sha, lock)


def unbuilt(source: Source) -> Environment:
    """Return a side that could not be built, for the record that says so; it cannot be run."""
    sha = _sha256(source.wheel) if source.wheel is not None else None
    return Environment(_build(source, sha, None), Runner(Path("none"), {}), Path("none"))


def _build(source: Source, wheel_sha: str | None, frozen: str | None) -> Build:
    return Build(
        kind=source.kind,
        name=source.name,
        sha=source.sha,
        merged_onto=source.merged_onto,
        tree_sha=source.tree,
        wheel_sha256=wheel_sha,
        lock_sha256=None if frozen is None else hashlib.sha256(frozen.encode()).hexdigest(),
        options=dict(source.options),
    )


@dataclass(frozen=True, slots=True)
class _Workshop:
    root: Path
    repository: Path | None
    device: str
    say: Say

    @property
    def _extra(self) -> str:
        return f"[{_CUDA_EXTRA}]" if self.device.startswith("cuda") else ""

    def wheel(self, source: Source, side: Side) -> tuple[Path | None, str | None]:
        """Return the side's wheel and its SHA-256, built from its tree if it is not there yet."""
        if source.kind == "options":
            return None, None
        if source.kind == "wheel":
            assert source.wheel is not None
            return source.wheel, _sha256(source.wheel)
        assert source.tree is not None and self.repository is not None
        folder = self.root / "wheels" / source.tree
        with _only_one(folder):
            found = sorted(folder.glob("*.whl"))
            if not found:
                self.say(f"{side}: building a wheel of {source.name}")
                found = [self._build_wheel(source.tree, folder, side)]
        return found[0], _sha256(found[0])

    def _build_wheel(self, tree: str, folder: Path, side: Side) -> Path:
        assert self.repository is not None
        with tempfile.TemporaryDirectory(dir=self.root, prefix="export-") as name:
            place = Path(name)
            (place / "tree").mkdir()
            Git(self.repository).export(tree, place / "tree")
            call = ["wheel", "--no-deps", "--wheel-dir", str(place / "out"), str(place / "tree")]
            _pip(Path(sys.executable), call, side, "failure", "its wheel cannot be built")
            built = sorted((place / "out").glob("*.whl"))
            if len(built) != 1:
                raise BuildFailedError(
                    side, "failure", f"its tree builds {len(built)} wheels, not one"
                )
            target = folder / built[0].name
            built[0].replace(target)  # the same file system: whole or not at all
        return target

    def lock(self, wheel: Path | None) -> str:
        """Return the frozen dependencies of the base, one `name==version` a line.

        Bases that ask for the same share them for two weeks; then they are resolved again.
        """
        if wheel is None:
            return _freeze(Path(sys.executable), "base")
        key = _key(_requirements(wheel), self._extra, _python_tag())
        path = self.root / "locks" / f"{key}.txt"
        with _only_one(path.with_suffix("")):
            if not path.exists() or path.stat().st_mtime < time.time() - _KEPT:
                self.say("base: resolving its dependencies")
                with tempfile.TemporaryDirectory(dir=self.root, prefix="lock-") as name:
                    python = _new_environment(Path(name) / "env", "base")
                    what = [f"{wheel}{self._extra}"]
                    _pip(python, ["install", *what], "base", "infrastructure", "cannot install it")
                    _write(path, _freeze(python, "base"))
        return path.read_text()

    def environment(
        self, source: Source, side: Side, wheel: Path | None, sha: str | None, lock: str
    ) -> Environment:
        """Return the side ready to run."""
        options = {PREFIX + name.upper(): value for name, value in source.options.items()}
        key = _key(source.tree or "", sha or "", lock, self._extra, _python_tag())
        folder = self.root / "builds" / key
        with _only_one(folder):
            if wheel is None:
                python, frozen = Path(sys.executable), lock
            else:
                python, frozen = self._installed(folder, side, wheel, lock)
        # Sides that share their code do not share what they measured.
        cache = folder / "cache" / _key(json.dumps(dict(source.options), sort_keys=True))
        cache.mkdir(parents=True, exist_ok=True)
        environment = measured_environment({**options, f"{PREFIX}CACHE_DIR": str(cache)})
        return Environment(_build(source, sha, frozen), Runner(python, environment), cache)

    def _installed(self, folder: Path, side: Side, wheel: Path, lock: str) -> tuple[Path, str]:
        """Return the Python of the side's environment and what is installed in it beside the package."""
        ready = folder / _READY
        python = folder / "env" / "bin" / "python"
        if not ready.exists():
            self.say(f"{side}: installing into its own environment")
            shutil.rmtree(folder / "env", ignore_errors=True)
            _new_environment(folder / "env", side)
            requirements = folder / "lock.txt"
            requirements.write_text(lock)
            call = ["install", "--no-deps", "-r", str(requirements)]
            _pip(python, call, side, "infrastructure", "cannot install the frozen dependencies")
            # The lock is a constraint: what the side needs beyond it may be added, nothing may be changed.
            call = ["install", "--constraint", str(requirements), f"{wheel}{self._extra}"]
            trouble = "its requirements do not go with the base's frozen dependencies"
            _pip(python, call, side, "failure", trouble)
            _write(ready, json.dumps({"frozen": _freeze(python, side)}))
        frozen: str = json.loads(ready.read_text())["frozen"]
        added = sorted(set(frozen.splitlines()) - set(lock.splitlines()))
        if added:
            self.say(f"{side}: needs more than the base: {', '.join(added)}")
        return python, frozen


def _sweep(root: Path) -> None:
    """Remove builds and wheels that no evaluation has asked for since `_KEPT`; its lock file tells when that was."""
    for mark in [*root.glob("builds/*/.lock"), *root.glob("wheels/*/.lock")]:
        if mark.stat().st_mtime < time.time() - _KEPT:
            shutil.rmtree(mark.parent, ignore_errors=True)


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Make the folder and keep other evaluations out of it meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        os.utime(file.fileno())
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _requirements(wheel: Path) -> str:
    """Return what the base's wheel asks for. Raises: BuildFailedError for a file that is no wheel."""
    try:
        with zipfile.ZipFile(wheel) as file:
            name = next(n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
            lines = file.read(name).decode("utf-8", "replace").splitlines()
    except (zipfile.BadZipFile, StopIteration):
        raise BuildFailedError("base", "failure", f"{wheel.name} is no wheel") from None
    return "\n".join(sorted(line for line in lines if line.startswith("Requires-")))


def _new_environment(folder: Path, side: Side) -> Path:
    """Make an empty virtual environment and return its Python."""
    call = [sys.executable, "-m", "venv", str(folder)]
    _run(call, side, "infrastructure", "cannot make a virtual environment")
    return folder / "bin" / "python"


def _freeze(python: Path, side: Side) -> str:
    call = ["freeze", "--exclude", PACKAGE, "--exclude-editable"]
    return _pip(python, call, side, "infrastructure", "cannot list what is installed")


def _pip(
    python: Path,
    arguments: Sequence[str],
    side: Side,
    kind: Literal["failure", "infrastructure"],
    trouble: str,
) -> str:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return _run(command, side, kind, trouble)


def _run(
    command: Sequence[str],
    side: Side,
    kind: Literal["failure", "infrastructure"],
    trouble: str,
) -> str:
    """Return what a command printed. Raises: BuildFailedError with its last error line."""
    try:
        done = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_TIMEOUT,
            env=_building_environment(),
            cwd=tempfile.gettempdir(),
        )
    except subprocess.TimeoutExpired:
        raise BuildFailedError(
            side, "infrastructure", f"{trouble}: no end after {_TIMEOUT // 60} minutes"
        ) from None
    if done.returncode:
        raise BuildFailedError(side, kind, f"{trouble}: {_reason(done.stderr or done.stdout)}")
    return done.stdout


def _reason(text: str) -> str:
    """Return the line of pip's output that says most: its first error, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no message"])[-1]


def _building_environment() -> dict[str, str]:
    """Return this process's environment less what would reach into another Python or repository."""
    foreign = ("PYTHON", "GIT_", PREFIX, "VIRTUAL_ENV", "CONDA_")
    return {k: v for k, v in child_environment().items() if not k.startswith(foreign)}


def _python_tag() -> str:
    return f"{platform.python_implementation()} {platform.python_version()} {sys.base_prefix}"


def _key(*parts: str | None) -> str:
    return hashlib.sha256("\0".join(part or "" for part in parts).encode()).hexdigest()[:20]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)
