"""The program: verbs, and what every error becomes (one line, one exit code)."""

import sys
from collections.abc import Sequence
from typing import Annotated

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
from sparkinfer.cli.console import EXIT_INTERRUPTED, complain, wants_traceback
from sparkinfer.errors import SparkError

EXIT_USAGE = 2
EXIT_INTERNAL = 70
EXIT_MEMORY = 71

app = typer.Typer(
    name="sparkinfer",
    help="Exact, fast decoding of GGUF language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (run, chat, bench, train, check, inspect, pull, options, doctor, verify):
    app.command(module.__name__.rpartition(".")[2])(module.command)
app.add_typer(evaluate.app, name="eval")


def _show_version(wanted: bool) -> None:
    if wanted:
        from sparkinfer.machine import own_version

        print(f"sparkinfer {own_version()}")
        raise typer.Exit


@app.callback()
def _program(
    show: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Exact, fast decoding of GGUF language models."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code (docs/architecture.md lists them)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = app(args=arguments, prog_name="sparkinfer", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except Exception as error:
        code, message = _verdict(error)
        if message:
            complain(message, error if wants_traceback(arguments) else None)
        return code


def _verdict(error: Exception) -> tuple[int, str]:
    """Return the exit code and the line for an error; no line where typer has printed the help."""
    if isinstance(error, SparkError):
        return error.exit_code, str(error)
    if isinstance(error, typer.TyperException):
        return EXIT_USAGE, _usage_message(error)
    if isinstance(error, MemoryError):
        return EXIT_MEMORY, f"out of memory: {str(error) or 'an allocation failed'}"
    return EXIT_INTERNAL, f"internal, please report it: {type(error).__name__}: {error}"


def _usage_message(error: typer.TyperException) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    text = text.replace("(Possible options:", "(nearest:")
    return text[:1].lower() + text[1:]
