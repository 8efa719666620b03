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
        records = (self.conv_record, self.key_record, self.delta_record, self.decay_record)
        self._records = [memory.address(array) for array in records]
        self.live = [memory.address(array) for array in (self.conv, self.delta)]
        self._spare: tuple[Any, Any] | None = None

    @property
    def addresses(self) -> list[int]:
        """Of the live state (`live`) and the records, in the order of the run parameters."""
        return [*self.live, *self._records]

    def spare(self) -> list[int]:
        """Addresses of a second state, made when first asked for, which a run may leave instead (`change_places`)."""
        if self._spare is None:
            memory = self._memory
            self._spare = memory.zeros(self.conv.shape), memory.zeros(self.delta.shape)
        return [self._memory.address(array) for array in self._spare]

    def change_places(self) -> None:
        """The spare state becomes the live one."""
        addresses, spare = self.spare(), self._spare
        assert spare is not None
        self._spare = self.conv, self.delta
        self.conv, self.delta = spare
        self.live = addresses

    def copy(self) -> tuple[Any, Any]:
        return self._memory.copy(self.conv), self._memory.copy(self.delta)

    def put(self, saved: tuple[Any, Any]) -> None:
        self._memory.join()
        self.conv[:], self.delta[:] = saved

    def clear(self) -> None:
        self._memory.join()
        self.conv[:] = 0
        self.delta[:] = 0
