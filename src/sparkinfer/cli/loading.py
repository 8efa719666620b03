"""From the flags of a verb to a loaded target or engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from sparkinfer.cli.console import Report, progress
from sparkinfer.options import Options

if TYPE_CHECKING:
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
        return Engine.load(
            path,
            context=options.integer("context"),
            threads=options.integer("threads"),
            activations=activations(options),
            progress=report,
        )


@contextmanager
def open_target(model: str, options: Options, report: Report, context: int) -> Iterator["Target"]:
    """Yield a loaded target whose states hold `context` tokens."""
    from sparkinfer.models import load_target
    from sparkinfer.pull import locate

    path = locate(model, options.path("model_dir"), report)
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
