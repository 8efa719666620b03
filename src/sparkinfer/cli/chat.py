"""`sparkinfer chat`: a conversation on the terminal, or one question a line from a pipe."""

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkinfer.cli.console import status, write_answer
from sparkinfer.cli.flags import LOADING, SPECULATION, ProcessFlags, verb
from sparkinfer.cli.run import NO_MODEL, decoded, show_plan, unicode_text
from sparkinfer.cli.sampling_flags import RequestFlags, RequestParts
from sparkinfer.cli.speculation import announce, show_stats
from sparkinfer.errors import OptionError, RequestError
from sparkinfer.options import Options

if TYPE_CHECKING:
    from sparkinfer.engine import Conversation, Engine, Result

HELP = """/help          this list
/reset         forget the conversation, keep the system message
/system TEXT   set the system message and start over; without TEXT show it
/plan          what was resolved for this machine
/stats         steps of the last answer, and what speculation did in it
/exit          leave (also /quit and Ctrl-D)
A line that ends in a backslash goes on in the next one. Ctrl-C ends an answer."""


@verb(
    RequestFlags(),
    ProcessFlags(*LOADING, *SPECULATION),
)
def command(
    *,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", help="A GGUF file, a known name or hf:user/repo[:quant]."),
    ] = None,
    system: Annotated[
        str | None, typer.Option("-sys", "--system", "--system-prompt", help="System message.")
    ] = None,
    print_plan: Annotated[
        bool, typer.Option("--print-plan", help="Show what was resolved for this machine.")
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--stats", help="After each answer, a table of its steps.")
    ] = False,
    request: RequestParts,
    options: Options,
) -> None:
    """Talk with a model; /help lists the commands."""
    from sparkinfer.cli.loading import load_engine

    if not model:
        raise OptionError(NO_MODEL)
    system = None if system is None else unicode_text(system, "the system message")
    with load_engine(model, options) as engine:
        if print_plan:
            show_plan(engine)
        announce(engine, options)
        Chat(engine, system, request, options, show_all=show_all).run()


class Chat:
    """The loop: a line is a command or a question."""

    def __init__(
        self,
        engine: "Engine",
        system: str | None,
        request: RequestParts,
        options: Options,
        *,
        show_all: bool = False,
    ) -> None:
        self._engine = engine
        self._last: Result | None = None
        self._show_all = show_all
        self._request = request
        self._options = options
        self._system = system
        self._conversation = self._new()
        self._done = False

    def run(self) -> None:
        if sys.stdin.isatty():
            status("/help lists the commands, /exit leaves")
        for line in read_lines():
            if not line.strip():
                continue
            if line.startswith("/"):
                self._command(line)
            else:
                self._ask(line)
            if self._done:
                return

    def _new(self) -> "Conversation":
        parts = self._request
        return self._engine.conversation(
            self._system, sampling=parts.sampling, max_tokens=parts.max_tokens, stop=parts.stop
        )

    def _ask(self, question: str) -> None:
        from sparkinfer.cli.answer import closing_line, stream

        def start(report: Callable[[int, int], None]) -> Any:
            return self._conversation.send(question, progress=report)

        try:
            result = stream(start, self._options)
        except RequestError as error:  # the conversation is as it was; the person decides
            status(f"error: {error}; /reset starts over")
            return
        write_answer("\n")
        status(closing_line(result, self._engine.speculation))
        self._last = result
        if self._show_all:
            show_stats(result)

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].strip().partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: status(HELP),
            "reset": lambda _: self._reset(),
            "system": self._set_system,
            "plan": lambda _: show_plan(self._engine),
            "stats": lambda _: self._stats(),
            "exit": lambda _: self._leave(),
            "quit": lambda _: self._leave(),
        }
        if name not in commands:
            status(f"unknown command /{name}; /help lists them")
        else:
            commands[name](rest.strip())

    def _stats(self) -> None:
        if self._last is None:
            status("no answer yet")
        else:
            show_stats(self._last)

    def _leave(self) -> None:
        self._done = True

    def _reset(self) -> None:
        self._conversation = self._new()
        status("conversation forgotten")

    def _set_system(self, text: str) -> None:
        if not text:
            status(self._system or "no system message set; the model's template may have its own")
            return
        self._system = text
        self._reset()


def read_lines() -> Iterator[str]:
    """Yield lines until the end of input; a trailing backslash joins a line with the next."""
    kept: list[str] = []
    while True:
        try:
            line = _input("... " if kept else "> ")
        except EOFError:
            if kept:
                yield "\n".join(kept)
            elif sys.stdin.isatty():
                status("")  # what comes next begins on a line of its own
            return
        except OptionError as error:
            status(f"error: {error}")
            kept = []
            continue
        except KeyboardInterrupt:  # at the prompt: drop the line
            status("")
            kept = []
            continue
        if line.endswith("\\"):
            kept.append(line[:-1])
            continue
        yield "\n".join([*kept, line])
        kept = []


def _input(prompt: str) -> str:
    """Read a line with editing and history on a terminal, plainly from a pipe.

    Raises: EOFError, OptionError for a line that is no UTF-8.
    """
    if sys.stdin.isatty():
        import readline  # noqa: F401  # gives input() editing and history

        try:
            return unicode_text(input(prompt), "the line")
        except UnicodeDecodeError as error:
            raise OptionError(f"the line is not UTF-8 text at byte {error.start}") from error
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return decoded(line.rstrip(b"\r\n"), "the line")
