"""Blocks shared by the architectures. Each holds its weights and records its ops on a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cpu import CpuRecorder
from sparkinfer.kernels.attention import attention
from sparkinfer.kernels.gated_linear import gated_linear
from sparkinfer.kernels.linear import PackedWeight, linear
from sparkinfer.kernels.rms_norm import rms_norm
from sparkinfer.kernels.rope import rope
from sparkinfer.kernels.shapes import Heads
from sparkinfer.models.workspace import Workspace


@dataclass
class Run:
    """A recording in progress: the residual stream `x`, the run parameters and the buffers to use."""

    recorder: CpuRecorder
    workspace: Workspace
    x: Buffer
    params: Buffer
    rope_table: Buffer
    context: int
    eps: float

    def activation(self, name: str, width: int, readers: Sequence[PackedWeight], *, cheap: bool) -> Activation:
        """Input of `readers`; `cheap` when a prologue may write it."""
        quantised = any(weight.quantised for weight in readers)
        private = cheap and self.recorder.prefers_prologue
        return self.workspace.activation(name, width, quantised=quantised, private=private)

    def output(self, name: str, weight: PackedWeight) -> Buffer:
        return self.workspace.buffer(name, weight.padded_outputs)

    def norm(self, weight: Buffer, readers: Sequence[PackedWeight]) -> Activation:
        """The normed residual stream."""
        out = self.activation("norm", self.x.width, readers, cheap=True)
        rms_norm(self.recorder, self.x, weight, out, eps=self.eps)
        return out

    def add_to_stream(self, activation: Activation, weight: PackedWeight) -> None:
        linear(self.recorder, activation, [weight], [self.x], add=True)


@dataclass(frozen=True)
class Attention:
    """Causal attention; with `shape.gated`, q carries an output gate in each head."""

    shape: Heads
    norm: Buffer
    q: PackedWeight
    k: PackedWeight
    v: PackedWeight
    output: PackedWeight
    q_norm: Buffer | None = None
    k_norm: Buffer | None = None

    def record(self, run: Run) -> None:
        shape = self.shape
        projections = [self.q, self.k, self.v]
        names = ("q", "k", "v")
        q, k, v = (run.output(name, weight) for name, weight in zip(names, projections, strict=True))
        linear(run.recorder, run.norm(self.norm, projections), projections, [q, k, v])
        turned = run.workspace.buffer("q turned", shape.heads * shape.head_size)
        rope(run.recorder, q, k, v, shape, run.rope_table, run.params, turned, self.q_norm, self.k_norm)
        mixed = run.activation("attention", turned.width, [self.output], cheap=True)
        attention(run.recorder, turned, shape, run.params, q if shape.gated else None, mixed, run.context)
        run.add_to_stream(mixed, self.output)


@dataclass(frozen=True)
class FeedForward:
    """SwiGLU."""

    norm: Buffer
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight

    def record(self, run: Run) -> None:
        hidden = run.activation("hidden", self.gate.outputs, [self.down], cheap=False)
        gated_linear(run.recorder, run.norm(self.norm, [self.gate, self.up]), self.gate, self.up, hidden)
        run.add_to_stream(hidden, self.down)
