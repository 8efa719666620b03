"""Numpy specification of `block_conv`."""

import numpy as np
from numpy.typing import NDArray


def block_conv(
    x: NDArray[np.float32], deltas: NDArray[np.float32], base: NDArray[np.float32]
) -> NDArray[np.float32]:
    """x rows x channels, deltas rows x taps x groups and base taps x channels of one side; rows x channels."""
    rows, channels = x.shape
    taps, groups = deltas.shape[1:]
    out = np.zeros((rows, channels))
    for t in range(min(taps, rows)):
        weight = base[t] + np.repeat(deltas[t:, t], channels // groups, axis=1).astype(np.float64)
        out[t:] += weight * x[: rows - t]
    return out.astype(np.float32)
