"""Renders untrusted templates in a process that can be killed, started ahead and kept."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Lock, Timer
from typing import Any, TypeVar
from weakref import finalize

from .errors import GGUFError, RequestError, SparkError

T = TypeVar("T")
Process = subprocess.Popen[bytes]

WORKER = Path(__file__).with_name("template_worker.py")
RENDER_SECONDS = 2.0
START_SECONDS = 20.0
MEMORY_BYTES = 512 << 20
# A template may repeat what it is given, but not without bound.
OUTPUT_FACTOR = 4
OUTPUT_EXTRA = 1 << 20


class TemplateProcess:
    """One worker process; it starts with the object and is replaced after it had to be killed.

    Limits per render: RENDER_SECONDS of time, MEMORY_BYTES of memory (Linux), OUTPUT_FACTOR times
    the input plus OUTPUT_EXTRA characters of output.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: Process | None = None
        self._end: Callable[[], Any] | None = None
        self._ready = False
        self._start()

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """The text that `template` makes of `variables` (JSON values).

        Raises: RequestError when the template refuses the input or exceeds a limit, GGUFError when
        it is not valid or reaches for what the sandbox forbids.
        """
        body: dict[str, Any] = {"template": template, "variables": variables}
        size = len(json.dumps(body, ensure_ascii=False))
        body["limit"] = limit = OUTPUT_FACTOR * size + OUTPUT_EXTRA
        with self._lock:
            answer = self._exchange(json.dumps(body).encode("ascii"))
        if "error" in answer:
            raise _error(answer["error"], answer["message"], limit)
        return str(answer["text"])

    def close(self) -> None:
        """End the worker; the next render starts a new one."""
        with self._lock:
            self._stop()

    def _start(self) -> Process:
        spec = find_spec("jinja2"), find_spec("markupsafe")
        paths = {str(Path(s.origin).parent.parent) for s in spec if s is not None and s.origin}
        limits = [str(MEMORY_BYTES), str(int(RENDER_SECONDS) + 1)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WORKER), *limits, *sorted(paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={},
            process_group=0 if sys.platform != "win32" else None,
        )
        self._process = process
        self._ready = False
        self._end = finalize(self, _end, process)
        return process

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _exchange(self, request: bytes) -> dict[str, str]:
        """Send a request and wait for its answer; a worker that fails to give one is ended."""
        process = self._process or self._start()
        try:
            if not self._ready:
                _within(START_SECONDS, process, _receive)
                self._ready = True
            return _within(RENDER_SECONDS, process, lambda p: _ask(p, request))
        except BaseException:
            self._stop()
            raise


def _within(seconds: float, process: Process, call: Callable[[Process], T]) -> T:
    """The result of `call`. Raises: RequestError when the process ended or needed longer."""
    late = Event()
    watchdog = Timer(seconds, _kill, (process, late))
    watchdog.daemon = True
    watchdog.start()
    try:
        return call(process)
    except (OSError, ValueError):
        why = f"took more than {seconds:g} s" if late.is_set() else "ended its process"
        raise RequestError(f"the chat template {why}; use another one or a raw prompt") from None
    finally:
        watchdog.cancel()


def _kill(process: Process, late: Event) -> None:
    late.set()
    process.kill()


def _ask(process: Process, request: bytes) -> dict[str, str]:
    _send(process, request)
    return _receive(process)


def _send(process: Process, request: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(len(request).to_bytes(8, "little") + request)
    process.stdin.flush()


def _receive(process: Process) -> dict[str, str]:
    """Raises: ValueError when the stream ends early."""
    assert process.stdout is not None
    length = int.from_bytes(process.stdout.read(8), "little")
    answer: dict[str, str] = json.loads(process.stdout.read(length))
    return answer


def _end(process: Process) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue  # unsent bytes of a killed worker


def _error(kind: str, message: str, limit: int) -> SparkError:
    text = " ".join(message.split())[:300]
    if kind == "syntax":
        return GGUFError(f"the chat template is not valid: {text}")
    if kind == "forbidden":
        return GGUFError(f"the chat template does what the sandbox forbids: {text}")
    if kind == "raised":
        return RequestError(f"the chat template refuses these messages: {text}")
    if kind == "output":
        return RequestError(f"the chat template made more than {limit} characters")
    if kind == "memory":
        return RequestError(f"the chat template needed more than {MEMORY_BYTES >> 20} MiB")
    return RequestError(f"the chat template failed: {text}")
