"""The one table of process options, and the only reader of the environment.

A value comes from the command line, else from the environment, else from the table; an unknown
`SPARKINFER_` name or a value outside its bounds is an error, never ignored. A request's own
parameters (temperature, stop, ...) are `SamplingParams`; a model file's are `ModelConfig`.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from sparkinfer.errors import OptionError
from sparkinfer.machine import default_threads

PREFIX = "SPARKINFER_"
Value = int | bool | str | Path | None
Origin = Literal["flag", "env", "default"]


def _cache_dir() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("sparkinfer", appauthor=False)


def _model_dir() -> Path:
    from platformdirs import user_data_path

    return user_data_path("sparkinfer", appauthor=False) / "models"


@dataclass(frozen=True, slots=True)
class Option:
    """One row. A default may be a function, called by `resolve`; `shown` describes it."""

    name: str
    type: type[int] | type[bool] | type[str] | type[Path]
    default: Value | Callable[[], Value]
    flag: tuple[str, ...]
    doc: str
    choices: tuple[str, ...] = ()
    bounds: tuple[int, int] | None = None
    shown: str = ""

    @property
    def env(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def accepted(self) -> str:
        """What a value may be, in words; a choice that ends in N stands for any number there."""
        if self.choices:
            return " | ".join(self.choices)
        if self.bounds:
            return f"a whole number from {self.bounds[0]} to {self.bounds[1]}"
        return {bool: "on | off", Path: "a path"}.get(self.type, self.type.__name__)

    @property
    def default_text(self) -> str:
        if self.type is bool:
            return "on" if self.default else "off"
        return self.shown or str(self.default)


OPTIONS: tuple[Option, ...] = (
    Option(
        "threads",
        int,
        default_threads,
        ("-t", "--threads"),
        "Compute threads.",
        bounds=(1, 256),
        shown="the physical cores this process may use",
    ),
    Option(
        "context",
        int,
        None,
        ("-c", "--context", "--ctx-size"),
        "Tokens a sequence may hold, prompt and answer together; memory is set aside for them.",
        bounds=(1, 2**24),
        shown="the model's own, at most 8192",
    ),
    Option(
        "activations",
        str,
        "int8",
        ("--activations",),
        "Number format of activations in products with quantised weights.",
        choices=("int8", "f32"),
    ),
    Option(
        "kv_cache",
        str,
        "auto",
        ("--kv-cache",),
        "Number format of the target's keys and values; q8_0 takes about half of f16's memory, and answers may differ."
        " auto is f32 with activations f32, else f16.",
        choices=("auto", "f32", "f16", "q8_0"),
    ),
    Option(
        "head_screen",
        bool,
        True,
        ("--head-screen/--no-head-screen",),
        "Find greedy decoding's largest logit with a 4-bit copy of a head of 6 bits and more (CPU): the same tokens.",
    ),
    Option(
        "isa",
        str,
        "auto",
        ("--isa",),
        "Instruction set of the compiled CPU code; auto takes the best this CPU has.",
        choices=("auto", "vnni512", "avx2", "portable"),
    ),
    Option(
        "device",
        str,
        "auto",
        ("--device",),
        "Where models run; auto takes the NVIDIA GPU where one can be used, else the CPU. cuda is the first GPU.",
        choices=("auto", "cpu", "cuda", "cuda:N"),
    ),
    Option(
        "draft",
        Path,
        None,
        ("-md", "--model-draft", "--draft"),
        "Draft model for speculative decoding: a GGUF file or a folder with config.json and safetensors.",
        shown="the one that comes with this package for the model, if there is one",
    ),
    Option(
        "spec",
        str,
        "auto",
        ("--spec",),
        "Speculation: auto takes plain steps where they are faster, on drafts in every step, off never.",
        choices=("auto", "on", "off"),
    ),
    Option(
        "dflash_proposals",
        int,
        0,
        ("--draft-max",),
        "Tokens drafted in every step; 0 leaves the number to the planner.",
        bounds=(0, 15),
    ),
    Option(
        "dflash_rows",
        bool,
        True,
        ("--dflash-rows/--no-dflash-rows",),
        "Verify wide windows in one row-batched pass; off verifies them one row at a time.",
    ),
    Option(
        "dflash_compact_verify",
        int,
        2,
        ("--dflash-compact-verify",),
        "The path for windows of at most 4 rows: 0 off, 1 the only one (no wider windows), 2 where it is the fastest.",
        bounds=(0, 2),
    ),
    Option(
        "dflash_block",
        str,
        "trained",
        ("--dflash-block",),
        "Rows of a draft's block: as many as in training, or of the depth in use: cheaper, but other proposals.",
        choices=("trained", "depth"),
    ),
    Option(
        "dflash_accept",
        str,
        "match",
        ("--dflash-accept",),
        "With a temperature: match gives plain decoding's tokens for the same seed, rejection the same distribution.",
        choices=("match", "rejection"),
    ),
    Option(
        "cache_dir",
        Path,
        _cache_dir,
        ("--cache-dir",),
        "Compiled code and measurements; safe to delete.",
        shown="the user's cache folder",
    ),
    Option(
        "model_dir",
        Path,
        _model_dir,
        ("--model-dir",),
        "Where pulled models are kept.",
        shown="the user's data folder",
    ),
    Option(
        "progress",
        str,
        "auto",
        ("--progress",),
        "Progress bars on standard error; auto shows them on a terminal.",
        choices=("auto", "on", "off"),
    ),
    Option(
        "debug",
        bool,
        False,
        ("--debug",),
        "Show a traceback with an error.",
    ),
)
_BY_NAME = {option.name: option for option in OPTIONS}


@dataclass(frozen=True, slots=True)
class Setting:
    """An option's value in this process, and where it came from."""

    option: Option
    value: Value
    origin: Origin


