"""Clean environments: what is built once, what both sides share, and whose fault a failed build is."""

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sparkinfer.evaluation import builds
from sparkinfer.evaluation.builds import BuildFailedError, Environment, prepare
from sparkinfer.evaluation.process import harness_orders, run_harness
from sparkinfer.evaluation.source import Source, Sources, resolve_sources

FROZEN = "numba==0.62\nnumpy==2.1\n"


class Pip:
    """In the place of every command that `builds` runs; `fails` makes the commands that contain this text fail."""

    def __init__(self, fails: str = "", adds: str = "", asks: str = "Requires-Dist: numpy") -> None:
        self.calls: list[list[str]] = []
        self.fails, self.adds, self.asks = fails, adds, asks

    def __call__(self, command: Sequence[str], side: str, kind: str, trouble: str) -> str:
        words = list(command)
        self.calls.append(words)
        if self.fails and self.fails in " ".join(words):
            raise BuildFailedError(side, kind, f"{trouble}: no such thing")  # type: ignore[arg-type]
        if "venv" in words:
            Path(words[-1], "bin").mkdir(parents=True)
        if "wheel" in words:
            folder, tree = Path(words[words.index("--wheel-dir") + 1]), Path(words[-1])
            folder.mkdir()
            text = "".join(path.read_text() for path in sorted(tree.iterdir()))
            with zipfile.ZipFile(folder / "sparkinfer-1-py3-none-any.whl", "w") as file:
                for name, content in (("code.py", text), ("s.dist-info/METADATA", self.asks)):
                    file.writestr(zipfile.ZipInfo(name), content)
        if "freeze" in words:
            return FROZEN + (self.adds if "builds" in words[0] else "")
        return ""

    def count(self, word: str) -> int:
        return sum(word in call for call in self.calls)


def git(repository: Path, *arguments: str) -> None:
    settings = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(repository), *settings, *arguments]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def revisions(tmp_path: Path) -> Sources:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for name in ("one", "two"):
        (folder / "code.txt").write_text(name)
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", name)
    return resolve_sources("main~1", "main", repository=folder, common={"threads": "2"})


def prepared(
    sources: Sources, root: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch, device: str = "cpu"
) -> tuple[tuple[Environment, Environment], list[str]]:
    said: list[str] = []
    monkeypatch.setattr(builds, "_run", pip)
    return prepare(sources, root, device=device, say=said.append), said


