"""The first half of a SwiGLU feed-forward block."""

from typing import Any

from sparkinfer.backend.base import Activation, Backend, Recorder, Weight
from sparkinfer.kernels.select import select


def pack_pair(
    backend: Backend, format_name: str, pair: tuple[Any, Any], outputs: int, inputs: int
) -> tuple[Weight, Weight]:
    """Bring gate and up (GGUF blocks of one format) into the form that `gated_linear` reads fastest on the host.

    Nothing else can read them then; outputs are a multiple of 32.
    """
    packed: tuple[Weight, Weight] = select("gated_linear", backend.name, "pack_pair")(
        backend, format_name, pair, outputs, inputs
    )
    return packed


def gated_linear(
    recorder: Recorder, x: Activation, gate: Weight, up: Weight, out: Activation
) -> None:
    """Record out[r] = silu(gate @ x[r]) * (up @ x[r]) for every row, quantised too where `out` has int8 blocks.

    Shapes: x rows x inputs, gate and up outputs x inputs, out rows x outputs; outputs a multiple of 32.
    Pinned as `linear`; silu(v) = v / (1 + exp(-v)).
    """
    select("gated_linear", recorder.backend)(recorder, x, gate, up, out)
