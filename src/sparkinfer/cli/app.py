"""The program: verbs, and what every error becomes (one line, one exit code)."""

import errno
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from sparkinfer.cli import (
    bench,
    chat,
    check,
    doctor,
    evaluate,
    inspect,
    options,
    pull,
    run,
    train,
    verify,
)
from sparkinfer.cli.console import (
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    complain,
    quiet_output,
    settle_streams,
    status,
    wants_traceback,
)
from sparkinfer.cli.foreign import refuse_foreign
from sparkinfer.errors import SparkError

EXIT_UNAVAILABLE = 69
EXIT_INTERNAL = 70
EXIT_MEMORY = 71
EXIT_CLOSED_PIPE = 141
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)

app = typer.Typer(
    name="sparkinfer",
    help="Exact, fast decoding of GGUF language models.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,  # its tables cut the names of options short on a terminal of 80 columns
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module, brief in (
    (run, "Answer one prompt."),
    (chat, "Talk with a model."),
    (bench, "Measure this machine, plainly or with a draft."),
    (train, "Train a draft for a model."),
    (check, "Compare a draft's output with plain decoding's."),
    (inspect, "Show what is in a model file."),
    (pull, "Fetch a model and print its path."),
    (options, "Show every process option and where it came from."),
    (doctor, "Check the machine and the set-up."),
    (verify, "Check the receipt of an evaluation."),
):
    app.command(module.__name__.rpartition(".")[2], short_help=brief)(module.command)
app.add_typer(evaluate.app, name="eval", short_help="Compare two builds: is one faster, and right?")


def _show_version(wanted: bool) -> None:
    if wanted:
        from sparkinfer.machine import own_version

        print(f"sparkinfer {own_version()}")
        raise typer.Exit


@app.callback()
def _program(
    context: typer.Context,
    show: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Exact, fast decoding of GGUF language models."""
    if context.invoked_subcommand is None:
        status(context.get_help())
        raise typer.Exit(EXIT_USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code (docs/architecture.md lists them)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    settle_streams()
    try:
        refuse_foreign(arguments)
        code = app(args=arguments, prog_name="sparkinfer", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit) as end:
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        quiet_output()  # typer has an exit of its own for it
        return EXIT_CLOSED_PIPE
    except Exception as error:
        code, message = _verdict(error)
        if message:
            complain(message, error if wants_traceback(arguments) else None)
        return code


def _verdict(error: Exception) -> tuple[int, str]:
    """Return the exit code and the line for an error; no line where typer has printed the help."""
    if isinstance(error, SparkError):
        return error.exit_code, str(error)
    if isinstance(error, typer.BadParameter):
        return EXIT_USAGE, _lower(_value_message(error))
    if isinstance(error, typer.TyperException):
        return EXIT_USAGE, _lower(_usage_message(error))
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        quiet_output()
        return EXIT_UNAVAILABLE, f"cannot write {error.filename or 'the output'}: {error.strerror}"
    if isinstance(error, MemoryError):
        return EXIT_MEMORY, f"out of memory: {str(error) or 'an allocation failed'}"
    return EXIT_INTERNAL, f"internal, please report it: {type(error).__name__}: {error}"


def _usage_message(error: typer.TyperException) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    text = text.replace("(Possible options:", "(nearest:")
    context = getattr(error, "ctx", None)
    if "unexpected extra argument" in text and context and context.info_name == "run":
        text += "; a prompt of several words needs quotes"
    return text


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _value_message(error: typer.BadParameter) -> str:
    """The value and what would be accepted, as typer's validator knows them."""
    cause: Any = error.__cause__ or error.__context__
    found = cause.errors()[0] if hasattr(cause, "errors") else {}
    text = " ".join(error.format_message().split()).rstrip(".")
    if "input" not in found:
        return text
    head, expected = (
        text.split(": Input should be ")[0],
        error.message.removeprefix("Input should be "),
    )
    expected = expected.partition(", unable")[0]
    return f"{head}: {found['input']!r}; expected {expected}"
