"""Which implementation of an op a backend gets. A missing one is an error that lists what there is."""

import importlib
from collections.abc import Callable
from typing import Any

from sparkinfer.errors import UnsupportedError

_MODULES = {"cpu": "cpu_impl", "cuda": "triton_impl"}


def select(op: str, backend: str, function: str = "record") -> Callable[..., Any]:
    """The `function` of `kernels/<op>/<implementation>`. Raises UnsupportedError for an unknown backend."""
    if backend not in _MODULES:
        raise UnsupportedError(
            f"op '{op}' has no implementation for backend '{backend}'; known: {', '.join(_MODULES)}"
        )
    module = importlib.import_module(f"sparkinfer.kernels.{op}.{_MODULES[backend]}")
    found: Callable[..., Any] = getattr(module, function)
    return found
