"""Processes that compile kernels, side by side: Numba holds the interpreter of the one it runs in all the while.

They start when several kernels are missing, take one after the other, keep its code in the cache folder, and end by
themselves when nothing was asked for a while. Where one cannot start or fails, its kernel is compiled in this process.
"""

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from sparkinfer.machine import default_threads

_MOST = 4
_PACKAGES = Path(__file__).parents[2]
_PROGRAM = "from sparkinfer.backend.compile_worker import main; main()"
_own = threading.local()  # each thread's process


Wanted = list[tuple[Any, "Future[bool]"]]


@functools.cache
def _queue() -> "SimpleQueue[tuple[Wanted, Path]] | None":
    """What the processes take from, with a thread for each; None where one core has to do all."""
    cores, queue = min(_MOST, default_threads()), SimpleQueue[tuple[Wanted, Path]]()
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
    queue.put((list(zip(origins, results, strict=True)), root))
    return results


def _serve(queue: "SimpleQueue[tuple[Wanted, Path]]") -> None:
    """Life of a thread, which has a process of its own."""
    while True:
        wanted, root = queue.get()
        for origin, result in wanted:
            try:
                result.set_result(_compile(origin, root))
            except BaseException as error:
                result.set_exception(error)


def _compile(origin: Any, root: Path) -> bool:
    for _ in range(2):  # a process may have ended since the last one
        try:
            answer = _ask(_process(root), origin)
        except (OSError, ValueError):
            answer = None
        if answer is not None:
            return answer == "done"
        _end()
    return False


def _process(root: Path) -> "subprocess.Popen[str]":
    process: subprocess.Popen[str] | None = getattr(_own, "process", None)
    if process is None:
        path = [str(_PACKAGES), *sys.path]
        start = f"import sys; sys.path[:] = {path!r}; {_PROGRAM}"
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", start, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what fails is done again here, where it shows
            process_group=0 if sys.platform != "win32" else None,
            text=True,
        )
        _own.process = process
    return process


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
