"""Numpy specification of the routed and shared experts together."""

import numpy as np
from numpy.typing import NDArray

from sparkinfer.kernels.gated_linear.reference import gated_linear
from sparkinfer.kernels.linear.reference import linear

Floats = NDArray[np.float32]


def experts(
    x: Floats, ids: NDArray[np.int64], weights: Floats, gate: Floats, up: Floats, down: Floats,
    shared: Floats, shared_gate: Floats,
) -> Floats:  # fmt: skip
    """x rows x n; ids and weights rows x used; gate, up experts x width x n; down experts x n x width; shared rows x n.

    The sum that is added to the residual stream: routed experts plus sigmoid(shared_gate) * shared.
    """
    out = shared / (1 + np.exp(-shared_gate.astype(np.float64)))[:, None]
    for r in range(len(x)):
        for e, weight in zip(ids[r], weights[r], strict=True):
            out[r] += weight * linear(gated_linear(x[r : r + 1], gate[e], up[e]), down[e])[0]
    return out.astype(np.float32)
