"""Named buffers that the tapes of one target share: a width only uses the first rows of each."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from sparkinfer.backend.base import Activation, Backend, Buffer

T = TypeVar("T")


class Workspace:
    """Buffers for up to `rows` rows, made when first asked for."""

    def __init__(self, backend: Backend, rows: int) -> None:
        self.backend, self.rows = backend, rows
        self._buffers: dict[str, Any] = {}

    def buffer(self, name: str, width: int, dtype: Any = np.float32, *, per_row: int = 1) -> Buffer:
        """Shared rows of `width` elements, `per_row` of them for each row of the run."""
        return self._kept(
            f"{name} {width}", lambda: self.backend.buffer(self.rows * per_row, width, dtype)
        )

    def single(self, name: str, width: int, dtype: Any) -> Buffer:
        """One row of `width` elements, whatever the number of rows."""
        return self._kept(f"{name} {width}", lambda: self.backend.buffer(1, width, dtype))

    def activation(
        self, name: str, width: int, *, quantised: bool, private: bool, per_row: int = 1
    ) -> Activation:
        """The input of a matrix product; `private` gives each thread its copy (for results of a prologue)."""
        rows = self.rows * per_row
        key = f"{name} {width} {quantised} {private}"
        return self._kept(
            key, lambda: self.backend.activation(rows, width, quantised=quantised, private=private)
        )

    def _kept(self, key: str, make: Callable[[], T]) -> T:
        if key not in self._buffers:
            self._buffers[key] = make()
        kept: T = self._buffers[key]
        return kept
