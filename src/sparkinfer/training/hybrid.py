"""HybridModel: the qwen35 and qwen35moe kinds in plain torch, as a frozen target of a draft and as a model to train.

Layers are Gated DeltaNet or gated attention, each followed by a dense feed-forward block or routed experts. The
computation is that of `models/qwen35.py`; `tests/training/test_training_hybrid.py` holds them against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkinfer.models.config import ModelConfig
from sparkinfer.training.gated_delta import gated_delta, gated_delta_step, unit
from sparkinfer.training.moe import DenseFeedForward, Experts, exact_linear, keep
from sparkinfer.training.target import TorchTarget, rms_norm, rope_table, rotate

KINDS = ("qwen35", "qwen35moe")


@dataclass
class GdnState:
    """Of a batch in lock step: matrix states float32 [rows, value_heads, d, d] and the convolution's last inputs
    [rows, taps - 1, channels].
    """

    matrix: Tensor
    inputs: Tensor


@dataclass
class AttentionState:
    """Keys and values of a batch in lock step, [rows, kv_heads, length, head_size]."""

    keys: Tensor
    values: Tensor


class GatedDeltaNet(nn.Module):
    """Norm, projections, short convolution, gated delta rule, gated norm, projection."""

    NAMES: ClassVar[dict[str, str]] = {
        "norm": "attn_norm.weight",
        "qkv": "attn_qkv.weight",
        "gate": "attn_gate.weight",
        "alpha": "ssm_alpha.weight",
        "beta": "ssm_beta.weight",
        "conv": "ssm_conv1d.weight",
        "decay_log": "ssm_a",  # the file has -exp of it
        "time_bias": "ssm_dt.bias",
        "head_norm": "ssm_norm.weight",
        "output": "ssm_out.weight",
    }

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        assert config.gdn is not None
        self.gdn, self.eps = config.gdn, config.eps
        keep(self, tensors)

    def state(self, rows: int, _length: int) -> GdnState:
        """The state before the first token."""
        g = self.gdn
        matrix = torch.zeros(rows, g.value_heads, g.head_size, g.head_size, device=self.norm.device)
        inputs = torch.zeros(
            rows, g.taps - 1, g.channels, device=self.norm.device, dtype=self.qkv.dtype
        )
        return GdnState(matrix, inputs)

    def forward(self, x: Tensor, _cos: Tensor, _sin: Tensor) -> Tensor:
        """Whole sequences: what is added to the stream [b, n, n_embd]."""
        y = rms_norm(x, self.norm, self.eps)
        raw = F.pad(F.linear(y, self.qkv), (0, 0, self.gdn.taps - 1, 0))
        with torch.autocast(x.device.type, enabled=False):
            out = gated_delta(*self._heads(y, self._convolved(raw, x.shape[1])))
        return self._finish(y, out)

    def append(
        self, x: Tensor, _cos: Tensor, _sin: Tensor, state: GdnState, _position: int
    ) -> Tensor:
        """One token of every row, stream [b, 1, n_embd]; the state moves on."""
        y = rms_norm(x, self.norm, self.eps)
        window = torch.cat((state.inputs, F.linear(y, self.qkv)), 1)
        state.inputs.copy_(window[:, 1:])
        q, k, v, g, beta = (part[:, 0] for part in self._heads(y, self._convolved(window, 1)))
        out = gated_delta_step(q, k, v, g, beta, state.matrix)
        return self._finish(y, out[:, None])

    def _convolved(self, raw: Tensor, length: int) -> Tensor:
        """Causal convolution and SiLU of inputs [b, taps - 1 + length, channels], float32."""
        wide, weight = raw.float(), self.conv.float()
        mixed = wide[:, :length] * weight[:, 0]
        for tap in range(1, self.gdn.taps):
            mixed = mixed + wide[:, tap : tap + length] * weight[:, tap]
        return F.silu(mixed)

    def _heads(self, y: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, g and beta of normed streams y and convolved inputs, float32."""
        g = self.gdn
        q, k, v = mixed.split((g.key_width, g.key_width, g.value_width), -1)
        q, k = (unit(x.unflatten(-1, (g.key_heads, g.head_size)), self.eps) for x in (q, k))
        alpha = exact_linear(y, self.alpha) + self.time_bias.float()
        # softplus: torch's own has a gradient whose layout a compiler may mistake (2.13, view of its backward)
        step = torch.logaddexp(alpha, torch.zeros_like(alpha))
        return (
            q * g.head_size**-0.5,
            k,
            v.unflatten(-1, (g.value_heads, g.head_size)),
            -self.decay_log.float().exp() * step,
            torch.sigmoid(exact_linear(y, self.beta)),
        )

    def _finish(self, y: Tensor, out: Tensor) -> Tensor:
        """Gated norm of every head [b, n, value_heads, d], in float32, and the projection."""
        normed = rms_norm(out, self.head_norm, self.eps)
        gate = F.linear(y, self.gate)
        gated = normed.flatten(2) * F.silu(gate.float())
        return F.linear(gated.to(gate.dtype), self.output)


