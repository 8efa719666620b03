"""Random drafts for a golden target: as tensors, as files of every form, and as a naive numpy forward in float64."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from sparkinfer.gguf import Typed, write_gguf
from sparkinfer.kernels.attention.reference import visible

Floats = NDArray[np.float32]
H, VOCAB, TARGET_LAYERS = 64, 320, 4  # of llama-tiny-F32


@dataclass(frozen=True)
class Recipe:
    """Shape of a random draft; the defaults differ from the target's heads."""

    heads: int = 6
    kv_heads: int = 3
    head_size: int = 32
    n_ff: int = 96
    windows: tuple[int, ...] = (0, 0)
    causal: bool | None = None
    block: int = 6
    taps: tuple[int, ...] = (0, 2, 3)
    mask: int = 317
    base: float = 10000.0
    eps: float = 1e-6
    extra: tuple[tuple[str, Any], ...] = ()  # more of `dflash_config`
    top: tuple[tuple[str, Any], ...] = ()  # more of the top level
    seed: int = 0
    h: int = H

    @property
    def layer_causal(self) -> list[bool]:
        return [w > 0 if self.causal is None else self.causal for w in self.windows]

    def json(self) -> dict[str, Any]:
        """A config.json in the new layout."""
        names = {True: "sliding_attention", False: "full_attention"}
        window = max(self.windows)
        config: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "hidden_size": self.h,
            "intermediate_size": self.n_ff,
            "vocab_size": VOCAB,
            "num_target_layers": TARGET_LAYERS,
            "num_hidden_layers": len(self.windows),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "rms_norm_eps": self.eps,
            "rope_parameters": {"rope_theta": self.base, "rope_type": "default"},
            "max_position_embeddings": 4096,
            "layer_types": [names[w > 0] for w in self.windows],
            "sliding_window": window or None,
            "use_sliding_window": window > 0,
        }
        if self.causal is not None:
            config["is_causal"] = self.causal
        nested = {"mask_token_id": self.mask, "target_layer_ids": list(self.taps)}
        config["dflash_config"] = nested | {"block_size": self.block} | dict(self.extra)
        return config | dict(self.top)

    def tensors(self) -> dict[str, Floats]:
        """Every tensor, row-major, float32."""
        rng = np.random.default_rng(self.seed)
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size

        def matrix(outputs: int, inputs: int) -> Floats:
            return (1.4 * rng.standard_normal((outputs, inputs)) / inputs**0.5).astype(np.float32)

        def norm(width: int) -> Floats:
            return (1 + 0.3 * rng.standard_normal(width)).astype(np.float32)

        found = {
            "fc.weight": matrix(self.h, len(self.taps) * self.h),
            "hidden_norm.weight": norm(self.h),
            "norm.weight": norm(self.h),
        }
        for layer in range(len(self.windows)):
            prefix = f"layers.{layer}."
            found |= {
                f"{prefix}input_layernorm.weight": norm(self.h),
                f"{prefix}post_attention_layernorm.weight": norm(self.h),
                f"{prefix}self_attn.q_proj.weight": matrix(q, self.h),
                f"{prefix}self_attn.k_proj.weight": matrix(kv, self.h),
                f"{prefix}self_attn.v_proj.weight": matrix(kv, self.h),
                f"{prefix}self_attn.o_proj.weight": matrix(self.h, q),
                f"{prefix}self_attn.q_norm.weight": norm(self.head_size),
                f"{prefix}self_attn.k_norm.weight": norm(self.head_size),
                f"{prefix}mlp.gate_proj.weight": matrix(self.n_ff, self.h),
                f"{prefix}mlp.up_proj.weight": matrix(self.n_ff, self.h),
                f"{prefix}mlp.down_proj.weight": matrix(self.h, self.n_ff),
            }
        return found


def features(rows: int, taps: int = 3, seed: int = 5, h: int = H) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, taps * h)).astype(np.float32)


# ---- files ----


def write_folder(folder: Path, recipe: Recipe, tensors: Mapping[str, Any] | None = None) -> Path:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(recipe.json()))
    save_file(dict(recipe.tensors() if tensors is None else tensors), folder / "model.safetensors")
    return folder


_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str, upstream: bool) -> str:
    """What the two dialects call a tensor of the checkpoint."""
    parts = name.split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{_LAYER['.'.join(parts[2:-1])]}.weight"
    top = {
        "fc.weight": "fc.weight" if upstream else "dflash.fc.weight",
        "hidden_norm.weight": "enc.output_norm.weight" if upstream else "dflash.hidden_norm.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "embed_tokens.weight": "token_embd.weight",
    }
    return top.get(name, name)


