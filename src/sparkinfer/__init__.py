"""Exact, fast, single-stream decoding of GGUF language models.

    from sparkinfer import Engine

    with Engine.load("model.gguf") as engine:
        print(engine.generate("Once upon a time", max_tokens=64).text)

Names are imported on first use, so `import sparkinfer` itself loads nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkinfer.decoding import SpeculationReport
    from sparkinfer.dflash.draft import load_draft
    from sparkinfer.engine import Conversation, Delta, Engine, Generation, Request, Result
    from sparkinfer.errors import SparkError
    from sparkinfer.models import load_target
    from sparkinfer.sampling import SamplingParams

    __version__: str

__all__ = [
    "Conversation",
    "Delta",
    "Engine",
    "Generation",
    "Request",
    "Result",
    "SamplingParams",
    "SparkError",
    "SpeculationReport",
    "__version__",
    "load_draft",
    "load_target",
]

_MODULES = {
    "Conversation": "sparkinfer.engine",
    "Delta": "sparkinfer.engine",
    "Engine": "sparkinfer.engine",
    "Generation": "sparkinfer.engine",
    "Request": "sparkinfer.engine",
    "Result": "sparkinfer.engine",
    "SamplingParams": "sparkinfer.sampling",
    "SparkError": "sparkinfer.errors",
    "SpeculationReport": "sparkinfer.decoding",
    "load_draft": "sparkinfer.dflash.draft",
    "load_target": "sparkinfer.models",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from sparkinfer.machine import own_version

        return own_version()
    if name not in _MODULES:
        raise AttributeError(f"module 'sparkinfer' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
