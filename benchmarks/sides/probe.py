"""What the machine is and how fast it reads memory right now."""

from __future__ import annotations

import itertools
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

CHUNK = 1 << 19  # int64 values a thread claims at a time: 4 MiB
FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "asimd", "i8mm")


@numba.njit(nogil=True, boundscheck=False)  # type: ignore[untyped-decorator,unused-ignore]
def _two_streams(values: np.ndarray) -> np.int64:
    """Sum int64 values from two places at once: one stream alone does not fill the memory bus."""
    half = values.size // 2
    a, b = values[:half], values[half : 2 * half]
    total = np.int64(0)
    for i in range(half):
        total += a[i] + b[i]
    return total


@numba.njit(nogil=True, boundscheck=False)  # type: ignore[untyped-decorator,unused-ignore]
def _four_streams(values: np.ndarray) -> np.int64:
    """Sum int64 values from four places at once."""
    part = values.size // 4
    a, b = values[:part], values[part : 2 * part]
    c, d = values[2 * part : 3 * part], values[3 * part : 4 * part]
    total = np.int64(0)
    for i in range(part):
        total += a[i] + b[i] + c[i] + d[i]
    return total


READERS = (_two_streams, _four_streams)


class ReadProbe:
    """Read rate of `threads` threads over an array far larger than the last-level cache."""

    def __init__(self, threads: int, megabytes: int = 512) -> None:
        self.values = np.ones(megabytes << 17, dtype=np.int64)
        self.threads = threads
        for read in READERS:
            read(self.values[:CHUNK])

    def _pass(self, read: Callable[[np.ndarray], np.int64]) -> float:
        claims = itertools.count()
        chunks = self.values.size // CHUNK

        def work() -> None:
            while (i := next(claims)) < chunks:
                read(self.values[i * CHUNK : (i + 1) * CHUNK])

        crew = [threading.Thread(target=work) for _ in range(self.threads)]
        start = time.perf_counter()
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        return self.values.nbytes / (time.perf_counter() - start)

    def bytes_per_second(self, passes: int = 5) -> float:
        """Best over the readers of the median over passes."""
        return max(sorted(self._pass(read) for _ in range(passes))[passes // 2] for read in READERS)


def _cpuinfo() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def machine() -> dict[str, Any]:
    """Processor, relevant instruction sets, cache, memory, kernel."""
    cpu = _cpuinfo()
    flags = (cpu.get("flags") or cpu.get("Features") or "").split()
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        read = {name: (index / name).read_text().strip() for name in ("level", "type", "size")}
        caches[f"L{read['level']} {read['type']}"] = read["size"]
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "family": cpu.get("cpu family"),
        "model": cpu.get("model"),
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in FLAGS if flag in flags],
        "virtual": "hypervisor" in flags,
        "caches": caches,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
    }


if __name__ == "__main__":
    print(machine())
    for count in (1, 2):
        probe = ReadProbe(count)
        for reader in READERS:
            rates = [probe._pass(reader) / 1e9 for _ in range(7)]
            print(count, "threads", reader.__name__, " ".join(f"{rate:.1f}" for rate in rates))
