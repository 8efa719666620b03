"""Bring rows that come from outside a tape into the form that quantised weights read."""

from sparkinfer.backend.base import Activation, Recorder
from sparkinfer.kernels.select import select


def quantise(recorder: Recorder, x: Activation) -> None:
    """Record x.q8[r] = int8 blocks of x.f32[r] for every row; `x` is shared by all threads and has int8 blocks.

    Shapes: rows x n, n a multiple of 32. A block's scale is its largest magnitude over 127.
    """
    select("quantise", recorder.backend)(recorder, x)
