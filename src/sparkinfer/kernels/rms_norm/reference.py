"""Numpy specification of `rms_norm`."""

import numpy as np
from numpy.typing import NDArray


def rms_norm(
    x: NDArray[np.float32], weight: NDArray[np.float32], eps: float
) -> NDArray[np.float32]:
    """x rows x n, weight [n]."""
    scale = 1 / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + eps)
    return (x * scale * weight).astype(np.float32)
