"""Models with the layers of real ones: their shapes and tensor formats, random weights, a few layers only.

Blocks of weights repeat after a prime number of them, so a file of two gigabytes takes seconds to make.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from kernel_machine import random_blocks
from numpy.typing import NDArray

from sparkinfer.gguf.writer import write_gguf
from sparkinfer.quant.formats import QUANT_FORMATS, dequantize

POOL = 16381  # distinct blocks of a tensor, a prime


@dataclass(frozen=True)
class Shape:
    """A hybrid model; `recurrent` says what each layer is. `more_bits`: layers with wider formats in Q4_K_M's mix."""

    arch: str
    embed: int
    heads: int
    kv_heads: int
    head_size: int
    rotated: int
    key_heads: int
    value_heads: int
    gdn_size: int
    vocabulary: int
    recurrent: tuple[bool, ...]
    ff: int = 0
    experts: int = 0
    used: int = 0
    expert_ff: int = 0
    more_bits: tuple[int, ...] = ()


SHAPES = {
    "35B-A3B": Shape(
        "qwen35moe", 2048, 16, 2, 256, 64, 16, 32, 128, 248320, (True, False),
        experts=256, used=8, expert_ff=512,
    ),
    "9B": Shape(
        "qwen35", 4096, 16, 4, 256, 64, 16, 32, 128, 248320, (True, True, False, False),
        ff=12288, more_bits=(1, 2),
    ),
    "small": Shape(  # to try the tests themselves under the interpreter
        "qwen35moe", 256, 2, 1, 64, 32, 1, 2, 64, 320, (True, False), experts=8, used=2, expert_ff=256,
    ),
}  # fmt: skip


def format_of(shape: Shape, layer: int, name: str, dims: tuple[int, ...]) -> str:
    """The format in the published mixes: UD-Q4_K_M with experts, Q4_K_M without."""
    whole = ("norm.weight", "conv1d.weight", "gate_inp.weight", "gate_inp_shexp.weight")
    if len(dims) == 1 or name.endswith(whole):
        return "F32"
    if name == "output.weight":
        return "Q6_K"
    if name == "token_embd.weight":
        return "Q4_K"
    if shape.experts:
        return "Q5_K" if "down_exps" in name else "Q4_K" if "_exps" in name else "Q8_0"
    wider = layer in shape.more_bits and name in (
        "attn_v.weight",
        "attn_qkv.weight",
        "ffn_down.weight",
    )
    return "Q6_K" if wider else "Q4_K"


def scaled_blocks(kind: str, count: int, std: float, seed: int) -> NDArray[np.uint8]:
    """Blocks of `count` random values of mean 0 and this deviation (nearly), uint8 [blocks, bytes]."""
    spec = QUANT_FORMATS[kind]
    n_blocks = count // spec.block_size
    if kind == "F32":
        values = std * np.random.default_rng(seed).standard_normal(min(count, POOL * 64))
        return np.resize(values.astype(np.float32), count).view(np.uint8).reshape(n_blocks, 4)
    pool = random_blocks(kind, min(n_blocks, POOL) * spec.block_size, seed)
    factor = std / float(dequantize(kind, pool[:512]).std())
    for offset in spec.halves:
        half = np.ascontiguousarray(pool[:, offset : offset + 2]).view(np.float16)
        pool[:, offset : offset + 2] = (half * np.float32(factor)).astype(np.float16).view(np.uint8)
    return np.resize(pool, (n_blocks, spec.block_bytes))


