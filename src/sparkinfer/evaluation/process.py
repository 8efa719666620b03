"""Runs the measuring program in a build's environment, reads its events, and turns every end into one outcome."""

import json
import os
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import IO, Any, Literal

from sparkinfer.errors import SparkError
from sparkinfer.evaluation.harness import EXIT_MEMORY, EXIT_OLD, PROTOCOL
from sparkinfer.options import child_environment

HARNESS = Path(__file__).with_name("harness.py")
SILENCE = 900.0  # seconds without an event after which a process counts as hung
_TAIL = 2000  # bytes of standard error kept for a message
# What a measured process gets of this process's environment; everything else stays outside.
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH")
_PASSED_PREFIXES = ("CUDA_", "NVIDIA_")
_CLOCK_SHARE, _CLOCK_SECONDS = (
    0.05,
    0.5,
)  # how far its clock may be from ours before it is disbelieved

Reason = Literal["crash", "timeout", "memory", "refused", "clock"]
Event = Mapping[str, Any]


class ProcessFailedError(SparkError):
    """A measured process did not do what it was asked: why, in one line, and what kind of end it was."""

    exit_code = 74

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class Runner:
    """How to run a build: its Python, and the process options (as environment variables) it gets."""

    python: Path
    environment: Mapping[str, str]


@dataclass(slots=True)
class Run:
    """What one process said. `results` by order id; times in seconds of its own clock.

    `claimed` and `observed`: all requests together by its clock and by ours.
    """

    imported: dict[str, Any] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    peak_rss: int = 0
    claimed: float = 0.0
    observed: float = 0.0


def measured_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a measured process: a short list of this one's names, and `extra`."""
    kept = {
        name: value
        for name, value in child_environment().items()
        if name in _PASSED or name.startswith(_PASSED_PREFIXES)
    }
    return {**kept, **extra}


def run_harness(
    runner: Runner,
    orders: Mapping[str, Any],
    *,
    raw: Path | None = None,
    silence: float = SILENCE,
    harness: Path = HARNESS,
    seen: Callable[[Event], None] = lambda _event: None,
) -> Run:
    """Carry out the orders in a fresh process and return what it said; its raw events go to `raw`.

    Raises: ProcessFailedError for a crash, a time-out, exhausted memory, an interface that lacks
    something, or times that cannot be true. KeyboardInterrupt ends the process first.
    """
    with tempfile.TemporaryDirectory(prefix="sparkinfer-eval-") as name:
        folder = Path(name)
        (folder / "orders.json").write_text(json.dumps(orders))
        # -I: neither PYTHON* variables nor the harness's own folder can put other modules in the way.
        command = [str(runner.python), "-I", str(harness), str(folder / "orders.json")]
        with (folder / "stderr").open("w+b") as errors:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(runner.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches the evaluator alone, which then ends this
            )
            try:
                run = _follow(process, silence, raw, seen)
                code = process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                raise ProcessFailedError(
                    "timeout", "it did not end after its last answer"
                ) from None
            finally:
                _end(process)
            complaint = _tail(errors)
    if code or not run.peak_rss:
        raise _failure(code, run, complaint)
    _check_clock(run)
    return run


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and what it started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _follow(
    process: "subprocess.Popen[bytes]",
    silence: float,
    raw: Path | None,
    seen: Callable[[Event], None],
) -> Run:
    """Read events until the pipe closes. Raises: ProcessFailedError("timeout" or "clock")."""
    assert process.stdout is not None
    run, pending, begun = Run(), b"", monotonic()
    os.set_blocking(process.stdout.fileno(), False)
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not waiting.select(silence):
                raise ProcessFailedError("timeout", f"no answer for {silence:.0f} s")
            chunk = process.stdout.read()
            now = monotonic()
            if not chunk:
                return run
            *lines, pending = (pending + chunk).split(b"\n")
            if raw is not None:
                with raw.open("ab") as file:
                    file.writelines(line + b"\n" for line in lines)
            for line in lines:
                event = _event(line)
                begun = now if event["event"] == "start" else begun
                if event["event"] == "done" and "total_s" in event:
                    run.observed += now - begun
                    run.claimed += float(event["total_s"])
                _note(run, event)
                seen(event)


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        shown = line[:80].decode(errors="replace")
        raise ProcessFailedError("crash", f"the harness's output is not its own: {shown!r}")
    return event


def _note(run: Run, event: dict[str, Any]) -> None:
    kind = event["event"]
    if kind == "hello" and event["protocol"] != PROTOCOL:
        raise ProcessFailedError(
            "crash", f"harness protocol {event['protocol']}, expected {PROTOCOL}"
        )
    if kind == "imported":
        run.imported = event
    elif kind == "loaded":
        run.loaded = event
    elif kind == "done":
        run.results[event["id"]] = event
    elif kind == "bye":
        run.peak_rss = int(event["peak_rss"])
    elif kind in ("refused", "error"):
        run.results["error"] = event


def _check_clock(run: Run) -> None:
    """All requests together cannot have taken less time than their process claims. Raises: ProcessFailedError.

    Much less than observed is disbelieved as well: a clock that stands still makes everything fast. Single requests
    are not compared, as this process may be late to see that one has begun.
    """
    slack = _CLOCK_SECONDS + _CLOCK_SHARE * run.observed
    if run.claimed > run.observed + slack or 2 * run.claimed < run.observed - 4 * slack:
        raise ProcessFailedError(
            "clock",
            f"its requests took {run.claimed:.2f} s by its own clock, {run.observed:.2f} s by the evaluator's",
        )


def _tail(errors: IO[bytes]) -> str:
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - _TAIL))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _failure(code: int, run: Run, complaint: str) -> ProcessFailedError:
    """Return the error for a process that ended with a code, or without its last line."""
    said = run.results.get("error", {})
    if code == EXIT_OLD:
        return ProcessFailedError("refused", str(said.get("reason", complaint)))
    message = str(said.get("message") or complaint or "no message")
    if code == EXIT_MEMORY:
        return ProcessFailedError("memory", f"out of memory: {message}")
    if code == -signal.SIGKILL:
        return ProcessFailedError(
            "memory", "killed from outside, most likely for the memory it used"
        )
    if code < 0:
        return ProcessFailedError("crash", f"ended by {signal.Signals(-code).name}: {complaint}")
    if code == 0:
        return ProcessFailedError("crash", "it ended before its last line")
    kind = f"{said['type']}: " if "type" in said else ""
    return ProcessFailedError("crash", f"exit code {code}: {kind}{message}")


def harness_orders(
    model: Path,
    do: Sequence[Mapping[str, Any]],
    *,
    drafting: bool,
    load: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the orders for a process; `drafting` refuses a build that would decode plainly."""
    return {"model": str(model), "load": dict(load), "drafting": drafting, "do": list(do)}
