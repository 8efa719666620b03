"""Qwen3.5 and Qwen3.6 hybrids: Gated DeltaNet and gated attention, a dense or a mixture-of-experts feed-forward."""

from typing import Any

import numpy as np

from sparkinfer.errors import UnsupportedError
from sparkinfer.models.build import (
    Architecture,
    attention_shapes,
    build_attention,
    build_feed_forward,
    feed_forward_shapes,
    recurrent_shape,
)
from sparkinfer.models.config import GdnConfig, ModelConfig, MoeConfig
from sparkinfer.models.layers import Attention, FeedForward, GatedDeltaNet, MixtureOfExperts
from sparkinfer.models.weights import Shape, Weights

_NORM = "post_attention_norm"


def expected(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """Tensors of one layer and their GGUF shapes."""
    prefix = f"blk.{layer}."
    if config.recurrent[layer]:
        assert config.gdn is not None
        mixer = _gdn_shapes(config.n_embd, config.gdn, prefix)
    else:
        mixer = attention_shapes(config, prefix, gated=True, head_norms=True)
    if config.moe is None:
        return mixer | feed_forward_shapes(config, prefix, _NORM)
    return mixer | _moe_shapes(config.n_embd, config.moe, prefix)


def build(weights: Weights, config: ModelConfig, layer: int) -> tuple[Any, Any]:
    """Load one layer."""
    prefix = f"blk.{layer}."
    place = sum(1 for before in config.recurrent[:layer] if before == config.recurrent[layer])
    mixer: Attention | GatedDeltaNet
    if config.recurrent[layer]:
        mixer = _build_gdn(weights, config, prefix, place)
    else:
        mixer = build_attention(
            weights, config, prefix, place, interleaved=False, gated=True, head_norms=True
        )
    feed_forward: FeedForward | MixtureOfExperts
    if config.moe is None:
        feed_forward = build_feed_forward(weights, prefix, _NORM)
    else:
        feed_forward = _build_moe(weights, config.moe, prefix)
    return mixer, feed_forward


def _gdn_shapes(n_embd: int, gdn: GdnConfig, prefix: str) -> dict[str, Shape]:
    return {
        f"{prefix}attn_norm.weight": (n_embd,),
        f"{prefix}attn_qkv.weight": (n_embd, gdn.channels),
        f"{prefix}attn_gate.weight": (n_embd, gdn.value_width),
        f"{prefix}ssm_alpha.weight": (n_embd, gdn.value_heads),
        f"{prefix}ssm_beta.weight": (n_embd, gdn.value_heads),
        f"{prefix}ssm_conv1d.weight": (gdn.taps, gdn.channels),
        f"{prefix}ssm_a": (gdn.value_heads,),
        f"{prefix}ssm_dt.bias": (gdn.value_heads,),
        f"{prefix}ssm_norm.weight": (gdn.head_size,),
        f"{prefix}ssm_out.weight": (gdn.value_width, n_embd),
    }


def _build_gdn(weights: Weights, config: ModelConfig, prefix: str, place: int) -> GatedDeltaNet:
    gdn = config.gdn
    assert gdn is not None
    if gdn.head_size % 16 or gdn.channels % 16:
        raise UnsupportedError(f"ssm.state_size is {gdn.head_size}, expected a multiple of 16")
    conv = np.ascontiguousarray(weights.floats(f"{prefix}ssm_conv1d.weight").T)
    return GatedDeltaNet(
        shape=recurrent_shape(config),
        layer=place,
        norm=weights.vector(f"{prefix}attn_norm.weight"),
        qkv=weights.matrix(f"{prefix}attn_qkv.weight"),
        gate=weights.matrix(f"{prefix}attn_gate.weight"),
        alpha=weights.matrix(f"{prefix}ssm_alpha.weight"),
        beta=weights.matrix(f"{prefix}ssm_beta.weight"),
        conv_weight=weights.rows(conv),
        decay_rate=weights.vector(f"{prefix}ssm_a"),
        time_bias=weights.vector(f"{prefix}ssm_dt.bias"),
        head_norm=weights.vector(f"{prefix}ssm_norm.weight"),
        output=weights.matrix(f"{prefix}ssm_out.weight"),
    )


def _moe_shapes(n_embd: int, moe: MoeConfig, prefix: str) -> dict[str, Shape]:
    return {
        f"{prefix}{_NORM}.weight": (n_embd,),
        f"{prefix}ffn_gate_inp.weight": (n_embd, moe.experts),
        f"{prefix}ffn_gate_inp_shexp.weight": (n_embd,),
        f"{prefix}ffn_gate_exps.weight": (n_embd, moe.width, moe.experts),
        f"{prefix}ffn_up_exps.weight": (n_embd, moe.width, moe.experts),
        f"{prefix}ffn_down_exps.weight": (moe.width, n_embd, moe.experts),
        f"{prefix}ffn_gate_shexp.weight": (n_embd, moe.shared),
        f"{prefix}ffn_up_shexp.weight": (n_embd, moe.shared),
        f"{prefix}ffn_down_shexp.weight": (moe.shared, n_embd),
    }


def _build_moe(weights: Weights, moe: MoeConfig, prefix: str) -> MixtureOfExperts:
    gate, up = weights.pair(f"{prefix}ffn_gate_exps.weight", f"{prefix}ffn_up_exps.weight")
    shared_gate, shared_up = weights.pair(
        f"{prefix}ffn_gate_shexp.weight", f"{prefix}ffn_up_shexp.weight"
    )
    return MixtureOfExperts(
        experts=moe.experts,
        used=moe.used,
        norm=weights.vector(f"{prefix}{_NORM}.weight"),
        router=weights.matrix(f"{prefix}ffn_gate_inp.weight", f"{prefix}ffn_gate_inp_shexp.weight"),
        gate=gate,
        up=up,
        down=weights.experts(f"{prefix}ffn_down_exps.weight"),
        shared_gate=shared_gate,
        shared_up=shared_up,
        shared_down=weights.matrix(f"{prefix}ffn_down_shexp.weight"),
    )


ARCHITECTURE = Architecture(expected, build)
