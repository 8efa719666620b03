"""Keys and values of the attention layers."""

from dataclasses import dataclass

import numpy as np

from sparkinfer.backend.base import HostMemory, Memory


@dataclass(frozen=True)
class KvShape:
    """`layers` attention layers; `item` bytes per entry (2: float16, 4: float32)."""

    layers: int
    kv_heads: int
    head_size: int
    item: int

    def plane_bytes(self, context: int) -> int:
        """Bytes of the keys (or values) of one kv head in one layer; positions come in tiles of 16."""
        return -(-context // 16) * 16 * self.head_size * self.item

    def n_bytes(self, context: int) -> int:
        return 2 * self.layers * self.kv_heads * self.plane_bytes(context)


class KvCache:
    """Memory for `context` positions. Pages are only taken from the system once positions are written."""

    def __init__(self, shape: KvShape, context: int, memory: Memory | None = None) -> None:
        """`memory`: of the backend whose kernels use it (default: the host's)."""
        memory = memory or HostMemory()
        self.plane_bytes = shape.plane_bytes(context)
        self._shape, self._memory = shape, memory
        planes = (shape.layers * shape.kv_heads, self.plane_bytes)
        self._keys, self._values = memory.zeros(planes, np.uint8), memory.zeros(planes, np.uint8)
        self.keys, self.values = memory.address(self._keys), memory.address(self._values)

    def clear(self, positions: int) -> None:
        """Write zeros to the first positions of every plane."""
        used = self._shape.plane_bytes(positions)
        for planes in (self._keys, self._values):
            planes[:, :used] = 0

    def drop(self, positions: int, used: int) -> None:
        """Forget the first `positions` (a multiple of 16) of `used` in every plane; the later ones move down."""
        assert positions % 16 == 0, positions
        first, end = self._shape.plane_bytes(positions), self._shape.plane_bytes(used)
        for planes in (self._keys, self._values):
            for plane in planes:
                plane[: end - first] = self._memory.copy(plane[first:end])
