"""CPU form of `delta_net`: its three ops."""

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cpu import CpuRecorder
from sparkinfer.kernels.conv.cpu_impl import record as conv
from sparkinfer.kernels.delta_net import DeltaNet
from sparkinfer.kernels.gated_delta import DeltaInputs
from sparkinfer.kernels.gated_delta.cpu_impl import record as gated_delta
from sparkinfer.kernels.gated_norm.cpu_impl import record as gated_norm


def record(
    recorder: CpuRecorder, net: DeltaNet, x: Buffer, inputs: DeltaInputs, gate: Buffer, params: Buffer,
    unnormed: Buffer, out: Activation,
) -> None:  # fmt: skip
    conv(recorder, x, net.conv_weight, net.shape, net.layer, params, inputs.qkv)
    gated_delta(recorder, inputs, net.shape, net.layer, params, unnormed, net.eps)
    heads = net.shape.value_heads
    gated_norm(recorder, unnormed, gate, net.head_norm, out, heads=heads, eps=net.eps)
