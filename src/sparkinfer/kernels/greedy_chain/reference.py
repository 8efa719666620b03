"""Numpy specification of `greedy_chain`."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def greedy_chain(
    logits: Floats,
    first: Floats | None = None,
    before: Floats | None = None,
    after: Floats | None = None,
) -> tuple[list[int], list[float]]:
    """Ids and their probabilities of all slots; logits [slots, ids], first [rank], before and after [ids, rank]."""
    ids: list[int] = []
    chances: list[float] = []
    for row in logits:
        values = np.where(np.isnan(row), -np.inf, row).astype(np.float64)
        if after is not None and before is not None and first is not None:
            values = values + after @ (before[ids[-1]] if ids else first)
        ids.append(int(values.argmax()))
        chances.append(float(1.0 / np.exp(values - values.max()).sum()))
    return ids, chances
