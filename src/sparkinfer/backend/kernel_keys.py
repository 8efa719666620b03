"""Keys of Triton's compile cache that do not depend on which kernel is asked first.

A kernel's key covers the constants of the functions it calls, but Triton (3.6) takes them from what it knows of a
function before it has looked at it: nothing, if no other kernel called it earlier. Threads that compile side by side
then find other keys in every process, and compile again what is there.
"""

from types import ModuleType
from typing import Any


def settle_key(kernel: Any, settled: set[int]) -> str:
    """The key of a jitted function, after those of all it calls. `settled`: ids of functions that have theirs."""
    if id(kernel) not in settled:
        settled.add(id(kernel))
        for called in _mentioned(kernel.fn):
            settle_key(called, settled)
    return str(kernel.cache_key)


def _mentioned(function: Any) -> list[Any]:
    """Jitted functions whose name, or module and name, occur in a function's code, in their order there."""
    names = function.__code__.co_names
    known = [function.__globals__.get(name) for name in names]
    modules = [value for value in known if isinstance(value, ModuleType)]
    attributes = [getattr(module, name, None) for module in modules for name in names]
    return [value for value in known + attributes if _is_jitted(value)]


def _is_jitted(value: Any) -> bool:
    return hasattr(type(value), "cache_key") and hasattr(value, "fn")
