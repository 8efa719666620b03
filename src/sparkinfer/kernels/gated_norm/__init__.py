"""The norm and output gate of Gated DeltaNet."""

from sparkinfer.backend.base import Activation, Buffer, Recorder
from sparkinfer.kernels.select import select


def gated_norm(
    recorder: Recorder,
    x: Buffer,
    gate: Buffer,
    weight: Buffer,
    out: Activation,
    *,
    heads: int,
    eps: float,
) -> None:
    """Record out[r, h] = x[r, h] / sqrt(mean(x[r, h]^2) + eps) * weight * silu(gate[r, h]), norm first.

    Shapes: x, gate, out rows x heads x n; weight 1 x n. Quantised too where `out` has int8 blocks. Rows do not mix.
    """
    select("gated_norm", recorder.backend)(recorder, x, gate, weight, out, heads=heads, eps=eps)
