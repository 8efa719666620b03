"""Numpy specification of `gated_linear`."""

import numpy as np
from numpy.typing import NDArray


def gated_linear(
    x: NDArray[np.float32], gate: NDArray[np.float32], up: NDArray[np.float32]
) -> NDArray[np.float32]:
    """x rows x inputs, gate and up outputs x inputs; rows x outputs."""
    g = x.astype(np.float64) @ gate.T.astype(np.float64)
    u = x.astype(np.float64) @ up.T.astype(np.float64)
    return (g / (1 + np.exp(-g)) * u).astype(np.float32)
