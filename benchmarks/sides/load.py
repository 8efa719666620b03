"""How much of the machine other programs use: a paired comparison needs to know."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from sides.client import TICKS, cpu_seconds


def machine_busy_seconds() -> float:
    """Processor seconds used since boot on all cores, by everything (idle and I/O wait not)."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS


class ForeignLoad:
    """Cores used by processes that are not ours, since the last reading."""

    def __init__(self, own: Iterable[int]) -> None:
        self.own = [os.getpid(), *own]
        self.read()

    def read(self) -> float:
        """Mean number of cores that others used since the last call (0.0 to the core count)."""
        now = time.perf_counter(), machine_busy_seconds(), sum(map(cpu_seconds, self.own))
        last = getattr(self, "_last", now)
        self._last = now
        elapsed = now[0] - last[0]
        used = max(0.0, now[1] - last[1] - (now[2] - last[2]))
        return used / elapsed if elapsed else 0.0

    def wait_quiet(self, limit: float, patience: float) -> float:
        """Wait until others use less than `limit` cores, at most `patience` s; returns the load."""
        end = time.perf_counter() + patience
        while True:
            self.read()
            time.sleep(0.3)
            load = self.read()
            if load < limit or time.perf_counter() > end:
                return load
