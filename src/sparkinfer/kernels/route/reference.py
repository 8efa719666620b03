"""Numpy specification of `route`."""

import numpy as np
from numpy.typing import NDArray


def route(logits: NDArray[np.float32], used: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """logits rows x experts; ids and weights, rows x used, by rank."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :used]
    chosen = np.take_along_axis(logits, ids, axis=-1).astype(np.float64)
    weights = np.exp(chosen - chosen.max(axis=-1, keepdims=True))
    return ids, (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)
