"""Numpy specification of `attention`."""

import numpy as np
from numpy.typing import NDArray


def attention(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    gate: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """q rows x heads x size, k and v positions x kv_heads x size (the last `rows` positions are the rows)."""
    rows, heads, size = q.shape
    positions, kv_heads, _ = k.shape
    out = np.empty((rows, heads, size), np.float64)
    for r in range(rows):
        seen = positions - rows + r + 1
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = k[:seen, g].astype(np.float64) @ q[r, h] / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            out[r, h] = weights @ v[:seen, g] / weights.sum()
    if gate is not None:
        out /= 1 + np.exp(-gate.astype(np.float64))
    return out.astype(np.float32)
