"""Convolution and delta-rule states of the recurrent layers, and the record of an uncommitted window."""

from typing import Any

from sparkinfer.backend.base import HostMemory, Memory
from sparkinfer.kernels.shapes import RecurrentShape


class RecurrentState:
    """The live state (`conv`, `delta`) and what a verified window recorded for a later commit.

    How the numbers of a head lie in `delta` is the kernels' affair.
    """

    def __init__(self, shape: RecurrentShape, memory: Memory | None = None) -> None:
        """`memory`: of the backend whose kernels use it (default: the host's)."""
        self._memory = memory = memory or HostMemory()
        layers, window, size = shape.layers, shape.window, shape.head_size
        self.conv = memory.zeros((layers, shape.taps - 1, shape.channels))
        self.delta = memory.zeros((layers, shape.value_heads, size // 16, size, 16))
        self.conv_record = memory.zeros((layers, window, shape.channels))
        self.key_record = memory.zeros((layers, window, shape.key_heads * size))
        self.delta_record = memory.zeros((layers, window, shape.value_heads * size))
        self.decay_record = memory.zeros((layers, window, shape.value_heads))
        arrays = (self.conv, self.delta, self.conv_record)
        records = (self.key_record, self.delta_record, self.decay_record)
        self.addresses = [memory.address(array) for array in (*arrays, *records)]

    def copy(self) -> tuple[Any, Any]:
        return self._memory.copy(self.conv), self._memory.copy(self.delta)

    def put(self, saved: tuple[Any, Any]) -> None:
        self.conv[:], self.delta[:] = saved

    def clear(self) -> None:
        self.conv[:] = 0
        self.delta[:] = 0
