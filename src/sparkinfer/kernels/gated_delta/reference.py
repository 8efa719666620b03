"""Numpy specification of `gated_delta`: the recurrence, token by token."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def gated_delta(
    q: Floats, k: Floats, v: Floats, alpha: Floats, beta: Floats, decay_rate: Floats, time_bias: Floats,
    state: Floats, eps: float,
) -> tuple[Floats, Floats]:  # fmt: skip
    """q, k rows x key_heads x n; v rows x value_heads x n; alpha, beta rows x value_heads; state value_heads x n x n.

    Returns out rows x value_heads x n and the new state.
    """
    rows, value_heads, n = v.shape
    key_heads = k.shape[1]
    s = state.astype(np.float64)
    out = np.empty((rows, value_heads, n))

    def unit(x: Floats) -> NDArray[np.float64]:
        return x / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + eps)

    q_unit, k_unit = unit(q) / np.sqrt(n), unit(k)
    for r in range(rows):
        decay = np.exp(decay_rate * np.logaddexp(0, alpha[r] + time_bias))
        gate = 1 / (1 + np.exp(-beta[r]))
        for i in range(value_heads):
            key, query = k_unit[r, i % key_heads], q_unit[r, i % key_heads]
            s[i] *= decay[i]
            delta = gate[i] * (v[r, i] - key @ s[i])
            s[i] += np.outer(key, delta)
            out[r, i] = query @ s[i]
    return out.astype(np.float32), s.astype(np.float32)
