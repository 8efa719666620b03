"""Matrix products of one activation with one or more packed weights."""

from collections.abc import Sequence

from sparkinfer.backend.base import Activation, Buffer, Recorder
from sparkinfer.kernels.linear.weights import PackedWeight
from sparkinfer.kernels.select import select

__all__ = ["PackedWeight", "linear"]


def linear(
    recorder: Recorder,
    x: Activation,
    weights: Sequence[PackedWeight],
    out: Sequence[Buffer],
    *,
    add: bool = False,
) -> None:
    """Record out[i][r, :] = weights[i] @ x[r] for every row r; `add` adds to what stands in `out`.

    Shapes: x rows x inputs; out[i] rows x weights[i].padded_outputs (the padding is written as zeros times x).
    A quantised weight reads `x.q8`, a float one `x.f32`. The products run as one phase.
    Pinned: per output one chain over the blocks in order, independent of the number of rows.
    """
    select("linear", recorder.backend)(recorder, x, weights, out, add=add)