def layer_tensors(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Name, GGUF shape and deviation of each tensor; norms have deviation 0 (they are ones)."""
    embed, value = shape.embed, shape.value_heads * shape.gdn_size
    channels = 2 * shape.key_heads * shape.gdn_size + value
    width, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size

    def matrix(name: str, inputs: int, *outputs: int, gain: float = 1.0) -> Any:
        return f"{name}.weight", (inputs, *outputs), gain * inputs**-0.5

    yield "attn_norm.weight", (embed,), 0.0
    if shape.recurrent[layer]:
        yield matrix("attn_qkv", embed, channels)
        yield matrix("attn_gate", embed, value)
        yield "ssm_conv1d.weight", (4, channels), 0.6
        yield matrix("ssm_alpha", embed, shape.value_heads)
        yield matrix("ssm_beta", embed, shape.value_heads)
        yield "ssm_a", (shape.value_heads,), -1.0
        yield "ssm_dt.bias", (shape.value_heads,), 1.0
        yield "ssm_norm.weight", (shape.gdn_size,), 0.0
        yield matrix("ssm_out", value, embed, gain=1.5)
    else:
        yield matrix("attn_q", embed, 2 * width)
        yield matrix("attn_k", embed, kv)
        yield matrix("attn_v", embed, kv)
        yield "attn_q_norm.weight", (shape.head_size,), 0.0
        yield "attn_k_norm.weight", (shape.head_size,), 0.0
        yield matrix("attn_output", width, embed, gain=1.5)
    yield "post_attention_norm.weight", (embed,), 0.0
    if not shape.experts:
        yield matrix("ffn_gate", embed, shape.ff)
        yield matrix("ffn_up", embed, shape.ff)
        yield matrix("ffn_down", shape.ff, embed, gain=2.0)
        return
    yield matrix("ffn_gate_inp", embed, shape.experts, gain=2.0)
    yield "ffn_gate_inp_shexp.weight", (embed,), embed**-0.5
    for kind, count in (("exps", (shape.experts,)), ("shexp", ())):
        yield matrix(f"ffn_gate_{kind}", embed, shape.expert_ff, *count)
        yield matrix(f"ffn_up_{kind}", embed, shape.expert_ff, *count)
        yield matrix(f"ffn_down_{kind}", shape.expert_ff, embed, *count, gain=2.0)


def values_of(kind: str, dims: tuple[int, ...], std: float, seed: int) -> NDArray[np.uint8]:
    if std == 0.0:
        return np.ones(prod(dims), np.float32).view(np.uint8)
    if std < 0:  # rates of decay: from 0.05 to 2
        rng = np.random.default_rng(seed)
        return -np.exp(rng.uniform(-3.0, 0.7, prod(dims))).astype(np.float32).view(np.uint8)
    return scaled_blocks(kind, prod(dims), std, seed)


def metadata(shape: Shape) -> dict[str, Any]:
    arch = shape.arch
    found: dict[str, Any] = {
        "block_count": len(shape.recurrent),
        "context_length": 262144,
        "embedding_length": shape.embed,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_size,
        "attention.value_length": shape.head_size,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.recurrent_layers": list(shape.recurrent),
        "rope.dimension_count": shape.rotated,
        "rope.freq_base": 1e7,
        "ssm.conv_kernel": 4,
        "ssm.state_size": shape.gdn_size,
        "ssm.group_count": shape.key_heads,
        "ssm.time_step_rank": shape.value_heads,
        "ssm.inner_size": shape.value_heads * shape.gdn_size,
    }
    if shape.experts:
        found |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.used,
            "expert_feed_forward_length": shape.expert_ff,
            "expert_shared_feed_forward_length": shape.expert_ff,
        }
    else:
        found["feed_forward_length"] = shape.ff
    return {"general.architecture": arch, **{f"{arch}.{key}": v for key, v in found.items()}}


def write_model(name: str, folder: Path) -> Path:
    """A GGUF file of this shape in `folder`."""
    shape, path = SHAPES[name], folder / f"{name}.gguf"
    tensors = [
        ("token_embd.weight", (shape.embed, shape.vocabulary), 1.0, -1),
        ("output_norm.weight", (shape.embed,), 0.0, -1),
        ("output.weight", (shape.embed, shape.vocabulary), 3 * shape.embed**-0.5, -1),
    ]
    for layer in range(len(shape.recurrent)):
        for tensor, dims, std in layer_tensors(shape, layer):
            tensors.append((f"blk.{layer}.{tensor}", dims, std, layer))
    rows = []
    for seed, (tensor, dims, std, layer) in enumerate(tensors):
        kind = format_of(shape, layer, tensor.split(".", 2)[-1] if layer >= 0 else tensor, dims)
        rows.append((tensor, dims, kind, values_of(kind, dims, std, seed)))
    write_gguf(path, metadata(shape), rows)
    return path
