"""Writing a hybrid model as a GGUF file that llama.cpp and this engine load: names, metadata, tensor formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkinfer.gguf import GGUFFile, Typed, write_gguf
from sparkinfer.models.config import ModelConfig
from sparkinfer.quant.encode import quantize
from sparkinfer.quant.formats import QUANT_FORMATS
from sparkinfer.training.hybrid import HybridModel
from sparkinfer.training.hybrid_weights import file_tensors

# As in public files: what decides and what is small stays exact.
_EXACT = ("ssm_alpha", "ssm_beta", "ssm_conv1d", "ffn_gate_inp")
_FALLBACK = ("Q8_0", "F32")  # where a row is no multiple of a format's block
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "Q4_K": 15, "Q6_K": 18}


@dataclass(frozen=True)
class Formats:
    """Formats of the layers' matrices and of the embedding (which is the LM head too where there is no other)."""

    matrices: str = "Q4_K"
    table: str = "Q4_K"


def format_of(name: str, shape: tuple[int, ...], formats: Formats) -> str:
    """The format of a tensor; `shape` slowest dimension first."""
    if len(shape) == 1 or any(part in name for part in _EXACT):
        return "F32"
    wanted = formats.table if name in ("token_embd.weight", "output.weight") else formats.matrices
    for kind in (wanted, *_FALLBACK):
        if shape[-1] % QUANT_FORMATS[kind].block_size == 0:
            return kind
    raise AssertionError("F32 has blocks of one value")


def write_target_gguf(
    path: Path,
    model: HybridModel,
    tokenizer: GGUFFile,
    *,
    name: str,
    formats: Formats | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Write the model with the tokenizer and chat template of `tokenizer`; the format of every tensor.

    `extra` metadata is added as it is.
    """
    formats = formats or Formats()
    rows, kinds = [], {}
    for tensor, values in file_tensors(model):
        kind = format_of(tensor, values.shape, formats)
        rows.append((tensor, values.shape[::-1], kind, quantize(kind, values, fit=True)))
        kinds[tensor] = kind
    metadata = {
        **_general(model.config, name, formats),
        **_shape(model.config),
        **_tokenizer(tokenizer),
        **(extra or {}),
    }
    write_gguf(path, metadata, rows)
    return kinds


def _general(config: ModelConfig, name: str, formats: Formats) -> dict[str, Any]:
    return {
        "general.architecture": config.architecture,
        "general.type": "model",
        "general.name": name,
        "general.file_type": _FILE_TYPES.get(formats.matrices, 0),
        "general.quantization_version": 2,
    }


def _shape(config: ModelConfig) -> dict[str, Any]:
    arch, gdn, moe = config.architecture, config.gdn, config.moe
    assert gdn is not None
    pairs = config.rotated // 2
    # Pairs take their position from time, height, width in turn; all are covered, so for text this is plain rotation.
    sections = [(pairs + 2 - axis) // 3 for axis in range(3)] + [0]
    interval = config.recurrent.index(False) + 1
    values: dict[str, Any] = {
        "block_count": config.n_layers,
        "context_length": config.context_length,
        "embedding_length": config.n_embd,
        "vocab_size": config.n_vocab,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_size,
        "attention.value_length": config.head_size,
        "attention.layer_norm_rms_epsilon": float(config.eps),
        "rope.dimension_count": config.rotated,
        "rope.dimension_sections": Typed(sections, "int32"),
        "rope.freq_base": float(config.rope_base),
        "full_attention_interval": interval,
        "ssm.conv_kernel": gdn.taps,
        "ssm.state_size": gdn.head_size,
        "ssm.group_count": gdn.key_heads,
        "ssm.time_step_rank": gdn.value_heads,
        "ssm.inner_size": gdn.value_width,
    }
    if config.recurrent != tuple((n + 1) % interval != 0 for n in range(config.n_layers)):
        values["attention.recurrent_layers"] = Typed(list(config.recurrent), "bool")
    if moe is None:
        values["feed_forward_length"] = config.n_ff
    else:
        values |= {
            "expert_count": moe.experts,
            "expert_used_count": moe.used,
            "expert_feed_forward_length": moe.width,
            "expert_shared_feed_forward_length": moe.shared,
        }
    return {f"{arch}.{key}": value for key, value in values.items()}


def _tokenizer(file: GGUFFile) -> dict[str, Any]:
    """All tokenizer keys of a file, with their types."""
    return {
        key: Typed(value, file.type_name(key).removeprefix("array of "))
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.")
    }
