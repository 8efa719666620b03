"""`sparkinfer options`: every process option, its value here and where the value came from."""

from typing import Annotated

import typer

from sparkinfer.cli.console import screen
from sparkinfer.cli.flags import ProcessFlags, verb
from sparkinfer.options import OPTIONS, Options, markdown

_ALL = ProcessFlags(*(option.name for option in OPTIONS))


@verb(_ALL)
def command(
    *,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/options.md instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    options: Options,
) -> None:
    """Show every process option: value, origin, flag and environment name."""
    if as_markdown:
        print(markdown(), end="")
    elif as_json:
        import json

        print(json.dumps(options.block(), indent=2))
    else:
        _print_table(options)


def _print_table(options: Options) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("option", "value", "from", "flag", "environment"):
        table.add_column(title, overflow="fold")
    for setting in options.settings():
        option = setting.option
        value = option.default_text if setting.value is None else _shown(setting.value)
        table.add_row(option.name, value, setting.origin, option.flag[-1], option.env)
    screen().print(table)


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
