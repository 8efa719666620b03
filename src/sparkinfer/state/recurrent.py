"""Convolution and delta-rule states of the recurrent layers, and the record of an uncommitted window."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend.base import aligned
from sparkinfer.kernels.shapes import RecurrentShape

Floats = NDArray[np.float32]


def _floats(*shape: int) -> Floats:
    return (
        aligned(4 * int(np.prod(shape)) + 64)[: 4 * int(np.prod(shape))]
        .view(np.float32)
        .reshape(shape)
    )


class RecurrentState:
    """The live state (`conv`, `delta`) and what a verified window recorded for a later commit."""

    def __init__(self, shape: RecurrentShape) -> None:
        layers, window, size = shape.layers, shape.window, shape.head_size
        self.conv = _floats(layers, shape.taps - 1, shape.channels)
        self.delta = _floats(layers, shape.value_heads, size // 16, size, 16)
        self.conv_record = _floats(layers, window, shape.channels)
        self.key_record = _floats(layers, window, shape.key_heads * size)
        self.delta_record = _floats(layers, window, shape.value_heads * size)
        self.decay_record = _floats(layers, window, shape.value_heads)

    def copy(self) -> tuple[Floats, Floats]:
        return self.conv.copy(), self.delta.copy()

    def put(self, saved: tuple[Any, Any]) -> None:
        self.conv[:], self.delta[:] = saved

    def clear(self) -> None:
        self.conv[:] = 0
        self.delta[:] = 0
