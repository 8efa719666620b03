"""What kernels are written with: functions that only compiled code calls, and instructions that emit LLVM themselves.

Both are plain objects until a kernel that uses them is compiled: Numba is imported then and not before, so a start that
finds its code in the cache never waits for it. Numba asks an object that it does not know for `_numba_type_`.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

WORD, INT, FLOAT, VECTOR, NOTHING = "int64", "int32", "float32", "f32x16", "void"


class Inner:
    """A function that only compiled code calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.compiler: Any = None  # Numba's, where it was asked for
        functools.update_wrapper(self, function)

    @functools.cached_property
    def _numba_type_(self) -> Any:
        from sparkinfer.backend.frontend import type_of_inner

        return type_of_inner(self)

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.function.__qualname__} is only for compiled code")


class Instruction:
    """A call that `emit(builder, *values)` writes in LLVM: `result` and `params` name its types.

    The first `literals` parameters are whole numbers that are known where the call stands; `emit` gets them as `int`.
    """

    def __init__(
        self, emit: Callable[..., Any], result: str, params: tuple[str, ...], literals: int = 0
    ) -> None:
        self.emit, self.result, self.params, self.literals = emit, result, params, literals
        functools.update_wrapper(self, emit)

    @functools.cached_property
    def _numba_type_(self) -> Any:
        from sparkinfer.backend.frontend import type_of_instruction

        return type_of_instruction(self)

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.emit.__qualname__} is only for compiled code")


def inner(function: _F) -> _F:
    """For functions that only compiled code calls."""
    made: Any = Inner(function)
    return made  # type: ignore[no-any-return]


def instruction(
    result: str, *params: str, literals: int = 0
) -> Callable[[Callable[..., Any]], Any]:
    """Declare an `Instruction`: `literals` whole numbers come before values of the types `params`."""
    return lambda emit: Instruction(emit, result, params, literals)
