"""Numpy specification of `linear`, and of what int8 activations do to it."""

import numpy as np
from numpy.typing import NDArray


def linear(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """x rows x inputs, weight outputs x inputs; rows x outputs."""
    return (x.astype(np.float64) @ weight.T.astype(np.float64)).astype(np.float32)


def quantised_rows(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """`x` as a quantised weight sees it: per block of 32, codes rint(127 x / max|x|) times max|x| / 127."""
    rows, width = x.shape
    blocks = x.reshape(rows, width // 32, 32)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    return (
        (np.rint(blocks * inverse) * (top / np.float32(127)))
        .astype(np.float32)
        .reshape(rows, width)
    )
