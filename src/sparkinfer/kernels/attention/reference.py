"""Numpy specification of `attention`."""

import numpy as np
from numpy.typing import NDArray


def visible(
    position: int, rows: int, *, causal: bool = True, window: int = 0, first: int = 0
) -> NDArray[np.bool_]:
    """Which of the position + rows keys each row sees, bool [rows, position + rows]."""
    query = position + np.arange(rows)[:, None]
    key = np.arange(position + rows)[None, :]
    seen = np.broadcast_to(key >= first, (rows, position + rows)).copy()
    if causal:
        seen &= key <= query
    if window:
        seen &= np.abs(query - key) < window
    return seen


def attention(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    gate: NDArray[np.float32] | None = None,
    *,
    causal: bool = True,
    window: int = 0,
    first: int = 0,
) -> NDArray[np.float32]:
    """q rows x heads x size, k and v positions x kv_heads x size (the last `rows` positions are the rows)."""
    rows, heads, size = q.shape
    positions, kv_heads, _ = k.shape
    seen = visible(positions - rows, rows, causal=causal, window=window, first=first)
    out = np.empty((rows, heads, size), np.float64)
    for r in range(rows):
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = k[seen[r], g].astype(np.float64) @ q[r, h] / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            out[r, h] = weights @ v[seen[r], g] / weights.sum()
    if gate is not None:
        out /= 1 + np.exp(-gate.astype(np.float64))
    return out.astype(np.float32)