class Options:
    """All options, resolved once; asking for a name or a type that the table lacks is a bug."""

    def __init__(self, settings: tuple[Setting, ...]) -> None:
        self._settings = {setting.option.name: setting for setting in settings}

    def settings(self) -> tuple[Setting, ...]:
        return tuple(self._settings.values())

    def setting(self, name: str) -> Setting:
        return self._settings[name]

    def integer(self, name: str) -> int | None:
        value = self._settings[name].value
        assert value is None or isinstance(value, int)
        return value

    def text(self, name: str) -> str:
        value = self._settings[name].value
        assert isinstance(value, str)
        return value

    def boolean(self, name: str) -> bool:
        value = self._settings[name].value
        assert isinstance(value, bool)
        return value

    def path(self, name: str) -> Path:
        value = self.optional_path(name)
        assert value is not None
        return value

    def optional_path(self, name: str) -> Path | None:
        value = self._settings[name].value
        assert value is None or isinstance(value, Path)
        return value

    def block(self) -> dict[str, dict[str, int | str | bool | None]]:
        """Return name -> value and origin, as benchmark lines and receipts carry it."""
        return {
            name: {
                "value": str(s.value) if isinstance(s.value, Path) else s.value,
                "origin": s.origin,
            }
            for name, s in self._settings.items()
        }


_flags: dict[str, Value] = {}  # of this process


def resolve(flags: Mapping[str, Value], environ: Mapping[str, str] | None = None) -> Options:
    """Return every option's value: flag, else the process's flag, else environment, else default.

    flags: option name -> value, None where none was given. `environ` (for tests) stands for
    all of the process: its flags and its environment.
    Raises: OptionError on an unknown `SPARKINFER_` name or a value that is not accepted.
    """
    given = _given(flags)
    if environ is None:
        environ, given = os.environ, {**_flags, **given}
    _refuse_unknown(environ)
    return Options(tuple(_setting(option, given, environ) for option in OPTIONS))


def _given(flags: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in flags.items() if value is not None}


def _setting(option: Option, flags: Mapping[str, Value], environ: Mapping[str, str]) -> Setting:
    if option.name in flags:
        return Setting(option, _checked(option, flags[option.name], option.flag[-1]), "flag")
    if text := environ.get(option.env):
        return Setting(option, _checked(option, text, option.env), "env")
    default = option.default() if callable(option.default) else option.default
    return Setting(option, default, "default")


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = [option.env for option in OPTIONS]
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise OptionError(
                f"unknown environment variable {name}; nearest is {near}"
                " ('sparkinfer options' lists all)"
            )


def _checked(option: Option, value: Value, source: str) -> Value:
    """Return `value` in the option's type. Raises: OptionError with source and what is accepted."""
    parsed = _parsed(option, value)
    fits = parsed is not None
    if fits and option.choices:
        fits = any(_is_choice(str(parsed), choice) for choice in option.choices)
    if fits and option.bounds and isinstance(parsed, int):
        fits = option.bounds[0] <= parsed <= option.bounds[1]
    if not fits:
        raise OptionError(f"{source}={value} is not accepted; expected {option.accepted}")
    return parsed


def _is_choice(text: str, choice: str) -> bool:
    head, number = choice.removesuffix("N"), text.removeprefix(choice.removesuffix("N"))
    if head == choice:
        return text == choice
    return text.startswith(head) and number.isascii() and number.isdigit() and len(number) < 4


def _parsed(option: Option, value: Value) -> Value:
    """Return the value in the option's type, None where it cannot be."""
    text = str(value).strip()
    if not text:
        return None
    if option.type is int:
        return int(text) if text.isascii() and text.removeprefix("-").isdigit() else None
    if option.type is bool:
        words = {"1": True, "true": True, "yes": True, "on": True}
        words |= {"0": False, "false": False, "no": False, "off": False}
        return words.get(text.lower())
    return _path(text) if option.type is Path else text


def _path(text: str) -> Path | None:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~name of no user
        return None


def configure(flags: Mapping[str, Value]) -> Options:
    """Resolve this process's options; its flags hold for every later `resolve`.

    The command line calls it once, before anything asks for an option.
    """
    _flags.clear()
    _flags.update(_given(flags))
    return resolve({})


def compiler_setting(name: str) -> str | None:
    """Return a setting of the CPU's compiler, Numba, that the environment holds; None where it is not set."""
    return os.environ.get(f"NUMBA_{name}") or None


def child_environment(**extra: str) -> dict[str, str]:
    """Return the environment for a child process, with `extra` on top."""
    return {**os.environ, **extra}


def markdown() -> str:
    """Return docs/options.md."""
    rows = "\n".join(
        f"| `{option.name}` | `{', '.join(option.flag)}` | `{option.env}` "
        f"| {option.accepted.replace('|', 'or')} | {option.default_text} | {option.doc} |"
        for option in OPTIONS
    )
    return f"""# Process options

Written by `make options-doc` from the table in `src/sparkinfer/options.py`; a test compares them.
A flag beats the environment, the environment beats the default. `sparkinfer options` shows each
value and where it came from. An unknown `{PREFIX}` name is an error.

| Option | Flag | Environment | Accepted | Default | What it does |
|---|---|---|---|---|---|
{rows}
"""
