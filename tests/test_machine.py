"""Cores and limits, read from made-up system folders."""

from importlib import metadata
from pathlib import Path

import pytest

from sparkinfer import machine


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def membership(tmp_path: Path) -> Path:
    write(tmp_path / "self", "0::/outer/inner\n")
    return tmp_path / "self"


def test_hyper_threads_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "allowed_cpus", lambda: [0, 1, 4, 5])
    for cpu in (0, 1, 4, 5):
        name = "core_cpus_list" if cpu < 4 else "thread_siblings_list"
        write(tmp_path / f"cpu{cpu}" / "topology" / name, f"{cpu & ~1}-{cpu | 1}\n")
    assert machine.allowed_cores(tmp_path) == 2
    assert machine.allowed_cores(tmp_path / "none") == 4


def test_the_tightest_quota_of_all_parents_counts(tmp_path: Path, membership: Path) -> None:
    root = tmp_path / "cgroup"
    assert machine.cpu_quota(root, membership) is None
    write(root / "outer" / "inner" / "cpu.max", "max 100000\n")
    assert machine.cpu_quota(root, membership) is None
    write(root / "outer" / "cpu.max", "150000 100000\n")
    write(root / "cpu.max", "400000 100000\n")
    assert machine.cpu_quota(root, membership) == 1.5


def test_limits_of_version_one(tmp_path: Path, membership: Path) -> None:
    membership.write_text("4:memory:/job\n3:cpu,cpuacct:/job\n")
    root = tmp_path / "cgroup"
    write(root / "cpu,cpuacct" / "job" / "cpu.cfs_quota_us", "50000\n")
    write(root / "cpu,cpuacct" / "job" / "cpu.cfs_period_us", "100000\n")
    write(root / "cpu,cpuacct" / "cpu.cfs_quota_us", "-1\n")
    write(root / "memory" / "job" / "memory.limit_in_bytes", "1073741824\n")
    write(root / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.cpu_quota(root, membership) == 0.5
    assert machine.memory_limit(root, membership) == 2**30


@pytest.mark.parametrize(("quota", "threads"), [(None, 4), (2.5, 2), (0.5, 1), (64.0, 4)])
def test_default_threads(
    quota: float | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "allowed_cores", lambda: 4)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert machine.default_threads() == threads


def test_a_memory_limit_bounds_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: 1000)
    assert machine.memory_total() == 1000
    assert machine.available_memory() == 0
    monkeypatch.setattr(machine, "memory_limit", lambda: None)
    assert 0 < machine.available_memory() <= machine.memory_total()
    assert machine.cpu_model()


def test_sources_that_are_not_installed_have_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.own_version() == metadata.version("sparkinfer")

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert machine.own_version() == "source"
