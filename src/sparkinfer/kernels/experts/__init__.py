"""The routed experts of a mixture: each selected expert's weights are read once per window, for all its rows."""

from dataclasses import dataclass

from sparkinfer.backend.base import Activation, Buffer, Recorder, Weight
from sparkinfer.kernels.route import Routing
from sparkinfer.kernels.select import select


@dataclass(frozen=True)
class ExpertBuffers:
    """Memory of the routed experts: `hidden` slots x width, `out` slots x n, slots = rows x used."""

    hidden: Activation
    out: Buffer


def experts_hidden(
    recorder: Recorder,
    x: Activation,
    gate: Weight,
    up: Weight,
    routing: Routing,
    buffers: ExpertBuffers,
) -> None:
    """Record hidden[slot] = silu(gate_e @ x[row]) * (up_e @ x[row]) for every slot (row, e)."""
    select("experts", recorder.backend, "record_hidden")(recorder, x, gate, up, routing, buffers)


def experts_out(recorder: Recorder, down: Weight, routing: Routing, buffers: ExpertBuffers) -> None:
    """Record out[slot] = down_e @ hidden[slot] for every slot."""
    select("experts", recorder.backend, "record_out")(recorder, down, routing, buffers)


def experts_combine(
    recorder: Recorder,
    routing: Routing,
    buffers: ExpertBuffers,
    shared: Buffer,
    gates: Buffer,
    column: int,
    out: Buffer,
) -> None:
    """Record out[r] += sum over ranks, in order, of weight * slot result, + sigmoid(gates[r, column]) * shared[r]."""
    select("experts", recorder.backend, "record_combine")(
        recorder, routing, buffers, shared, gates, column, out
    )
