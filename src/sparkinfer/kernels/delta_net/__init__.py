"""Gated DeltaNet between its projections: convolution, delta rule, output norm and gate."""

from dataclasses import dataclass

from sparkinfer.backend.base import Activation, Buffer, Recorder
from sparkinfer.kernels.gated_delta import DeltaInputs
from sparkinfer.kernels.select import select
from sparkinfer.kernels.shapes import RecurrentShape


@dataclass(frozen=True)
class DeltaNet:
    """What a layer brings: its shape and place, taps of the convolution [taps, channels], the norm of a head [1, n]."""

    shape: RecurrentShape
    layer: int
    conv_weight: Buffer
    head_norm: Buffer
    eps: float


def delta_net(
    recorder: Recorder,
    net: DeltaNet,
    x: Buffer,
    inputs: DeltaInputs,
    gate: Buffer,
    params: Buffer,
    unnormed: Buffer,
    out: Activation,
) -> None:
    """Record conv of x into inputs.qkv, gated_delta into `unnormed`, gated_norm of that into `out`, as those ops say.

    Shapes: x and inputs.qkv rows x channels; gate, unnormed and out rows x value_heads x head_size.
    `inputs.qkv` and `unnormed` hold nothing that counts afterwards: a backend may do everything in one step.
    """
    select("delta_net", recorder.backend)(recorder, net, x, inputs, gate, params, unnormed, out)