def test_each_side_has_its_own_environment_and_the_bases_dependencies(
    tmp_path: Path, revisions: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip()
    (base, candidate), _ = prepared(revisions, tmp_path / "root", pip, monkeypatch)
    assert base.runner.python != candidate.runner.python
    assert base.cache != candidate.cache
    for built in (base.build, candidate.build):
        (file,) = (tmp_path / "root" / "wheels" / (built.tree_sha or "")).glob("*.whl")
        assert built.wheel_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert base.build.wheel_sha256 != candidate.build.wheel_sha256
    assert base.build.lock_sha256 == candidate.build.lock_sha256
    assert candidate.build.merged_onto == base.build.sha
    assert base.runner.environment["SPARKINFER_THREADS"] == "2"
    assert base.runner.environment["SPARKINFER_CACHE_DIR"] == str(base.cache)
    installs = [call for call in pip.calls if "-r" in call]
    assert len(installs) == 2
    assert {Path(call[call.index("-r") + 1]).read_text() for call in installs} == {FROZEN}
    assert not any("torch" in word or "[cuda]" in word for call in pip.calls for word in call)


def test_a_second_evaluation_builds_nothing(
    tmp_path: Path, revisions: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = prepared(revisions, tmp_path / "root", Pip(), monkeypatch)
    again = Pip()
    second, said = prepared(revisions, tmp_path / "root", again, monkeypatch)
    assert again.calls == [] and said == []
    assert first == second


def test_bases_that_ask_for_the_same_share_its_frozen_dependencies_for_two_weeks(
    tmp_path: Path, revisions: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    prepared(revisions, root, Pip(), monkeypatch)
    swapped = Sources(revisions.candidate, revisions.base, revisions.repository)
    pip = Pip()
    prepared(swapped, root, pip, monkeypatch)
    assert pip.calls == []
    (lock,) = (root / "locks").glob("*.txt")
    then = time.time() - 15 * 24 * 3600
    os.utime(lock, (then, then))
    pip = Pip()
    prepared(swapped, root, pip, monkeypatch)
    assert pip.count("freeze") == 1 and lock.stat().st_mtime > then
    other = Sources(
        *(
            replace(side, tree=None, kind="wheel", wheel=_no_wheel(tmp_path))
            for side in (revisions.base, revisions.candidate)
        )
    )
    with pytest.raises(BuildFailedError, match=r"no\.whl is no wheel"):
        prepared(other, root, Pip(), monkeypatch)


def _no_wheel(folder: Path) -> Path:
    (folder / "no.whl").write_text("text")
    return folder / "no.whl"


def test_an_environment_that_was_not_finished_is_made_anew(
    tmp_path: Path, revisions: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildFailedError):
        prepared(revisions, tmp_path / "root", Pip(fails="--constraint"), monkeypatch)
    pip = Pip()
    prepared(revisions, tmp_path / "root", pip, monkeypatch)
    assert pip.count("venv") == 2
    assert pip.count("wheel") == 1  # the base's wheel was there


@pytest.mark.parametrize(
    ("fails", "side", "kind"),
    [
        ("wheel --no-deps", "base", "failure"),
        ("-m venv", "base", "infrastructure"),
        ("--no-deps -r", "base", "infrastructure"),
        ("--constraint", "base", "failure"),
    ],
)
def test_a_failed_build_says_whose_it_is(
    tmp_path: Path,
    revisions: Sources,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    side: str,
    kind: str,
) -> None:
    with pytest.raises(BuildFailedError, match="no such thing") as caught:
        prepared(revisions, tmp_path / "root", Pip(fails=fails), monkeypatch)
    assert (caught.value.side, caught.value.kind, caught.value.exit_code) == (side, kind, 74)


def test_what_a_side_needs_beyond_the_base_is_said(
    tmp_path: Path, revisions: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip(adds="extra==1\n")
    (_, candidate), said = prepared(revisions, tmp_path / "root", pip, monkeypatch)
    assert "candidate: needs more than the base: extra==1" in said
    assert (
        candidate.build.lock_sha256 == hashlib.sha256((FROZEN + "extra==1\n").encode()).hexdigest()
    )


def test_builds_that_nobody_asks_for_are_swept_after_two_weeks(
    tmp_path: Path, revisions: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    (base, candidate), _ = prepared(revisions, root, Pip(), monkeypatch)
    for age, folder in ((15, base.cache.parents[1]), (13, candidate.cache.parents[1])):
        then = time.time() - age * 24 * 3600
        os.utime(folder / ".lock", (then, then))
    pip = Pip()
    prepared(revisions, root, pip, monkeypatch)
    environments = [call[-1] for call in pip.calls if "venv" in call]
    assert environments == [str(base.cache.parents[1] / "env")]
    again = Pip()
    prepared(revisions, root, again, monkeypatch)  # being asked for counts as use
    assert again.calls == []


def test_a_gpu_scope_installs_the_gpu_extra(
    tmp_path: Path, revisions: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip()
    prepared(revisions, tmp_path / "root", pip, monkeypatch, device="cuda")
    assert any(word.endswith(".whl[cuda]") for call in pip.calls for word in call)


def test_option_sets_share_the_code_but_not_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = [
        Source("options", f"options:spec={value}", tree="c" * 64, options={"spec": value})
        for value in ("off", "auto")
    ]
    (base, candidate), _ = prepared(Sources(*sides), tmp_path, Pip(), monkeypatch)
    assert base.runner.python == candidate.runner.python == Path(sys.executable)
    assert base.cache != candidate.cache
    assert base.runner.environment["SPARKINFER_SPEC"] == "off"
    (base.cache / "costs").mkdir()
    (base.cache / "kernels").mkdir()
    base.forget_measurements()
    assert [path.name for path in base.cache.iterdir()] == ["kernels"]


def wheel(folder: Path, code: str, name: str) -> Path:
    """A wheel of a made-up package `sparkinfer`."""
    folder.mkdir()
    path = folder / f"sparkinfer-{name}-py3-none-any.whl"
    info = f"sparkinfer-{name}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("sparkinfer/__init__.py", code)
        meta = f"Metadata-Version: 2.1\nName: sparkinfer\nVersion: {name}\n"
        file.writestr(f"{info}/METADATA", meta)
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.long
def test_wheels_are_installed_and_the_harness_refuses_what_it_cannot_measure(
    tmp_path: Path,
) -> None:
    from sparkinfer.evaluation.process import ProcessFailedError

    paths = [
        wheel(tmp_path / "a", "ENGINE = 1\n", "1.0"),
        wheel(tmp_path / "b", "class Engine: pass\n", "2.0"),
    ]
    sources = resolve_sources(*map(str, paths), repository=tmp_path, common={})
    base, candidate = prepare(sources, tmp_path / "root", device="cpu", say=lambda _text: None)
    orders = harness_orders(Path("none.gguf"), [], drafting=False, load={})
    with pytest.raises(ProcessFailedError, match=r"no sparkinfer\.Engine") as caught:
        run_harness(base.runner, orders)
    assert caught.value.reason == "refused"
    with pytest.raises(ProcessFailedError, match="lacks load, stream, encode_chat"):
        run_harness(candidate.runner, orders)
