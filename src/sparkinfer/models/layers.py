"""Blocks shared by the architectures. Each holds its weights and records its ops on a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparkinfer.backend.base import Activation, Buffer, Recorder, Weight
from sparkinfer.kernels.attention import attention
from sparkinfer.kernels.copy_rows import copy_rows
from sparkinfer.kernels.delta_net import DeltaNet, delta_net
from sparkinfer.kernels.experts import ExpertBuffers, experts_combine, experts_hidden, experts_out
from sparkinfer.kernels.gated_delta import DeltaInputs
from sparkinfer.kernels.gated_linear import gated_linear
from sparkinfer.kernels.linear import linear
from sparkinfer.kernels.rms_norm import rms_norm
from sparkinfer.kernels.rope import rope
from sparkinfer.kernels.route import Routing, route, routing_words
from sparkinfer.kernels.shapes import Heads, RecurrentShape
from sparkinfer.models.workspace import Workspace


@dataclass
class Run:
    """A recording in progress: the residual stream `x`, the run parameters and the buffers to use."""

    recorder: Recorder
    workspace: Workspace
    x: Buffer
    params: Buffer
    rope_table: Buffer
    context: int
    eps: float

    def activation(
        self, name: str, width: int, readers: Sequence[Weight], *, cheap: bool
    ) -> Activation:
        """Input of `readers`; `cheap` when a prologue may write it: only one phase reads it."""
        quantised = any(weight.quantised for weight in readers)
        private = cheap and self.recorder.prefers_prologue
        return self.workspace.activation(name, width, quantised=quantised, private=private)

    def output(self, name: str, weight: Weight) -> Buffer:
        return self.workspace.buffer(name, weight.padded_outputs)

    def norm(self, weight: Buffer, readers: Sequence[Weight], *, phases: int = 1) -> Activation:
        """The normed residual stream, for `phases` phases that read it."""
        out = self.activation("norm", self.x.width, readers, cheap=phases == 1)
        rms_norm(self.recorder, self.x, weight, out, eps=self.eps)
        return out

    def copy_stream(self, target: Buffer) -> None:
        """Keep the residual stream as it is now."""
        copy_rows(self.recorder, self.x, target)

    def add_to_stream(self, activation: Activation, weight: Weight) -> None:
        linear(self.recorder, activation, [weight], [self.x], add=True)


@dataclass(frozen=True)
class Attention:
    """Causal attention; with `shape.gated`, q carries an output gate in each head."""

    shape: Heads
    norm: Buffer
    q: Weight
    k: Weight
    v: Weight
    output: Weight
    q_norm: Buffer | None = None
    k_norm: Buffer | None = None

    @property
    def readers(self) -> list[Weight]:
        """What reads the normed residual stream."""
        return [self.q, self.k, self.v]

    def record(self, run: Run) -> None:
        run.add_to_stream(self.mix(run, run.norm(self.norm, self.readers)), self.output)

    def mix(self, run: Run, x: Activation, part: tuple[int, int] | None = None) -> Activation:
        """The input of `output` for x.

        `part` (first row, rows): only of these rows, which the recorder goes on with; not for gated layers.
        """
        shape, rows = self.shape, run.recorder.rows
        projections, names = self.readers, ("q", "k", "v")
        q, k, v = (
            run.output(name, weight) for name, weight in zip(names, projections, strict=True)
        )
        linear(run.recorder, x, projections, [q, k, v])
        turned = run.workspace.buffer("q turned", shape.heads * shape.head_size)
        rope(
            run.recorder,
            q,
            k,
            v,
            shape,
            run.rope_table,
            run.params,
            turned,
            self.q_norm,
            self.k_norm,
        )
        first = 0
        if part is not None:
            assert not shape.gated, shape
            first, run.recorder.rows = part
            turned = turned.part(*part)
        mixed = run.activation("attention", turned.width, [self.output], cheap=True)
        attention(
            run.recorder, turned, shape, run.params, q if shape.gated else None, mixed, run.context,
            first_row=first, of_rows=rows,
        )  # fmt: skip
        return mixed


@dataclass(frozen=True)
class FeedForward:
    """SwiGLU."""

    norm: Buffer
    gate: Weight
    up: Weight
    down: Weight

    @property
    def readers(self) -> list[Weight]:
        """What reads the normed residual stream."""
        return [self.gate, self.up]

    @property
    def output(self) -> Weight:
        return self.down

    def record(self, run: Run) -> None:
        run.add_to_stream(self.mix(run, run.norm(self.norm, self.readers)), self.output)

    def mix(self, run: Run, x: Activation) -> Activation:
        """The input of `output` for x."""
        hidden = run.activation("hidden", self.gate.outputs, [self.down], cheap=False)
        gated_linear(run.recorder, x, self.gate, self.up, hidden)
        return hidden


@dataclass(frozen=True)
class GatedDeltaNet:
    """Linear attention with a recurrent state; `layer` is its place among the recurrent layers."""

    shape: RecurrentShape
    layer: int
    norm: Buffer
    qkv: Weight
    gate: Weight
    alpha: Weight
    beta: Weight
    conv_weight: Buffer
    decay_rate: Buffer
    time_bias: Buffer
    head_norm: Buffer
    output: Weight

    def record(self, run: Run) -> None:
        recorder, shape = run.recorder, self.shape
        projections = [self.qkv, self.gate, self.alpha, self.beta]
        names = ("gdn qkv", "gdn gate", "gdn alpha", "gdn beta")
        qkv, gate, alpha, beta = (
            run.output(name, weight) for name, weight in zip(names, projections, strict=True)
        )
        x = run.norm(self.norm, projections)
        if recorder.lanes:  # the gate is needed last
            with recorder.aside(alpha, beta):
                linear(recorder, x, [self.alpha, self.beta], [alpha, beta])
            with recorder.aside(gate, late=True):
                linear(recorder, x, [self.gate], [gate])
            linear(recorder, x, [self.qkv], [qkv])
        else:
            linear(recorder, x, projections, [qkv, gate, alpha, beta])
        mixed = run.workspace.buffer("gdn conv", shape.channels)
        inputs = DeltaInputs(mixed, alpha, beta, self.decay_rate, self.time_bias)
        out = run.workspace.buffer("gdn out", shape.value_heads * shape.head_size)
        normed = run.activation("gdn normed", out.width, [self.output], cheap=True)
        net = DeltaNet(shape, self.layer, self.conv_weight, self.head_norm, run.eps)
        delta_net(recorder, net, qkv, inputs, gate, run.params, out, normed)
        run.add_to_stream(normed, self.output)


@dataclass(frozen=True)
class MixtureOfExperts:
    """Routed experts plus a gated shared expert. `router` has one row per expert and the shared expert's gate last."""

    experts: int
    used: int
    norm: Buffer
    router: Weight
    gate: Weight
    up: Weight
    down: Weight
    shared_gate: Weight
    shared_up: Weight
    shared_down: Weight

    def record(self, run: Run) -> None:
        recorder, space = run.recorder, run.workspace
        x = run.norm(self.norm, [self.router, self.gate, self.shared_gate], phases=2)
        logits = run.output("router", self.router)
        shared_hidden = run.activation(
            "shared hidden", self.shared_gate.outputs, [self.shared_down], cheap=False
        )
        shared = run.output("shared out", self.shared_down)
        routing, buffers = self._buffers(space)
        if recorder.lanes:
            with recorder.aside(shared):
                gated_linear(recorder, x, self.shared_gate, self.shared_up, shared_hidden)
                linear(recorder, shared_hidden, [self.shared_down], [shared])
            linear(recorder, x, [self.router], [logits])
            route(recorder, logits, routing)
            experts_hidden(recorder, x, self.gate, self.up, routing, buffers)
            experts_out(recorder, self.down, routing, buffers)
        else:
            with recorder.together():
                linear(recorder, x, [self.router], [logits])
                gated_linear(recorder, x, self.shared_gate, self.shared_up, shared_hidden)
            route(recorder, logits, routing)
            experts_hidden(recorder, x, self.gate, self.up, routing, buffers)
            with recorder.together():
                experts_out(recorder, self.down, routing, buffers)
                linear(recorder, shared_hidden, [self.shared_down], [shared])
        experts_combine(recorder, routing, buffers, shared, logits, self.experts, run.x)

    def _buffers(self, space: Workspace) -> tuple[Routing, ExpertBuffers]:
        """The routing table belongs to this layer alone: its count of experts must outlast the phases that use it."""
        words = routing_words(space.rows, self.used, self.experts)
        routing = Routing(
            table=space.single(f"routing {id(self)}", words, np.int64),
            weights=space.buffer("routing weights", self.used),
            experts=self.experts,
            used=self.used,
        )
        hidden = space.activation(
            "expert hidden",
            self.gate.outputs,
            quantised=self.down.quantised,
            private=False,
            per_row=self.used,
        )
        return routing, ExpertBuffers(
            hidden, space.buffer("expert out", self.down.padded_outputs, per_row=self.used)
        )
