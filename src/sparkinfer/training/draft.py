"""DraftModel: the DFlash draft in torch, for training and for measuring acceptance."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkinfer.training.attention import BlockAttention
from sparkinfer.training.config import DraftShape
from sparkinfer.training.target import Layer, TorchTarget, rms_norm, rope_table, rotate


class DraftLayer(nn.Module):
    """One decoder layer. The context enters as keys and values only, without the layer's input norm."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        h, inner = shape.n_embd, shape.heads * shape.head_size
        outer = shape.kv_heads * shape.head_size
        self.input_layernorm = nn.Parameter(torch.ones(h))
        self.post_attention_layernorm = nn.Parameter(torch.ones(h))
        self.q_norm = nn.Parameter(torch.ones(shape.head_size))
        self.k_norm = nn.Parameter(torch.ones(shape.head_size))
        self.q_proj, self.k_proj = _matrix(inner, h), _matrix(outer, h)
        self.v_proj, self.o_proj = _matrix(outer, h), _matrix(h, inner)
        self.gate_proj, self.up_proj = _matrix(shape.n_ff, h), _matrix(shape.n_ff, h)
        self.down_proj = _matrix(h, shape.n_ff)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        rope: tuple[Tensor, Tensor, Tensor, Tensor],
        attention: BlockAttention,
    ) -> Tensor:
        """Block stream [b, n x block, h] and context rows [b, length, h] to block stream."""
        s = self.shape
        cos, sin, context_cos, context_sin = rope
        normed = rms_norm(x, self.input_layernorm, s.eps)
        q = self._heads(F.linear(normed, self.q_proj), s.heads)
        q = rotate(rms_norm(q, self.q_norm, s.eps), cos, sin)
        k = torch.cat(
            (self._keys(context, context_cos, context_sin), self._keys(normed, cos, sin)), 2
        )
        v = torch.cat((F.linear(context, self.v_proj), F.linear(normed, self.v_proj)), 1)
        y = attention(q, k, self._heads(v, s.kv_heads))
        x = x + F.linear(y.transpose(1, 2).flatten(2), self.o_proj)
        normed = rms_norm(x, self.post_attention_layernorm, s.eps)
        hidden = F.silu(F.linear(normed, self.gate_proj)) * F.linear(normed, self.up_proj)
        return x + F.linear(hidden, self.down_proj)

    def _keys(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        k = self._heads(F.linear(rows, self.k_proj), self.shape.kv_heads)
        return rotate(rms_norm(k, self.k_norm, self.shape.eps), cos, sin)

    def _heads(self, rows: Tensor, heads: int) -> Tensor:
        return rows.unflatten(-1, (heads, self.shape.head_size)).transpose(1, 2)


class DraftModel(nn.Module):
    """The trained part: projection of the features, layers, norms, the mask's embedding, perhaps a Markov head.

    The embedding is the target's, frozen, and not part of the draft; so is the LM head unless the shape has its own.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = _matrix(shape.n_embd, shape.features)
        self.hidden_norm = nn.Parameter(torch.ones(shape.n_embd))
        self.norm = nn.Parameter(torch.ones(shape.n_embd))
        self.mask_embedding = nn.Parameter(torch.zeros(shape.n_embd))
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.layers))
        self.lm_head = _matrix(shape.outputs, shape.n_embd) if shape.own_head else None
        self.markov_w1 = self.markov_w2 = None
        if shape.markov_rank:
            self.markov_w1 = _matrix(shape.n_vocab, shape.markov_rank)
            self.markov_w2 = nn.Parameter(torch.zeros(shape.outputs, shape.markov_rank))

    def forward(self, features: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """Normed streams of the slots, [b, n, depth, h].

        features [b, length, taps x h]; embedded [b, n, h], the anchors' rows of the target's table; anchors [b, n],
        positions.
        """
        s = self.shape
        (b, length, _), n = features.shape, anchors.shape[1]
        context = rms_norm(F.linear(features, self.fc), self.hidden_norm, s.eps)
        masks = self.mask_embedding.to(embedded.dtype).expand(b, n, s.block - 1, s.n_embd)
        x = torch.cat((embedded[:, :, None], masks), 2).flatten(1, 2)
        rope = self._rope(anchors, length)
        attention = BlockAttention(anchors, length, s)
        for layer in self.layers:
            x = layer(x, context, rope, attention)
        return rms_norm(x, self.norm, s.eps).unflatten(1, (n, s.block))[:, :, s.block - s.depth :]

    def _rope(self, anchors: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Cosines and sines of the block rows [b, 1, n x block, hd / 2] and of the context rows [length, hd / 2]."""
        s = self.shape
        slots = (anchors[..., None] + torch.arange(s.block, device=anchors.device)).flatten(1)
        cos, sin = rope_table(s.head_size, s.rope_base, slots)
        return (
            cos[:, None],
            sin[:, None],
            *rope_table(s.head_size, s.rope_base, torch.arange(length, device=anchors.device)),
        )

    def logits(self, streams: Tensor, previous: Tensor, head: Tensor) -> Tensor:
        """Logits [..., outputs] of slot streams [..., h] after the tokens `previous` [...]; head: the target's rows
        [outputs, h], which a draft with a head of its own does not use.
        """
        if self.lm_head is not None:
            head = self.lm_head.to(head.dtype)
        if self.markov_w1 is None or self.markov_w2 is None:
            return F.linear(streams, head)
        before = F.embedding(previous, self.markov_w1).to(streams.dtype)
        # One product for both terms: the streams beside the previous tokens' rows.
        both = torch.cat((head, self.markov_w2.to(head.dtype)), 1)
        return F.linear(torch.cat((streams, before), -1), both)


def _matrix(outputs: int, inputs: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)


@torch.no_grad()
def start_from_target(draft: DraftModel, target: TorchTarget, sources: tuple[int, ...]) -> None:
    """Copy the target's layers `sources` into the draft's, where the shapes agree; spread the features evenly.

    Scales: a copied query or key meets a norm that the llama kind lacks, so only its direction carries over.
    """
    s = draft.shape
    blocks = torch.eye(s.n_embd).repeat(1, len(s.taps)) / len(s.taps)
    draft.fc.copy_(blocks + 0.1 * draft.fc.cpu())
    draft.mask_embedding.copy_(target.embedding.float().mean(0).to(draft.fc.device))
    draft.norm.copy_(target.output_norm.float())
    if draft.markov_w1 is not None:
        draft.markov_w1.copy_(
            _principal(target.embedding.float(), s.markov_rank).to(draft.fc.device)
        )
    for layer, source in zip(draft.layers, sources, strict=True):
        _copy_layer(layer, target, source)


def _copy_layer(layer: DraftLayer, target: TorchTarget, source: int) -> None:
    c, s, own = target.config, layer.shape, target.layers[source]
    if not isinstance(own, Layer):
        return  # a hybrid layer computes something else: nothing of it carries over
    layer.input_layernorm.copy_(own.attn_norm.float())
    layer.post_attention_layernorm.copy_(own.ffn_norm.float())
    if (c.heads, c.kv_heads, c.head_size) == (s.heads, s.kv_heads, s.head_size):
        width, outer = c.heads * c.head_size, c.kv_heads * c.head_size
        q, k, v = own.qkv.float().split((width, outer, outer))
        for name, value in (
            ("q_proj", q),
            ("k_proj", k),
            ("v_proj", v),
            ("o_proj", own.output.float()),
        ):
            getattr(layer, name).copy_(value)
    if c.n_ff == s.n_ff:
        gate, up = own.gate_up.float().chunk(2)
        layer.gate_proj.copy_(gate)
        layer.up_proj.copy_(up)
        layer.down_proj.copy_(own.down.float())


def _principal(table: Tensor, rank: int) -> Tensor:
    """The rows of a table in its `rank` strongest directions, scaled to a mean square of 1."""
    centred = table - table.mean(0)
    _, vectors = torch.linalg.eigh((centred.T @ centred).double())
    reduced = centred @ vectors[:, -rank:].to(centred.dtype)
    return reduced / reduced.square().mean().sqrt()
