"""Llama family: plain attention with adjacent-pair rotation, SwiGLU."""

from sparkinfer.models.build import (
    Architecture,
    attention_shapes,
    build_attention,
    build_feed_forward,
    feed_forward_shapes,
)
from sparkinfer.models.config import ModelConfig
from sparkinfer.models.layers import Attention, FeedForward
from sparkinfer.models.weights import Shape, Weights

INTERLEAVED = True  # the converter permutes the rows of q and k for adjacent pairs


def expected(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """Tensors of one layer and their GGUF shapes."""
    prefix = f"blk.{layer}."
    return attention_shapes(config, prefix) | feed_forward_shapes(config, prefix, "ffn_norm")


def build(weights: Weights, config: ModelConfig, layer: int) -> tuple[Attention, FeedForward]:
    """Load one layer."""
    prefix = f"blk.{layer}."
    mixer = build_attention(weights, config, prefix, layer, interleaved=INTERLEAVED)
    return mixer, build_feed_forward(weights, prefix, "ffn_norm")


ARCHITECTURE = Architecture(expected, build, INTERLEAVED)
