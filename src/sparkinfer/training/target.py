"""TorchTarget: a model in plain torch, with the weights that will be served. The llama and qwen3 kinds are here, the
hybrid ones in `hybrid`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkinfer.errors import UnsupportedError
from sparkinfer.gguf import ModelFile
from sparkinfer.models.config import ModelConfig, read_config
from sparkinfer.quant.formats import QUANT_FORMATS, dequantize

KINDS = ("llama", "qwen3")


def rope_table(head_size: int, base: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotation angles, float32 [*positions, head_size / 2]."""
    half = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None] * base ** (-half / head_size)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of the last dimension against each other; cos and sin broadcast against a half of x."""
    first, second = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight.to(x.dtype)


class KeyValues:
    """Keys and values of a batch in lock step, [layers] of [rows, kv_heads, length, head_size]."""

    def __init__(self, target: TorchTarget, rows: int, length: int) -> None:
        c = target.config
        shape = (rows, c.kv_heads, length, c.head_size)
        make = lambda: torch.empty(shape, dtype=target.dtype, device=target.device)  # noqa: E731
        self.keys = [make() for _ in range(c.n_layers)]
        self.values = [make() for _ in range(c.n_layers)]


class Layer(nn.Module):
    """One decoder layer. q, k, v and gate, up are stacked along their outputs."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.eps, self.head_norms = config.eps, "q_norm" in tensors
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    def _heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b, heads, n, hd], keys and values [b, kv_heads, n, hd] of the stream [b, n, n_embd]."""
        b, n, _ = x.shape
        qkv = F.linear(rms_norm(x, self.attn_norm, self.eps), self.qkv)
        qkv = qkv.view(b, n, self.heads + 2 * self.kv_heads, self.head_size).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.head_norms:
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """The stream after the output projection and the feed-forward block."""
        x = x + F.linear(attended, self.output)
        gate, up = F.linear(rms_norm(x, self.ffn_norm, self.eps), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Whole sequences: stream [b, n, n_embd] to stream."""
        b, n, _ = x.shape
        q, k, v = self._heads(x, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._rest(x, y.transpose(1, 2).reshape(b, n, -1))

    def compile_append(self) -> None:
        """Compile the parts of `append` around the attention, whose length changes with every token."""
        self._heads = torch.compile(self._heads, dynamic=False)  # type: ignore[method-assign]
        self._rest = torch.compile(self._rest, dynamic=False)  # type: ignore[method-assign]

    def append(
        self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, position: int
    ) -> Tensor:
        """One token of every row at `position`, attending to the cache, which gets its key and value."""
        b = len(x)
        q, k, v = self._heads(x, cos, sin)
        keys[:, :, position], values[:, :, position] = k[:, :, 0], v[:, :, 0]
        # The query heads of a group become rows of one attention: no key is read twice.
        grouped = q.view(b, self.kv_heads, self.heads // self.kv_heads, self.head_size)
        seen = slice(0, position + 1)
        y = F.scaled_dot_product_attention(grouped, keys[:, :, seen], values[:, :, seen])
        return self._rest(x, y.reshape(b, 1, -1))


class TorchTarget(nn.Module):
    """The frozen target. Features are its residual stream after chosen layers, before the final norm."""

    recordable = True  # `graph_writer` knows how to record its step

    def __init__(
        self, config: ModelConfig, tensors: dict[str, Tensor], layers: list[Layer]
    ) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layers)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def device(self) -> torch.device:
        return torch.device(self.embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.embedding.dtype
        return dtype

    def compile_append(self) -> None:
        """Compile what `step` runs; worth it from some thousand tokens on."""
        for layer in self.layers:
            layer.compile_append()

    def new_cache(self, rows: int, length: int) -> Any:
        """What `step` needs of `rows` sequences of up to `length` tokens in lock step."""
        return KeyValues(self, rows, length)

    @torch.no_grad()
    def features(
        self, tokens: Tensor, taps: Sequence[int], *, final: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Streams after the tapped layers side by side [b, n, taps x n_embd]; with `final` also the normed last one.

        Layers above the highest tap are skipped unless `final` asks for them.
        """
        c = self.config
        cos, sin = rope_table(
            c.rotated, c.rope_base, torch.arange(tokens.shape[1], device=self.device)
        )
        x = F.embedding(tokens, self.embedding)
        kept: dict[int, Tensor] = {}
        last = c.n_layers if final else max(taps, default=-1) + 1
        for index in range(last):
            x = self.layers[index](x, cos, sin)
            if index in taps:
                kept[index] = x
        streams = torch.cat([kept[tap] for tap in taps], -1)
        return streams, rms_norm(x, self.output_norm, c.eps) if final else None

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Any, position: int) -> Tensor:
        """Logits [b, n_vocab] after one token of every row at `position`."""
        c = self.config
        place = torch.full((1,), position, device=self.device)
        cos, sin = rope_table(c.head_size, c.rope_base, place)
        x = F.embedding(tokens, self.embedding)[:, None]
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x = layer.append(x, cos, sin, keys, values, position)
        return F.linear(rms_norm(x[:, 0], self.output_norm, c.eps), self.head)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [b, n, n_vocab] of whole sequences: for tests and small checks."""
        _, final = self.features(tokens, (0,), final=True)
        assert final is not None
        return F.linear(final, self.head)


def load_torch_target(
    file: ModelFile, device: str | torch.device, dtype: torch.dtype
) -> TorchTarget:
    """Read a target. Raises UnsupportedError for a kind that is not supported."""
    from sparkinfer.training import hybrid, hybrid_weights  # these build on this module

    if file.architecture in hybrid.KINDS:
        return hybrid_weights.load_hybrid(file, device, dtype)
    if file.architecture not in KINDS:
        accepted = ", ".join((*KINDS, *hybrid.KINDS))
        raise UnsupportedError(
            f"cannot train a draft for a {file.architecture} target; accepted: {accepted}"
        )
    config = read_config(file)
    if config.rotated != config.head_size:
        raise UnsupportedError(
            f"rope.dimension_count {config.rotated} of head size {config.head_size}: both must be equal to train"
        )
    if "rope_freqs.weight" in file.tensors:
        raise UnsupportedError("rope_freqs.weight: scaled rotations are not supported in training")
    read = WeightReader(file, device, dtype)
    layers = [_layer(read, config, f"blk.{index}.") for index in range(config.n_layers)]
    embedding = read("token_embd.weight")
    tensors = {
        "embedding": embedding,
        "output_norm": read("output_norm.weight"),
        "head": read("output.weight") if "output.weight" in file.tensors else embedding,
    }
    return TorchTarget(config, tensors, layers).eval()


class WeightReader:
    """Tensors of a file as torch tensors, in row-major order."""

    def __init__(self, file: ModelFile, device: str | torch.device, dtype: torch.dtype) -> None:
        self.file, self.device, self.dtype = file, device, dtype

    def __call__(self, name: str) -> Tensor:
        self.file.require_decodable([name])
        info = self.file.tensors[name]
        blocks = self.file.data(name).reshape(-1, QUANT_FORMATS[info.type_name].block_bytes)
        values = np.asarray(dequantize(info.type_name, blocks), np.float32)
        tensor = torch.from_numpy(values.reshape(info.shape[::-1]).copy())
        return tensor.to(self.device, self.dtype)


def _layer(read: WeightReader, config: ModelConfig, prefix: str) -> Layer:
    q, k = read(prefix + "attn_q.weight"), read(prefix + "attn_k.weight")
    if config.architecture == "llama":
        q, k = _halves(q, config.head_size), _halves(k, config.head_size)
    tensors = {
        "attn_norm": read(prefix + "attn_norm.weight"),
        "qkv": torch.cat((q, k, read(prefix + "attn_v.weight"))),
        "output": read(prefix + "attn_output.weight"),
        "ffn_norm": read(prefix + "ffn_norm.weight"),
        "gate_up": torch.cat((read(prefix + "ffn_gate.weight"), read(prefix + "ffn_up.weight"))),
        "down": read(prefix + "ffn_down.weight"),
    }
    if config.architecture == "qwen3":
        tensors["q_norm"] = read(prefix + "attn_q_norm.weight")
        tensors["k_norm"] = read(prefix + "attn_k_norm.weight")
    return Layer(config, tensors)


def _halves(weight: Tensor, head_size: int) -> Tensor:
    """Rows for a rotation of adjacent pairs, reordered for a rotation of halves."""
    outputs, inputs = weight.shape
    pairs = weight.view(outputs // head_size, head_size // 2, 2, inputs)
    return pairs.transpose(1, 2).reshape(outputs, inputs)
