"""The first half of a SwiGLU feed-forward block."""

from sparkinfer.backend.base import Activation, Recorder, Weight
from sparkinfer.kernels.select import select


def gated_linear(
    recorder: Recorder, x: Activation, gate: Weight, up: Weight, out: Activation
) -> None:
    """Record out[r] = silu(gate @ x[r]) * (up @ x[r]) for every row, quantised too where `out` has int8 blocks.

    Shapes: x rows x inputs, gate and up outputs x inputs, out rows x outputs; outputs a multiple of 32.
    Pinned as `linear`; silu(v) = v / (1 + exp(-v)).
    """
    select("gated_linear", recorder.backend)(recorder, x, gate, up, out)
