"""Keys and values of the attention layers."""

from dataclasses import dataclass

import numpy as np

from sparkinfer.backend.base import CacheFormat, HostMemory, Memory

BLOCK = 32  # values of a head at one position that share a scale in q8_0
_ITEM = {"f32": 4, "f16": 2, "q8_0": 1}  # bytes of a value, or of its code
_SCALE = 2


@dataclass(frozen=True)
class KvShape:
    """`layers` attention layers; `format` of the entries.

    q8_0: int8 codes, and for each `BLOCK` of a head's values at one position a float16 scale. In a plane (keys or
    values of one kv head in one layer) the scales follow all codes. The order of either is the backend's.
    """

    layers: int
    kv_heads: int
    head_size: int
    format: CacheFormat

    def _positions(self, context: int) -> int:
        """Whole tiles."""
        unit = 32 if self.format == "q8_0" else 16
        return -(-context // unit) * unit

    def code_bytes(self, context: int) -> int:
        """Bytes of a plane's entries, or of their codes: where the scales begin."""
        return self._positions(context) * self.head_size * _ITEM[self.format]

    def scale_bytes(self, context: int) -> int:
        """Bytes of a plane's scales; 0 where entries have none."""
        blocks = self.head_size // BLOCK if self.format == "q8_0" else 0
        return self._positions(context) * blocks * _SCALE

    def plane_bytes(self, context: int) -> int:
        """Bytes of the keys (or values) of one kv head in one layer."""
        return self.code_bytes(context) + self.scale_bytes(context)

    def n_bytes(self, context: int) -> int:
        return 2 * self.layers * self.kv_heads * self.plane_bytes(context)


class KvCache:
    """Memory for `context` positions. Pages are only taken from the system once positions are written."""

    def __init__(self, shape: KvShape, context: int, memory: Memory | None = None) -> None:
        """`memory`: of the backend whose kernels use it (default: the host's)."""
        memory = memory or HostMemory()
        self.format = shape.format
        self.plane_bytes = shape.plane_bytes(context)
        self._shape, self._memory, self._scales = shape, memory, shape.code_bytes(context)
        planes = (shape.layers * shape.kv_heads, self.plane_bytes)
        self._keys, self._values = memory.zeros(planes, np.uint8), memory.zeros(planes, np.uint8)
        self.keys, self.values = memory.address(self._keys), memory.address(self._values)

    def clear(self, positions: int) -> None:
        """Write zeros to the first positions of every plane."""
        codes, scales = self._shape.code_bytes(positions), self._shape.scale_bytes(positions)
        for planes in (self._keys, self._values):
            planes[:, :codes] = 0
            planes[:, self._scales : self._scales + scales] = 0

    def drop(self, positions: int, used: int) -> None:
        """Forget the first `positions` (a multiple of 16) of `used` in every plane; the later ones move down.

        Only of entries without scales: what drops is a draft's.
        """
        assert positions % 16 == 0 and self.format != "q8_0", (positions, self.format)
        first, end = self._shape.plane_bytes(positions), self._shape.plane_bytes(used)
        for planes in (self._keys, self._values):
            for plane in planes:
                plane[: end - first] = self._memory.copy(plane[first:end])
