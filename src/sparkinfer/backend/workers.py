"""Processes that compile kernels, side by side: Numba holds the interpreter of the one it runs in all the while.

They start when several kernels are missing, take one after the other, keep its code in the cache folder, and are ended
when nothing was asked for a while. Where one cannot start or fails, its kernel is compiled in this process.
"""

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from sparkinfer.machine import default_threads

_MOST = 4
_PACKAGES = Path(__file__).parents[2]
_PROGRAM = "from sparkinfer.backend.compile_worker import main; main()"
_PATIENCE = 5.0  # seconds without a kernel to compile, then a process is ended
_own = threading.local()  # each thread's process
_all: "set[subprocess.Popen[str]]" = set()
_lock = threading.RLock()  # of what follows and of `_all`
_abandoned = 0  # how often everything was given up


Wanted = list[tuple[Any, "Future[bool]"]]
Order = tuple[Wanted, Path, int]  # the last: `_abandoned` when it was given


@functools.cache
def _queue() -> "SimpleQueue[Order] | None":
    """What the processes take from, with a thread for each; None where one core has to do all."""
    cores, queue = min(_MOST, default_threads()), SimpleQueue[Order]()
    if cores < 2:
        return None
    for _ in range(cores):  # the end of the program waits for none of them
        threading.Thread(target=_serve, args=(queue,), name="compiling", daemon=True).start()
    return queue


def running() -> bool:
    """Whether some were asked for: then the next kernel need not bring the compiler into this process either."""
    return _queue.cache_info().currsize > 0 and _queue() is not None


def submit(origins: Sequence[Any], root: Path) -> "list[Future[bool]]":
    """Have the kernels of these origins compiled into `root` by one process, which compiles once what they share.

    Each result tells whether that was done. Nothing where nobody can.
    """
    queue = _queue()
    if queue is None:
        return []
    results: list[Future[bool]] = [Future() for _ in origins]
    queue.put((list(zip(origins, results, strict=True)), root, _abandoned))
    return results


def abandon() -> None:
    """Give up all that was asked for, at once: whoever waits for a result gets a CancelledError."""
    global _abandoned
    with _lock:
        _abandoned += 1
        for process in _all:
            process.kill()


def given_up(result: "Future[bool]") -> bool:
    """Whether this one was abandoned, and may be asked for again."""
    return result.done() and isinstance(result.exception(), CancelledError)


def _serve(queue: "SimpleQueue[Order]") -> None:
    """Life of a thread, which has a process of its own."""
    while True:
        idle = getattr(_own, "process", None) is not None
        try:
            wanted, root, since = queue.get(timeout=_PATIENCE if idle else None)
        except Empty:
            _end()
            continue
        for origin, result in wanted:
            try:
                result.set_result(_compile(origin, root, since))
            except BaseException as error:
                result.set_exception(error)


def _compile(origin: Any, root: Path, since: int) -> bool:
    for _ in range(2):  # a process may have been killed since the last one
        try:
            answer = _ask(_process(root, since), origin)
        except (OSError, ValueError):
            answer = None
        if answer is not None:
            return answer == "done"
        _end()
    return False


def _process(root: Path, since: int) -> "subprocess.Popen[str]":
    with _lock:
        if since != _abandoned:
            raise CancelledError
        process: subprocess.Popen[str] | None = getattr(_own, "process", None)
        if process is None:
            process = _own.process = _start(root)
            _all.add(process)
    return process


def _start(root: Path) -> "subprocess.Popen[str]":
    path = [str(_PACKAGES), *sys.path]
    start = f"import sys; sys.path[:] = {path!r}; {_PROGRAM}"
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", start, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # what fails is done again here, where it shows
        process_group=0 if sys.platform != "win32" else None,
        text=True,
    )


def _ask(process: "subprocess.Popen[str]", origin: Any) -> str | None:
    """The answer; None when the process is no more."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(origin) + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip() or None


def _end() -> None:
    process: subprocess.Popen[str] | None = getattr(_own, "process", None)
    _own.process = None
    if process is not None:
        process.kill()
        with suppress(OSError, ValueError):
            process.communicate()
        with _lock:
            _all.discard(process)
