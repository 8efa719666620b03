"""The driver's end of a side: start it, ask it, account for what it uses while idle; hogs."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Have the kernel end this child when the driver ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def cpu_seconds(pid: int) -> float:
    """User plus system time of a process, all threads, in seconds (10 ms steps)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Client:
    """A running side. `label` names it in tables; `settings` are what its file documents."""

    def __init__(
        self,
        label: str,
        python: str,
        script: str,
        settings: Mapping[str, Any],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.label = label
        self.command = [python, str(FOLDER / script)]
        self.settings = dict(settings)
        self.env = {**os.environ, **(env or {})}
        self.process = subprocess.Popen(
            [*self.command, json.dumps(self.settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.env,
            preexec_fn=_end_with_parent,
        )
        self.peak_rss = 0

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send one command and wait for its reply. Raises RuntimeError with the side's error."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.label} ended with code {self.process.wait()} in {op!r}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            print(reply["trace"], file=sys.stderr)
            raise RuntimeError(f"{self.label}, {op!r}: {reply['error']}")
        self.peak_rss = reply.pop("peak_rss")
        return reply

    def close(self) -> None:
        """Let the side end by itself; kill it if it does not. Closing twice is fine."""
        if self.process.returncode is not None:
            return
        try:
            self.process.communicate('{"op": "quit"}\n', timeout=20)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
            self.process.wait()


class IdleWatch:
    """Share of one core that sides use while another one is measured (0 is what we want)."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self.clients = clients
        self.used = {client.label: 0.0 for client in clients}
        self.seconds = {client.label: 0.0 for client in clients}

    def ask(self, client: Client, op: str, **arguments: Any) -> dict[str, Any]:
        """`client.ask`, with the processor time of the other sides booked as idle use."""
        others = [other for other in self.clients if other is not client]
        before = [cpu_seconds(other.process.pid) for other in others]
        start = time.perf_counter()
        reply = client.ask(op, **arguments)
        elapsed = time.perf_counter() - start
        for other, used in zip(others, before, strict=True):
            self.used[other.label] += cpu_seconds(other.process.pid) - used
            self.seconds[other.label] += elapsed
        time.sleep(0.02)  # OpenMP threads of the side just measured spin for some ms, then sleep
        return reply

    def shares(self) -> dict[str, float]:
        """Idle use by label, as a share of one core."""
        return {
            label: round(used / self.seconds[label], 4) if self.seconds[label] else 0.0
            for label, used in self.used.items()
        }


def once(
    python: str,
    script: str,
    settings: Mapping[str, Any],
    text: str,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A whole process from start to its first token.

    Returns the side's reply plus `first_token_s`, from before the start of the interpreter.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [python, str(FOLDER / script), json.dumps({**settings, "once": text})],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        preexec_fn=_end_with_parent,
    )
    assert process.stdout
    line = process.stdout.readline()
    elapsed = time.perf_counter() - start
    process.stdout.close()
    if process.wait() or not line:
        raise RuntimeError(f"{script} ended with code {process.returncode} before its first token")
    reply: dict[str, Any] = json.loads(line)
    return {**reply, "first_token_s": elapsed}


@contextmanager
def hogs(count: int) -> Iterator[list[int]]:
    """Run `count` busy loops pinned to the last allowed core; yields their process ids."""
    core = max(os.sched_getaffinity(0))

    def pinned() -> None:
        _end_with_parent()
        os.sched_setaffinity(0, {core})

    running = [
        subprocess.Popen(
            [sys.executable, "-c", "while True: pass"],
            preexec_fn=pinned,
        )
        for _ in range(count)
    ]
    try:
        yield [process.pid for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
