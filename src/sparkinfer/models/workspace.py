"""Named buffers that the tapes of one target share: a width only uses the first rows of each."""

from typing import Any

import numpy as np

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cpu import PROLOGUE_ROWS, CpuBackend


class Workspace:
    """Buffers for up to `rows` rows, made when first asked for."""

    def __init__(self, backend: CpuBackend, rows: int) -> None:
        self.backend, self.rows = backend, rows
        self._buffers: dict[str, Any] = {}

    def buffer(self, name: str, width: int, dtype: Any = np.float32) -> Buffer:
        """Shared rows of `width` elements."""
        key = f"{name} {width}"
        if key not in self._buffers:
            self._buffers[key] = self.backend.buffer(self.rows, width, dtype)
        buffer: Buffer = self._buffers[key]
        return buffer

    def activation(self, name: str, width: int, *, quantised: bool, private: bool) -> Activation:
        """The input of a matrix product; `private` gives each thread its copy (for results of a prologue)."""
        key = f"{name} {width} {quantised} {private}"
        if key not in self._buffers:
            rows = min(self.rows, PROLOGUE_ROWS) if private else self.rows
            self._buffers[key] = self.backend.activation(rows, width, quantised=quantised, private=private)
        activation: Activation = self._buffers[key]
        return activation
