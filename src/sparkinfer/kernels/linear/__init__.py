"""Matrix products of one activation with one or more packed weights."""

from collections.abc import Sequence
from typing import Any

from sparkinfer.backend.base import Activation, Backend, Buffer, Recorder, Weight
from sparkinfer.kernels.select import select


def pack_weight(
    backend: Backend, format_name: str, blocks: Any, outputs: int, inputs: int, experts: int = 1
) -> Weight:
    """Bring GGUF blocks (uint8 [n, block_bytes], experts x outputs x inputs values) into the backend's form.

    Raises ShapeError when the inputs are no whole number of blocks.
    """
    packed: Weight = select("linear", backend.name, "pack")(
        backend, format_name, blocks, outputs, inputs, experts
    )
    return packed


def linear(
    recorder: Recorder,
    x: Activation,
    weights: Sequence[Weight],
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
