"""Write a DFlash draft of a published draft's real shape with random weights: its network at full cost, no acceptance.

python benchmarks/random_draft.py qwen3.6-35b-a3b FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


@dataclass(frozen=True)
class Shape:
    """Facts of a published checkpoint's config.json."""

    hidden: int
    wide: int
    windows: tuple[int, ...]  # 0: full attention
    heads: int
    kv_heads: int
    head_size: int
    taps: tuple[int, ...]
    target_layers: int
    mask: int
    vocabulary: int = 248320
    base: float = 1e7
    block: int = 16
    rank: int = 0  # of a Markov head
    known: int = 0  # tokens of a vocabulary of its own, of which `active` always have a row
    active: int = 0


SHAPES = {
    "qwen3.6-35b-a3b": Shape(
        2048, 6144, (4096,) * 5 + (0,), 32, 8, 128, (1, 6, 11, 16, 22, 27, 32, 37), 40, 248077
    ),
    "qwen3.5-9b": Shape(4096, 12288, (0,) * 5, 32, 8, 128, (1, 8, 15, 22, 29), 32, 248070),
}
SHAPES["qwen3.6-35b-a3b-markov"] = replace(  # as `sparkinfer train` writes them
    SHAPES["qwen3.6-35b-a3b"], rank=64, known=32768, active=16384
)


def config(shape: Shape) -> dict[str, Any]:
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.wide,
        "vocab_size": shape.vocabulary,
        "num_target_layers": shape.target_layers,
        "num_hidden_layers": len(shape.windows),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": shape.base, "rope_type": "default"},
        "max_position_embeddings": 262144,
        "layer_types": [kinds[window > 0] for window in shape.windows],
        "sliding_window": max(shape.windows) or None,
        "use_sliding_window": max(shape.windows) > 0,
        "dflash_config": {
            "mask_token_id": shape.mask,
            "target_layer_ids": list(shape.taps),
            "block_size": shape.block,
            **({"draft_active_size": shape.active} if shape.active else {}),
        },
    }


def tensors(shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor in float16: scaled so that the stream neither grows nor fades."""
    rng = np.random.default_rng(seed)
    q, kv, h = shape.heads * shape.head_size, shape.kv_heads * shape.head_size, shape.hidden

    def matrix(outputs: int, inputs: int) -> np.ndarray:
        values = rng.standard_normal((outputs, inputs), np.float32)
        return (values / np.float32(inputs**0.5)).astype(np.float16)

    def norm(width: int) -> np.ndarray:
        return np.ones(width, np.float16)

    found = {
        "fc.weight": matrix(h, len(shape.taps) * h),
        "hidden_norm.weight": norm(h),
        "norm.weight": norm(h),
    }
    for layer in range(len(shape.windows)):
        prefix = f"layers.{layer}."
        found |= {
            f"{prefix}input_layernorm.weight": norm(h),
            f"{prefix}post_attention_layernorm.weight": norm(h),
            f"{prefix}self_attn.q_proj.weight": matrix(q, h),
            f"{prefix}self_attn.k_proj.weight": matrix(kv, h),
            f"{prefix}self_attn.v_proj.weight": matrix(kv, h),
            f"{prefix}self_attn.o_proj.weight": matrix(h, q),
            f"{prefix}self_attn.q_norm.weight": norm(shape.head_size),
            f"{prefix}self_attn.k_norm.weight": norm(shape.head_size),
            f"{prefix}mlp.gate_proj.weight": matrix(shape.wide, h),
            f"{prefix}mlp.up_proj.weight": matrix(shape.wide, h),
            f"{prefix}mlp.down_proj.weight": matrix(h, shape.wide),
        }
    if shape.rank:
        found["markov_head.markov_w1.weight"] = matrix(shape.vocabulary, shape.rank)
        found["markov_head.markov_w2.weight"] = matrix(shape.known or shape.vocabulary, shape.rank)
    if shape.known:
        found["draft_ids"] = rng.permutation(shape.vocabulary)[: shape.known].astype(np.int32)
    return found


def write(name: str, folder: Path) -> Path:
    """config.json and model.safetensors in `folder`."""
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape)))
    save_file(tensors(shape), folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    print(write(sys.argv[1], Path(sys.argv[2])))
