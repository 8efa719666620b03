"""Where output goes: the answer to standard output, everything else to standard error."""

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING

from sparkinfer.options import Options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_PIPE_WIDTH = 200
_REDRAW_SECONDS = 0.1
Report = Callable[[str, int, int], None]  # label, done, total
_open: "set[_Bars]" = set()  # what stands on the terminal


def settle_streams() -> None:
    """Make sure that all three standard streams are there, and take any text.

    A closed one leads nowhere. A terminal that has no letter for a character gets the character's number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
        elif (
            name == "stdout" and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict"
        ):
            stream.reconfigure(errors="backslashreplace")


def status(text: str) -> None:
    """Print one line for the person, never for the pipe. Nobody may be there to read it."""
    if "utf" not in (getattr(sys.stderr, "encoding", None) or "utf-8").lower():
        text = text.replace(" · ", " | ")
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def complain(message: str, traceback_of: BaseException | None) -> None:
    """Print `error: message` on one line, after a traceback where one is asked for."""
    if traceback_of is not None:
        traceback.print_exception(traceback_of)
    status(f"error: {' '.join(message.split())}")


def wants_traceback(arguments: Sequence[str]) -> bool:
    """Return whether --debug was given, also when the options themselves are what failed."""
    from sparkinfer.options import resolve

    if "--debug" in arguments:
        return True
    try:
        return resolve({}).boolean("debug")
    except Exception:  # the environment is what is being complained about
        return False


def screen() -> "Console":
    """Return a console on standard output; a pipe gets wide lines, as nothing there wraps."""
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Screen(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def write_answer(text: str) -> None:
    """Write a piece of the answer to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def quiet_output() -> None:
    """Let standard output go nowhere, so that the interpreter's last flush is silent."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def progress(options: Options) -> Iterator[Report]:
    """Yield a function that shows (label, done, total) as bars on standard error.

    Off a terminal nothing is shown, or each label once where the option `progress` is on.
    """
    wanted = options.text("progress")
    if wanted == "off" or (wanted == "auto" and not sys.stderr.isatty()):
        yield lambda _label, _done, _total: None
    elif sys.stderr.isatty():
        bars = _Bars()
        _open.add(bars)
        try:
            yield bars.show
        finally:
            _open.discard(bars)
            bars.close()
    else:
        seen: set[str] = set()
        yield lambda label, _done, _total: _first_time(label, seen)


def _first_time(label: str, seen: set[str]) -> None:
    if label not in seen:
        seen.add(label)
        status(f"{label} ...")


class _Bars:
    """Bars that appear with the first unfinished report, from any thread.

    No thread of their own draws them: it would take a core from what is measured.
    """

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._drawn = 0.0
        self._lock = Lock()

    def show(self, label: str, done: int, total: int) -> None:
        with self._lock:
            self._show(label, done, total)

    def _show(self, label: str, done: int, total: int) -> None:
        if label not in self._tasks:
            if done >= total:
                return
            self._bars = self._bars or self._start()
            self._tasks[label] = self._bars.add_task(label, total=total)
        assert self._bars is not None
        self._bars.update(self._tasks[label], completed=done, total=total)
        if done >= total or monotonic() - self._drawn > _REDRAW_SECONDS:
            self._bars.refresh()
            self._drawn = monotonic()

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _start(self) -> "Progress":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        text, share = TextColumn("{task.description}"), TextColumn("{task.percentage:3.0f}%")
        columns = (text, BarColumn(), share, TimeElapsedColumn())
        console = Console(stderr=True)
        bars = Progress(
            *columns,
            console=console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        bars.start()
        return bars


@contextmanager
def interrupt_ends_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process without waiting for anything; what was written is flushed already.

    The engine takes the first one for itself and gives this handler back for the second.
    """
    before = signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    with suppress(Exception):
        for bars in list(_open):
            bars.close()
    compiling = sys.modules.get("sparkinfer.backend.workers")
    if compiling is not None:
        compiling.abandon()
    os._exit(EXIT_INTERRUPTED)
