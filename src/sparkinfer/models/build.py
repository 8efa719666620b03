"""Names, shapes and loading of the blocks that several architectures share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparkinfer.kernels.shapes import Heads, RecurrentShape
from sparkinfer.models.config import MAX_WIDTH, ModelConfig
from sparkinfer.models.layers import Attention, FeedForward
from sparkinfer.models.weights import Shape, Weights


@dataclass(frozen=True)
class Architecture:
    """`expected(config, layer)`: tensors and GGUF shapes of a layer;
    `build(weights, config, layer)`: its two
    blocks; `interleaved`: rotary positions turn adjacent pairs instead of halves.
    """

    expected: Callable[[ModelConfig, int], dict[str, Shape]]
    build: Callable[[Weights, ModelConfig, int], tuple[Any, Any]]
    interleaved: bool = False


def recurrent_shape(config: ModelConfig) -> RecurrentShape:
    """Shape of the state of a model that has recurrent layers."""
    gdn = config.gdn
    assert gdn is not None
    return RecurrentShape(
        layers=sum(config.recurrent),
        channels=gdn.channels,
        taps=gdn.taps,
        key_heads=gdn.key_heads,
        value_heads=gdn.value_heads,
        head_size=gdn.head_size,
        window=MAX_WIDTH,
    )


def attention_shapes(
    config: ModelConfig, prefix: str, *, gated: bool = False, head_norms: bool = False
) -> dict[str, Shape]:
    """Tensors of an attention block and the norm before it."""
    width, kv_width = config.heads * config.head_size, config.kv_heads * config.head_size
    shapes: dict[str, Shape] = {
        f"{prefix}attn_norm.weight": (config.n_embd,),
        f"{prefix}attn_q.weight": (config.n_embd, width * (2 if gated else 1)),
        f"{prefix}attn_k.weight": (config.n_embd, kv_width),
        f"{prefix}attn_v.weight": (config.n_embd, kv_width),
        f"{prefix}attn_output.weight": (width, config.n_embd),
    }
    if head_norms:
        shapes[f"{prefix}attn_q_norm.weight"] = (config.head_size,)
        shapes[f"{prefix}attn_k_norm.weight"] = (config.head_size,)
    return shapes


def build_attention(
    weights: Weights,
    config: ModelConfig,
    prefix: str,
    cache_layer: int,
    *,
    interleaved: bool,
    gated: bool = False,
    head_norms: bool = False,
) -> Attention:
    """Load an attention block; `cache_layer` is its place among the attention layers."""
    shape = Heads(
        layer=cache_layer,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        rotated=config.rotated,
        interleaved=interleaved,
        gated=gated,
        eps=config.eps,
    )
    return Attention(
        shape=shape,
        norm=weights.vector(f"{prefix}attn_norm.weight"),
        q=weights.matrix(f"{prefix}attn_q.weight"),
        k=weights.matrix(f"{prefix}attn_k.weight"),
        v=weights.matrix(f"{prefix}attn_v.weight"),
        output=weights.matrix(f"{prefix}attn_output.weight"),
        q_norm=weights.vector(f"{prefix}attn_q_norm.weight") if head_norms else None,
        k_norm=weights.vector(f"{prefix}attn_k_norm.weight") if head_norms else None,
    )


def feed_forward_shapes(config: ModelConfig, prefix: str, norm: str) -> dict[str, Shape]:
    """Tensors of a SwiGLU block and the norm before it."""
    return {
        f"{prefix}{norm}.weight": (config.n_embd,),
        f"{prefix}ffn_gate.weight": (config.n_embd, config.n_ff),
        f"{prefix}ffn_up.weight": (config.n_embd, config.n_ff),
        f"{prefix}ffn_down.weight": (config.n_ff, config.n_embd),
    }


def build_feed_forward(weights: Weights, prefix: str, norm: str) -> FeedForward:
    """Load a SwiGLU block."""
    gate, up = weights.pair(f"{prefix}ffn_gate.weight", f"{prefix}ffn_up.weight")
    return FeedForward(
        norm=weights.vector(f"{prefix}{norm}.weight"),
        gate=gate,
        up=up,
        down=weights.matrix(f"{prefix}ffn_down.weight"),
    )