class GatedAttention(nn.Module):
    """Norm, attention with normed heads and partial rotation, output gate, projection."""

    NAMES: ClassVar[dict[str, str]] = {
        "norm": "attn_norm.weight",
        "q": "attn_q.weight",  # of every head the query's rows, then its gate's
        "k": "attn_k.weight",
        "v": "attn_v.weight",
        "q_norm": "attn_q_norm.weight",
        "k_norm": "attn_k_norm.weight",
        "output": "attn_output.weight",
    }

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.rotated, self.eps = config.rotated, config.eps
        keep(self, tensors)

    def state(self, rows: int, length: int) -> AttentionState:
        """Room for `length` tokens."""
        shape = (rows, self.kv_heads, length, self.head_size)
        make = lambda: torch.empty(shape, dtype=self.q.dtype, device=self.q.device)  # noqa: E731
        return AttentionState(make(), make())

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Whole sequences: what is added to the stream [b, n, n_embd]."""
        q, k, v, gate = self._heads(x, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._finish(y.transpose(1, 2), gate)

    def append(
        self, x: Tensor, cos: Tensor, sin: Tensor, state: AttentionState, position: int
    ) -> Tensor:
        """One token of every row at `position`, stream [b, 1, n_embd]."""
        q, k, v, gate = self._heads(x, cos, sin)
        state.keys[:, :, position], state.values[:, :, position] = k[:, :, 0], v[:, :, 0]
        # The query heads of a group become rows of one attention: no key is read twice.
        grouped = q[:, :, 0].unflatten(1, (self.kv_heads, -1))
        seen = slice(0, position + 1)
        y = F.scaled_dot_product_attention(
            grouped, state.keys[:, :, seen], state.values[:, :, seen]
        )
        return self._finish(y.flatten(1, 2)[:, None], gate)

    def _heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries [b, heads, n, hd], keys and values [b, kv_heads, n, hd], gates [b, n, heads, hd]."""
        y = rms_norm(x, self.norm, self.eps)
        q, gate = F.linear(y, self.q).unflatten(-1, (self.heads, 2, self.head_size)).unbind(-2)
        k, v = (
            F.linear(y, weight).unflatten(-1, (self.kv_heads, self.head_size))
            for weight in (self.k, self.v)
        )
        q = rms_norm(q, self.q_norm, self.eps).transpose(1, 2)
        k = rms_norm(k, self.k_norm, self.eps).transpose(1, 2)
        return self._turned(q, cos, sin), self._turned(k, cos, sin), v.transpose(1, 2), gate

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = rotate(x[..., : self.rotated], cos, sin)
        return torch.cat((turned, x[..., self.rotated :]), -1)

    def _finish(self, attended: Tensor, gate: Tensor) -> Tensor:
        return F.linear((attended * torch.sigmoid(gate)).flatten(2), self.output)


