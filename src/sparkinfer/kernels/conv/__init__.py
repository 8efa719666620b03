"""Causal depthwise convolution of the Gated-DeltaNet input, and the commit of its state."""

from sparkinfer.backend.base import Buffer, Recorder
from sparkinfer.kernels.select import select
from sparkinfer.kernels.shapes import RecurrentShape


def conv(
    recorder: Recorder,
    x: Buffer,
    weight: Buffer,
    shape: RecurrentShape,
    layer: int,
    params: Buffer,
    out: Buffer,
) -> None:
    """Record out[r, c] = silu(sum over t of weight[t, c] * x(position + r - taps + 1 + t, c)).

    Shapes: x and out rows x channels, weight taps x channels (tap 0 meets the oldest input). Inputs before the first
    row come from the convolution state of recurrent layer `layer`. When the run advances, the state becomes the last
    taps - 1 inputs; otherwise the rows are recorded for the commit. Pinned: taps in order, fused multiply-adds.
    """
    select("conv", recorder.backend)(recorder, x, weight, shape, layer, params, out)


def commit_conv(recorder: Recorder, shape: RecurrentShape, params: Buffer) -> None:
    """Record the advance of every convolution state by the first COMMIT_ROWS recorded rows."""
    select("conv", recorder.backend, "record_commit")(recorder, shape, params)
