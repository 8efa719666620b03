"""What the machine is and whether it is fit to measure on: recorded always, warned about, never hidden."""

import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from sparkinfer import machine
from sparkinfer.evaluation.record import Check, Level

_CPU = Path("/sys/devices/system/cpu")
_LOAD_SHARE = 0.25  # of the cores, one minute's load
_BUSY = 10.0  # per cent of one core that another process may use
_WATCH_SECONDS = 1.0
_STEAL = 0.01  # share of the time that a hypervisor gave to others
_SPREAD = 0.05  # of the time a fixed piece of work takes
_SPACE = 2 << 30
_MEMORY_FACTOR = 1.5  # of the model files: weights are repacked, and there is a state
_GPU_FIELDS = (
    "name,driver_version,memory.total,memory.used,utilization.gpu,temperature.gpu,"
    "power.draw,power.limit,clocks.sm,clocks.max.sm,clocks.mem,persistence_mode"
)


def describe_machine() -> dict[str, Any]:
    """Return the facts of the machine that go into the record; no names of users or hosts."""
    return {
        "cpu": machine.cpu_model(),
        "cpus": len(machine.allowed_cpus()),
        "cores": machine.allowed_cores(),
        "quota": machine.cpu_quota(),
        "memory_bytes": machine.memory_total(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "governor": _governor(),
        "virtual": _virtual(),
        "gpus": [dict(gpu) for gpu in query_gpus()],
    }


def preflight(folder: Path, model_bytes: int, *, device: str = "cpu") -> tuple[Check, ...]:
    """Look at everything that makes figures wrong; takes about two seconds. `folder` is where results go."""
    checks = [*_cpu(), *_other_work(), _timing(), *_memory(model_bytes), _space(folder), *_power()]
    gpus = query_gpus()
    if device.startswith("cuda"):
        checks += list(_gpus(gpus))
    return tuple(checks)


def _check(name: str, value: Any, level: Level = "ok", note: str = "") -> Check:
    return Check(name, value, level, note)


def _cpu() -> Iterator[Check]:
    yield _check("cpu", machine.cpu_model())
    yield _check("cores", f"{machine.allowed_cores()} of {os.cpu_count()} logical CPUs")
    quota = machine.cpu_quota()
    if quota is not None:
        yield _check(
            "cpu quota", quota, "warn", "a control group that stops the process now and then"
        )
    governor = _governor()
    if governor is None:
        yield _check("governor", "not visible", note="clocks cannot be controlled from here")
    else:
        slow = governor != "performance"
        note = "clocks follow the load; 'cpupower frequency-set -g performance' pins them"
        yield _check("governor", governor, "warn" if slow else "ok", note if slow else "")
    clocks = _clocks()
    if clocks:
        yield _check("clocks, MHz", f"{min(clocks):.0f} to {max(clocks):.0f}")
    yield _check("virtual machine", _virtual(), note="other guests may use the same cores")


def _governor() -> str | None:
    governors = {machine.read(path) for path in _CPU.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    found = sorted(filter(None, governors))
    return " ".join(found) or None


def _clocks() -> list[float]:
    lines = (machine.read(Path("/proc/cpuinfo")) or "").splitlines()
    found = [line.partition(":")[2] for line in lines if line.startswith("cpu MHz")]
    return [float(value) for value in found]


def _virtual() -> bool:
    return " hypervisor" in (machine.read(Path("/proc/cpuinfo")) or "")


def _other_work() -> Iterator[Check]:
    """Load, processes that compute, and time taken by the hypervisor, seen over a second."""
    import psutil

    cores = machine.allowed_cores()
    load = os.getloadavg()[0]
    crowded = load > _LOAD_SHARE * cores
    note = "other work ran within the last minute" if crowded else ""
    yield _check("load, one minute", round(load, 2), "warn" if crowded else "ok", note)
    before, times = _cpu_seconds(), psutil.cpu_times()
    sleep(_WATCH_SECONDS)
    after, later = _cpu_seconds(), psutil.cpu_times()
    busy = {
        name: 100 * (after[key] - before.get(key, after[key])) / _WATCH_SECONDS
        for key, name in _names(after).items()
    }
    worst = sorted(((share, name) for name, share in busy.items() if share > _BUSY), reverse=True)
    named = ", ".join(f"{name} {share:.0f} %" for share, name in worst[:5])
    note = "they take time and cache from what is measured" if worst else ""
    yield _check("other busy processes", named or "none", "warn" if worst else "ok", note)
    stolen = getattr(later, "steal", 0.0) - getattr(times, "steal", 0.0)
    share = stolen / (_WATCH_SECONDS * max(1, os.cpu_count() or 1))
    high = share > _STEAL
    note = "the hypervisor gives the cores to others" if high else ""
    yield _check("stolen time", f"{100 * share:.1f} %", "warn" if high else "ok", note)


def _cpu_seconds() -> dict[int, float]:
    """Return process id -> CPU seconds so far, this process left out."""
    import psutil

    found = {}
    for process in psutil.process_iter(["pid", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None and process.info["pid"] != os.getpid():
            found[process.info["pid"]] = times.user + times.system
    return found


def _names(pids: Mapping[int, float]) -> dict[int, str]:
    import psutil

    names = {}
    for pid in pids:
        try:
            names[pid] = f"{psutil.Process(pid).name()} ({pid})"
        except psutil.Error:  # it has ended
            continue
    return names


class OtherWork:
    """What share of the machine others use while blocks run: all busy time less this process's and its children's."""

    def __init__(self) -> None:
        self._before = self._now()

    def share(self) -> float:
        """Return the share of all CPUs since the last call, 0 to 1."""
        before, self._before = self._before, self._now()
        wall, busy, own = (b - a for a, b in zip(before, self._before, strict=True))
        return min(1.0, max(0.0, busy - own) / max(1e-9, wall * (os.cpu_count() or 1)))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Return the clock, the machine's busy CPU seconds, and those of this process and its ended children."""
        import psutil

        times, mine = psutil.cpu_times(), os.times()
        own = mine.user + mine.system + mine.children_user + mine.children_system
        return perf_counter(), times.user + times.system + getattr(times, "nice", 0.0), own


def _timing() -> Check:
    """Time the same piece of work again and again; what varies here varies in every figure."""
    seconds = []
    for _ in range(40):
        started = perf_counter()
        sum(range(100_000))
        seconds.append(perf_counter() - started)
    low, middle, high = statistics.quantiles(seconds, n=4)
    spread = (high - low) / middle
    wide = spread > _SPREAD
    note = "the machine's speed changes from one moment to the next" if wide else ""
    value = f"{100 * spread:.1f} % between quartiles"
    return _check("fixed work", value, "warn" if wide else "ok", note)


def _memory(model_bytes: int) -> Iterator[Check]:
    import psutil

    available, needed = machine.available_memory(), int(_MEMORY_FACTOR * model_bytes)
    short = available < needed
    note = f"the models need about {_gib(needed)}" if short else ""
    yield _check("memory available", _gib(available), "refuse" if short else "ok", note)
    used = psutil.swap_memory().used
    note = "memory is on disk: page faults are timed, too" if used > 1 << 28 else ""
    yield _check("swap in use", _gib(used), "warn" if note else "ok", note)


def _space(folder: Path) -> Check:
    existing = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    short = free < _SPACE
    note = "environments and compiled code need more" if short else ""
    return _check("disk free", _gib(free), "refuse" if short else "ok", note)


def _power() -> Iterator[Check]:
    import psutil

    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    if battery is not None and not battery.power_plugged:
        yield _check("power", "battery", "warn", "clocks are lowered on battery")


def query_gpus() -> list[Mapping[str, str]]:
    """Return what nvidia-smi says of each GPU, by field; empty where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    call = [tool, f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(call, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(text: str) -> list[Mapping[str, str]]:
    """Return field -> value for each line of nvidia-smi's table."""
    names = _GPU_FIELDS.split(",")
    rows = [[cell.strip() for cell in line.split(",")] for line in text.strip().splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def _gpus(gpus: Sequence[Mapping[str, str]]) -> Iterator[Check]:
    if not gpus:
        yield _check("gpu", "none", "refuse", "the scope is for a GPU and nvidia-smi finds none")
    for number, gpu in enumerate(gpus):
        yield _check(f"gpu {number}", f"{gpu['name']}, driver {gpu['driver_version']}")
        clocks = f"{gpu['clocks.sm']} of {gpu['clocks.max.sm']} MHz"
        yield _check(f"gpu {number} clocks", clocks, note="not pinned by the evaluator")
        yield _check(
            f"gpu {number} power, temperature",
            f"{gpu['power.draw']} of {gpu['power.limit']} W, {gpu['temperature.gpu']} C",
        )
        busy = gpu["utilization.gpu"] not in ("0", "[N/A]")
        note = "something else uses the device" if busy else ""
        value = f"{gpu['utilization.gpu']} %, {gpu['memory.used']} MiB in use"
        yield _check(f"gpu {number} other work", value, "warn" if busy else "ok", note)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.1f} GiB"
