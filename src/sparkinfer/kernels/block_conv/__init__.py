"""A short convolution over the rows of one block, with weights that each row brings for groups of channels."""

from dataclasses import dataclass

from sparkinfer.backend.base import Activation, Buffer, Recorder
from sparkinfer.kernels.select import select


@dataclass(frozen=True)
class BlockConv:
    """`taps` rows back (the row itself included); `group` channels, a multiple of 16, share a row's weight.

    `base` is 2 taps x channels: first the weights of the side before a sublayer, then those of the side after it.
    """

    taps: int
    group: int
    base: Buffer


def block_conv(
    recorder: Recorder, x: Buffer, deltas: Buffer, conv: BlockConv, out: Activation
) -> None:
    """Record the side before a sublayer: out[r, c] = sum over t of (base[t, c] + deltas[r, t, c // group]) x[r - t, c].

    Shapes: x and out rows x channels, deltas rows x (2 x taps x channels / group), both sides side by side.
    Rows before the first are zero. Pinned: one chain over t from 0.
    """
    select("block_conv", recorder.backend)(recorder, x, deltas, conv, out)


def block_conv_add(
    recorder: Recorder, x: Buffer, deltas: Buffer, conv: BlockConv, out: Buffer
) -> None:
    """Record the same for the side after a sublayer, added to what stands in `out` rows x channels."""
    select("block_conv", recorder.backend, "record_add")(recorder, x, deltas, conv, out)
