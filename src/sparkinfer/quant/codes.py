"""The integer view of quantised blocks: what every block format turns into before a kernel repacks
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Codes:
    """Blocks as unsigned codes and their scales: `w = d * scales[g] * (q - zero) + m - dmin *
    mins[g]`.

    Shapes: `q` [n, block_size] in value order; `d` and `m` [n]; `scales` and `mins` [n, block_size
    / group_size]. A term whose array is None is absent. `m` is added as it is when `mins` is None
    (Q4_1, Q5_1); otherwise it is the scale of `mins` and their product is subtracted (Q2_K, Q4_K,
    Q5_K).
    """

    q: U8
    zero: int
    d: F16
    m: F16 | None = None
    scales: I8 | None = None
    mins: U8 | None = None
    group_size: int = 32

    def dequantize(self) -> F32:
        """Return the weights, float32 [n, block_size], rounded once per operation in the order
        written above.
        """
        n_blocks, block_size = self.q.shape
        groups = block_size // self.group_size
        values = self.q.astype(np.float32)
        if self.zero:
            values -= np.float32(self.zero)
        grouped = values.reshape(n_blocks, groups, self.group_size)
        scale = self.d.astype(np.float32)[:, None]
        if self.scales is not None:
            scale = scale * self.scales.astype(np.float32)
        grouped *= scale[:, :, None]
        if self.m is not None:
            offset = self.m.astype(np.float32)[:, None]
            if self.mins is None:
                grouped += offset[:, :, None]
            else:
                grouped -= (offset * self.mins.astype(np.float32))[:, :, None]
        return values
