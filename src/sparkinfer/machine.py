"""What this process may use of the machine: cores and memory. Standard library and psutil only."""

import math
import os
import platform
import sys
from pathlib import Path

_CPU = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def allowed_cpus() -> list[int]:
    """Return the logical CPUs this process may run on (its affinity mask), in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def allowed_cores(cpu_root: Path = _CPU) -> int:
    """Return how many physical cores stand behind the allowed CPUs; hyper-threads count once."""
    import psutil

    cpus = allowed_cpus()
    groups = {_siblings(cpu_root / f"cpu{cpu}" / "topology") or str(cpu) for cpu in cpus}
    if len(groups) < len(cpus) or sys.platform == "linux":
        return len(groups)
    return min(len(cpus), psutil.cpu_count(logical=False) or len(cpus))


def _siblings(topology: Path) -> str | None:
    for name in ("core_cpus_list", "thread_siblings_list"):
        if (text := read(topology / name)) is not None:
            return text
    return None


def cpu_quota(root: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the control group's CPU limit in cores, None without one (versions 1 and 2)."""
    limits = []
    for folder in _cgroup_folders(root, membership):
        quota, _, period = (read(folder / "cpu.max") or "max").partition(" ")
        if quota == "max":
            quota = read(folder / "cpu.cfs_quota_us") or "-1"
            period = read(folder / "cpu.cfs_period_us") or "100000"
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def memory_limit(root: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the control group's memory limit in bytes, None without one."""
    limits = []
    for folder in _cgroup_folders(root, membership):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read(folder / name) or "max"
            if text.isdigit() and int(text) < 2**60:  # version 1 writes a huge number for none
                limits.append(int(text))
    return min(limits, default=None)


def _cgroup_folders(root: Path, membership: Path) -> list[Path]:
    """Return this process's groups and their parents, limits of all of which apply."""
    folders: dict[Path, None] = {}
    for line in (read(membership) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        base = root / controllers if controllers else root
        path = base / group.lstrip("/")
        for folder in (path, *path.parents):
            if folder == root or root in folder.parents:
                folders[folder] = None
    return list(folders)


def own_version() -> str:
    """Return this package's version; "source" where its sources run without being installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sparkinfer")
    except PackageNotFoundError:
        return "source"


def default_threads() -> int:
    """Return the number of physical cores this process may keep busy: affinity and quota apply."""
    cores = allowed_cores()
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def available_memory() -> int:
    """Return the bytes that can be allocated now without swapping, the group's limit included."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit = memory_limit()
    if limit is None:
        return available
    return max(0, min(available, limit - int(psutil.Process().memory_info().rss)))


def memory_total() -> int:
    """Return the bytes of memory of this machine, or of this control group where it is less."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = memory_limit()
    return total if limit is None else min(total, limit)


def cpu_model() -> str:
    """Return the CPU's name as the operating system gives it."""
    for line in (read(Path("/proc/cpuinfo")) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware"):
            return value.strip()
    return platform.processor() or platform.machine()


def read(path: Path) -> str | None:
    """A file of the system, or None: it is not there, or not for us."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
