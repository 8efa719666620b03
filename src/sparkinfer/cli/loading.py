"""From the flags of a verb to a loaded target or engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from sparkinfer.cli.console import Report, interrupt_ends_at_once, progress, status
from sparkinfer.errors import DeviceError, OptionError
from sparkinfer.options import Options

if TYPE_CHECKING:
    from sparkinfer.dflash.base import Draft
    from sparkinfer.engine import Engine
    from sparkinfer.models import Target


def activations(options: Options) -> Literal["int8", "f32"]:
    return "int8" if options.text("activations") == "int8" else "f32"


def load_engine(model: str, options: Options) -> "Engine":
    """Fetch the model if it has to be, and load it, both with progress bars."""
    from sparkinfer.engine import Engine
    from sparkinfer.pull import locate

    with progress(options) as report:
        path = locate(model, options.path("model_dir"), report)
        announce_compiling(options)
        with interrupt_ends_at_once():
            return Engine.load(
                path,
                context=options.integer("context"),
                threads=options.integer("threads"),
                activations=activations(options),
                draft=options.optional_path("draft"),
                spec=speculation(options),
                progress=report,
            )


def speculation(options: Options) -> Literal["auto", "on", "off"]:
    names: dict[str, Literal["auto", "on", "off"]] = {"auto": "auto", "on": "on", "off": "off"}
    return names[options.text("spec")]


def loaded_draft(engine: "Engine", options: Options) -> "Draft | None":
    """Return the draft that the engine was loaded with, None if there is none.

    Raises: OptionError if one was given and speculation is switched off.
    """
    from sparkinfer.dflash.loop import DFlashDecoder

    if isinstance(engine.decoder, DFlashDecoder):
        return engine.decoder.draft
    if options.optional_path("draft") is not None:
        origin = options.setting("spec").origin
        raise OptionError(f"spec=off ({origin}) leaves nothing to measure with a draft; use auto")
    return None


def announce_compiling(options: Options) -> None:
    """Say that the first run compiles, where this version has not compiled on this machine yet.

    Raises: DeviceError when the cache folder cannot be used.
    """
    from sparkinfer.backend.choose import why_no_gpu

    device = options.text("device")
    if device != "cpu" and not why_no_gpu(device):
        return
    from sparkinfer.backend.compiled import cache_folder, set_cache_root

    root = options.path("cache_dir")
    set_cache_root(root)
    try:
        folder = cache_folder()
        first = folder is None or not any(folder.iterdir())
    except OSError as error:
        reason = f"cannot use the cache folder {root}: {error.strerror}"
        raise DeviceError(f"{reason}; --cache-dir names another") from error
    if first and options.text("progress") != "off":
        status("first run: compiling for this CPU, once, which takes some seconds ...")


@contextmanager
def open_target(model: str, options: Options, report: Report, context: int) -> Iterator["Target"]:
    """Yield a loaded target whose states hold `context` tokens."""
    from sparkinfer.models import load_target
    from sparkinfer.pull import locate

    path = locate(model, options.path("model_dir"), report)
    announce_compiling(options)
    with interrupt_ends_at_once():
        target = load_target(
            path,
            context=max(1, context),
            threads=options.integer("threads"),
            activations=activations(options),
            progress=report,
        )
    try:
        yield target
    finally:
        target.close()
