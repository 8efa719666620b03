"""Rows of a matrix in a file, expanded one by one: an embedding table."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.quant.formats import QUANT_FORMATS, dequantize

_KEPT_ROWS = 2048  # expanded rows


@dataclass(frozen=True)
class Table:
    """`rows` uint8 [n, row bytes]. The latest expanded rows are kept: text repeats its tokens, and expanding one takes
    0.1 ms while the caches are full of weights.
    """

    type_name: str
    rows: NDArray[np.uint8]
    _kept: dict[int, NDArray[np.float32]] = field(default_factory=dict, repr=False, compare=False)
    _held: dict[int, NDArray[np.float32]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def width(self) -> int:
        """Numbers of a row."""
        spec = QUANT_FORMATS[self.type_name]
        return int(self.rows.shape[1] // spec.block_bytes * spec.block_size)

    def row(self, index: int) -> NDArray[np.float32]:
        """One row, float32 [width]."""
        found = self._kept.get(index)
        return self._expand([index])[index] if found is None else found

    def write(self, ids: Sequence[int], out: NDArray[np.float32]) -> None:
        """Write the rows of `ids` to the first rows of `out`, [n, width]."""
        kept = self._kept
        missing = list({index for index in ids if index not in kept})
        if missing:
            kept = self._expand(missing)
        for place, index in enumerate(ids):
            out[place] = kept[index] if index in kept else self.row(index)

    def hold(self, ids: NDArray[np.int64]) -> None:
        """Keep these rows for good, expanded now."""
        self._held.update(zip(ids.tolist(), self.take(ids), strict=True))
        self._kept.update(self._held)

    def take(self, ids: Any) -> NDArray[np.float32]:
        """Some rows (a list or a slice) as float32 [n, width]; nothing is kept."""
        block = QUANT_FORMATS[self.type_name].block_bytes
        rows = self.rows[ids]
        values = dequantize(self.type_name, rows.reshape(-1, block))
        return np.asarray(values, np.float32).reshape(len(rows), -1)

    def _expand(self, ids: list[int]) -> dict[int, NDArray[np.float32]]:
        """Keep these rows too; when that is too many, these and the held ones only."""
        if len(self._kept) - len(self._held) + len(ids) > _KEPT_ROWS:
            self._kept.clear()
            self._kept.update(self._held)
        self._kept.update(zip(ids, self.take(ids), strict=True))
        return self._kept
