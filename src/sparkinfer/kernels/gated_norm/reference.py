"""Numpy specification of `gated_norm`."""

import numpy as np
from numpy.typing import NDArray

from sparkinfer.kernels.rms_norm.reference import rms_norm


def gated_norm(
    x: NDArray[np.float32], gate: NDArray[np.float32], weight: NDArray[np.float32], eps: float
) -> NDArray[np.float32]:
    """x and gate rows x heads x n, weight [n]."""
    return (rms_norm(x, weight, eps) * (gate / (1 + np.exp(-gate.astype(np.float64))))).astype(
        np.float32
    )
