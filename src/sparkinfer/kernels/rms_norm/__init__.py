"""Root-mean-square norm of rows, written as the input of a matrix product."""

from sparkinfer.backend.base import Activation, Buffer, Recorder
from sparkinfer.kernels.select import select


def rms_norm(recorder: Recorder, x: Buffer, weight: Buffer, out: Activation, *, eps: float) -> None:
    """Record out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight for every row, and its int8 blocks if `out` has them.

    Shapes: x rows x n, weight 1 x n, out rows x n; n a multiple of 16 (32 with int8 blocks).
    Pinned: 16 running sums folded as a tree; rows do not mix. Tolerance: 1e-6 relative.
    """
    select("rms_norm", recorder.backend)(recorder, x, weight, out, eps=eps)