def gguf_metadata(recipe: Recipe, arch: str) -> dict[str, Any]:
    upstream = arch == "dflash"
    own = "dflash." if upstream else f"{arch}.dflash."
    found: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.block_count": len(recipe.windows),
        f"{arch}.embedding_length": recipe.h,
        f"{arch}.feed_forward_length": recipe.n_ff,
        f"{arch}.attention.head_count": recipe.heads,
        f"{arch}.attention.head_count_kv": recipe.kv_heads,
        f"{arch}.attention.key_length": recipe.head_size,
        f"{arch}.attention.value_length": recipe.head_size,
        f"{arch}.attention.layer_norm_rms_epsilon": recipe.eps,
        f"{arch}.rope.freq_base": recipe.base,
        f"{arch}.context_length": 4096,
        f"{own}block_size": recipe.block,
    }
    if max(recipe.windows):
        found[f"{arch}.attention.sliding_window"] = max(recipe.windows)
        found[f"{arch}.attention.sliding_window_pattern"] = [w > 0 for w in recipe.windows]
    if recipe.causal is not None:
        found[f"{arch}.attention.causal"] = recipe.causal
    if upstream:
        found["dflash.target_layers"] = [tap + 1 for tap in recipe.taps]
        found["tokenizer.ggml.mask_token_id"] = recipe.mask
    else:
        found[f"{own}target_layer_ids"] = list(recipe.taps)
        found[f"{own}mask_token_id"] = recipe.mask
        found[f"{own}n_target_layers"] = TARGET_LAYERS
    return found


def write_gguf_draft(
    path: Path,
    recipe: Recipe,
    arch: str = "dflash",
    tensors: Mapping[str, tuple[str, Any]] | None = None,
) -> Path:
    """A GGUF draft; `tensors` gives type name and bytes of the checkpoint's tensors that are not float32."""
    given = tensors or {}
    rows = []
    for name, values in recipe.tensors().items():
        kind, data = given.get(name, ("F32", values))
        rows.append((gguf_name(name, arch == "dflash"), values.shape[::-1], kind, data))
    write_gguf(path, gguf_metadata(recipe, arch), rows)
    return path


def typed(values: NDArray[Any]) -> Typed:
    return Typed([int(v) for v in values], "int32")


# ---- the naive forward ----


def rms(x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def turn(x: Any, positions: Any, base: float) -> Any:
    """x [rows, heads, size], halves."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def block_hidden(
    recipe: Recipe, tensors: Mapping[str, Floats], context: Any, rows: Any, first: int = 0
) -> Any:
    """Final hidden states [block, n_embd] of the rows [block, n_embd] after the features [n, taps x n_embd].

    Everything at once from the formulas: one mask over context and block, no cache; `first` rows are missing.
    """
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    n, b, size = len(context), len(rows), recipe.head_size
    c = rms(context.astype(np.float64) @ w["fc.weight"].T, w["hidden_norm.weight"], recipe.eps)
    h = rows.astype(np.float64)
    for layer, window in enumerate(recipe.windows):
        p = f"layers.{layer}."
        x = rms(h, w[f"{p}input_layernorm.weight"], recipe.eps)
        q = (x @ w[f"{p}self_attn.q_proj.weight"].T).reshape(b, recipe.heads, size)
        both = np.concatenate([c, x])
        k = (both @ w[f"{p}self_attn.k_proj.weight"].T).reshape(n + b, recipe.kv_heads, size)
        v = (both @ w[f"{p}self_attn.v_proj.weight"].T).reshape(n + b, recipe.kv_heads, size)
        q = turn(
            rms(q, w[f"{p}self_attn.q_norm.weight"], recipe.eps), n + np.arange(b), recipe.base
        )
        k = turn(
            rms(k, w[f"{p}self_attn.k_norm.weight"], recipe.eps), np.arange(n + b), recipe.base
        )
        seen = visible(n, b, causal=recipe.layer_causal[layer], window=window, first=first)
        mixed = np.empty_like(q)
        for head in range(recipe.heads):
            g = head // (recipe.heads // recipe.kv_heads)
            scores = np.where(seen, q[:, head] @ k[:, g].T / np.sqrt(size), -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, g]
        h = h + mixed.reshape(b, -1) @ w[f"{p}self_attn.o_proj.weight"].T
        x = rms(h, w[f"{p}post_attention_layernorm.weight"], recipe.eps)
        gate = x @ w[f"{p}mlp.gate_proj.weight"].T
        up = x @ w[f"{p}mlp.up_proj.weight"].T
        h = h + (gate / (1 + np.exp(-gate)) * up) @ w[f"{p}mlp.down_proj.weight"].T
    return rms(h, w["norm.weight"], recipe.eps)
