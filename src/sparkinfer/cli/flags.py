"""Flags that several verbs share, added to a verb's own by the decorator `verb`."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import typer

from sparkinfer.options import OPTIONS, Option, configure

_ALWAYS = ("model_dir", "progress", "debug")
LOADING = (
    "threads",
    "context",
    "activations",
    "kv_cache",
    "head_screen",
    "isa",
    "device",
    "cache_dir",
)
DRAFTING = ("draft", "dflash_rows", "dflash_block", "dflash_compact_verify")
SPECULATION = (*DRAFTING, "spec", "dflash_proposals", "dflash_accept")


@dataclass(frozen=True, slots=True)
class Flag:
    """One command-line flag: `name` is the keyword, `type` what typer parses it to."""

    name: str
    type: Any
    default: Any
    flags: tuple[str, ...]
    help: str
    panel: str
    metavar: str | None = None

    def parameter(self) -> inspect.Parameter:
        option = typer.Option(
            *self.flags,
            help=self.help,
            rich_help_panel=self.panel,
            metavar=self.metavar,
            show_default=not (self.default is None or self.default is False or self.default == []),
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self.default,
            annotation=Annotated[self.type, option],
        )


class Group(Protocol):
    """Flags that become one argument of the verb."""

    argument: str

    @property
    def flags(self) -> tuple[Flag, ...]: ...

    def collect(self, values: dict[str, Any]) -> object:
        """Turn the flags' values into the argument."""


class ProcessFlags:
    """The flags of the named process options, plus those every verb has; argument `options`."""

    argument = "options"

    def __init__(self, *names: str) -> None:
        self.flags = tuple(_flag(o) for o in OPTIONS if o.name in (*names, *_ALWAYS))

    def collect(self, values: dict[str, Any]) -> object:
        return configure(values)


def _flag(option: Option) -> Flag:
    """Return the option's flag; the option table checks the value, as for the environment."""
    words = f"{option.doc} Default: {option.default_text}."
    if option.type is bool:
        return Flag(option.name, bool | None, None, option.flag, option.doc, "Process")
    metavar = f"<{'|'.join(option.choices) or option.type.__name__.lower()}>"
    return Flag(option.name, str | None, None, option.flag, words, "Process", metavar)


def verb(*groups: Group) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Add the groups' flags to a verb. The verb returns its exit code, None for 0."""

    def decorate(function: Callable[..., int | None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**values: Any) -> None:
            for group in groups:
                own = {flag.name: values.pop(flag.name) for flag in group.flags}
                values[group.argument] = group.collect(own)
            raise typer.Exit(function(**values) or 0)

        _set_signature(command, function, groups)
        return command

    return decorate


def _set_signature(
    command: Callable[..., None], function: Callable[..., Any], groups: tuple[Group, ...]
) -> None:
    """Give `command` the verb's own parameters, less the collected ones, and the groups' flags."""
    collected = {group.argument for group in groups}
    own = inspect.signature(function).parameters.values()
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name not in collected]
    parameters += [flag.parameter() for group in groups for flag in group.flags]
    del command.__wrapped__  # type: ignore[attr-defined]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
