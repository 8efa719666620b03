"""Numpy specification of `argmax`."""

import numpy as np
from numpy.typing import NDArray


def argmax(logits: NDArray[np.float32], n_vocab: int) -> NDArray[np.int64]:
    """int64 [rows, 2]: the id of the largest of the first `n_vocab` logits (what is no number counts as the lowest),
    and 1 if all of them are finite.
    """
    used = logits[:, :n_vocab]
    largest = np.where(np.isnan(used), -np.inf, used).argmax(axis=1)
    return np.stack([largest, np.isfinite(used).all(axis=1)], axis=1).astype(np.int64)