class HybridLayer(nn.Module):
    """A token mixer and a feed-forward part, each added to the stream."""

    def __init__(
        self, mixer: GatedDeltaNet | GatedAttention, feed_forward: DenseFeedForward | Experts
    ) -> None:
        super().__init__()
        self.mixer, self.feed_forward = mixer, feed_forward

    def run(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Whole sequences: stream [b, n, n_embd] to stream, and the balance loss of the experts."""
        x = x + self.mixer(x, cos, sin)
        added, balance = self.feed_forward(x)
        return x + added, balance

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Whole sequences: stream [b, n, n_embd] to stream."""
        return self.run(x, cos, sin)[0]

    def append(self, x: Tensor, cos: Tensor, sin: Tensor, state: Any, position: int) -> Tensor:
        """One token of every row at `position`, stream [b, 1, n_embd]; the mixer's state moves on."""
        x = x + self.mixer.append(x, cos, sin, state, position)
        return x + self.feed_forward(x)[0]

    def compile_append(self) -> None:
        """Compile `append`; of attention only the parts around the lookup, whose length changes with every token."""
        if isinstance(self.mixer, GatedDeltaNet):
            whole = torch.compile(self.append, dynamic=False)
            # A recurrent layer does not look at the position: a constant keeps one compiled form.
            short = lambda x, cos, sin, state, _position: whole(x, cos, sin, state, 0)  # noqa: E731
            self.append = short  # type: ignore[method-assign]
            return
        self.mixer._heads = torch.compile(self.mixer._heads, dynamic=False)  # type: ignore[method-assign]
        self.mixer._finish = torch.compile(self.mixer._finish, dynamic=False)  # type: ignore[method-assign]
        self.feed_forward.compile(dynamic=False)


class HybridModel(TorchTarget):
    """A hybrid model. As a frozen target it is a TorchTarget; `forward` is what a trainer runs."""

    recordable = False

    def __init__(
        self, config: ModelConfig, tensors: dict[str, Tensor], layers: list[HybridLayer]
    ) -> None:
        """`tensors`: embedding and output_norm, and head where it is not the embedding."""
        nn.Module.__init__(self)
        self.config = config
        self.layers = nn.ModuleList(layers)
        keep(self, {"own_head" if name == "head" else name: t for name, t in tensors.items()})

    @property
    def head(self) -> Tensor:
        """The LM head [n_vocab, n_embd]."""
        found: Tensor = self.own_head if "own_head" in self._parameters else self.embedding
        return found

    def new_cache(self, rows: int, length: int) -> list[GdnState | AttentionState]:
        """States for `rows` sequences of up to `length` tokens in lock step."""
        return [layer.mixer.state(rows, length) for layer in self.layers]

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: list[GdnState | AttentionState], position: int) -> Tensor:
        """Logits [b, n_vocab] after one token of every row at `position`."""
        c = self.config
        place = torch.full((1,), position, device=self.device)
        cos, sin = rope_table(c.rotated, c.rope_base, place)
        x = F.embedding(tokens, self.embedding)[:, None]
        for layer, state in zip(self.layers, cache, strict=True):
            x = layer.append(x, cos, sin, state, position)
        return F.linear(rms_norm(x[:, 0], self.output_norm, c.eps), self.head)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Normed last streams [b, n, n_embd] with gradients, and the mean balance loss of the layers."""
        c = self.config
        places = torch.arange(tokens.shape[1], device=self.device)
        cos, sin = rope_table(c.rotated, c.rope_base, places)
        x = F.embedding(tokens, self.embedding)
        losses = []
        for layer in self.layers:
            x, loss = layer.run(x, cos, sin)
            losses.append(loss)
        return rms_norm(x, self.output_norm, c.eps), torch.stack(losses).mean()
