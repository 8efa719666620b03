"""config.json of a model folder under GGUF's keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkinfer.errors import GGUFError, MissingFileError, UnsupportedError

CONFIG = "config.json"
# model_type of a folder: architecture of a GGUF file. With and without a vision part around the text model.
ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_5": "qwen35",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_5_moe_text": "qwen35moe",
}
_RECURRENT, _FULL = "linear_attention", "full_attention"
_ROTARY = {"llama": 1.0, "qwen3": 1.0, "qwen35": 0.25, "qwen35moe": 0.25}  # of a head, by default
# What must hold where a key is there: the training's layers have no place for anything else.
_MUST_BE: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "attn_output_gate": True,
    "norm_topk_prob": True,
}


def read_json(path: Path) -> dict[str, Any]:
    """An object of a JSON file. Raises MissingFileError, GGUFError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MissingFileError(f"{path}: {error.strerror}; a model folder has it") from error
    except ValueError as error:
        raise GGUFError(f"{path} is no readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise GGUFError(f"{path} holds {type(value).__name__}, expected an object")
    return value


class FolderConfig:
    """The text model's part of a folder's config.json.

    Raises: MissingFileError, GGUFError for a missing or mistyped key, UnsupportedError for what cannot be trained for.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / CONFIG
        whole = read_json(self.path)
        text = whole.get("text_config")
        self.values: dict[str, Any] = {**whole, **(text if isinstance(text, dict) else {})}
        kind = str(self.values.get("model_type"))
        if kind not in ARCHITECTURES:
            accepted = ", ".join(ARCHITECTURES)
            raise UnsupportedError(
                f"{self.path}: cannot train a draft for model_type {kind!r}; accepted: {accepted}"
            )
        if "quantization_config" in whole:
            raise UnsupportedError(
                f"{self.path}: quantised safetensors cannot be read; give the model's F32, F16 or BF16 folder, or GGUF"
            )
        self.architecture = ARCHITECTURES[kind]
        self._check()

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int:
            raise self._expected(key, "a whole number")
        return value

    def number(self, key: str, default: float) -> float:
        return self._float(self.values, key, default)

    @property
    def tied(self) -> bool | None:
        """Whether the head is the embedding; None where the file does not say."""
        value = self.values.get("tie_word_embeddings")
        return value if isinstance(value, bool) else None

    @property
    def head_size(self) -> int:
        return self.integer("head_dim", self.integer("hidden_size") // max(1, self.heads))

    @property
    def heads(self) -> int:
        return self.integer("num_attention_heads")

    @property
    def recurrent(self) -> list[bool] | None:
        """Which layers have a state instead of a cache; None where the architecture has no such layers."""
        kinds = self.values.get("layer_types")
        count = self.integer("num_hidden_layers")
        hybrid = self.architecture.startswith("qwen35")
        if kinds is None:
            interval = self.integer("full_attention_interval", 4)
            return [(n + 1) % max(1, interval) != 0 for n in range(count)] if hybrid else None
        known = {_FULL, _RECURRENT} if hybrid else {_FULL}
        if not isinstance(kinds, list) or len(kinds) != count or not known.issuperset(kinds):
            raise self._expected("layer_types", f"{count} of {', '.join(sorted(known))}")
        return [kind == _RECURRENT for kind in kinds] if hybrid else None

    def metadata(self) -> dict[str, Any]:
        """GGUF's keys of the architecture and its values."""
        values: dict[str, Any] = {
            "block_count": self.integer("num_hidden_layers"),
            "context_length": self.integer("max_position_embeddings"),
            "embedding_length": self.integer("hidden_size"),
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.integer("num_key_value_heads", self.heads),
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "attention.layer_norm_rms_epsilon": self.number("rms_norm_eps", 1e-6),
            **self._rotation(),
        }
        if self.architecture == "qwen35moe":
            values |= {
                "expert_count": self.integer("num_experts"),
                "expert_used_count": self.integer("num_experts_per_tok"),
                "expert_feed_forward_length": self.integer("moe_intermediate_size"),
                "expert_shared_feed_forward_length": self.integer(
                    "shared_expert_intermediate_size"
                ),
            }
        else:
            values["feed_forward_length"] = self.integer("intermediate_size")
        if self.recurrent is not None:
            values |= self._delta_net()
            values["attention.recurrent_layers"] = self.recurrent
        named = {f"{self.architecture}.{key}": value for key, value in values.items()}
        name = self.path.parent.resolve().name
        return {"general.architecture": self.architecture, "general.name": name, **named}

    def _delta_net(self) -> dict[str, Any]:
        size, heads = self.integer("linear_key_head_dim"), self.integer("linear_num_value_heads")
        if self.integer("linear_value_head_dim") != size:
            raise UnsupportedError(
                f"{self.path}: linear_value_head_dim differs from linear_key_head_dim {size}; both must be equal"
            )
        return {
            "ssm.conv_kernel": self.integer("linear_conv_kernel_dim"),
            "ssm.state_size": size,
            "ssm.group_count": self.integer("linear_num_key_heads"),
            "ssm.time_step_rank": heads,
            "ssm.inner_size": heads * size,
        }

    def _rotation(self) -> dict[str, Any]:
        """Keys of the rotation: older files have them beside the others, newer ones under `rope_parameters`."""
        parts = [self.values.get(key) for key in ("rope_parameters", "rope_scaling")]
        given: dict[str, Any] = {}
        for part in parts:
            given |= part if isinstance(part, dict) else {}
        kind = given.get("rope_type", given.get("type", "default"))
        if kind != "default":
            raise UnsupportedError(
                f"{self.path}: rope scaling {kind!r} is not supported in training; accepted: default"
            )
        both = {**self.values, **given}
        share = self._float(both, "partial_rotary_factor", _ROTARY[self.architecture])
        return {
            "rope.freq_base": self._float(both, "rope_theta", 10000.0),
            "rope.dimension_count": int(self.head_size * share),
        }

    def _float(self, values: Mapping[str, Any], key: str, default: float) -> float:
        value = values.get(key, default)
        if type(value) not in (int, float):
            raise GGUFError(f"{self.path}: {key} is {value!r}, expected a number")
        return float(value)

    def _check(self) -> None:
        for key, wanted in _MUST_BE.items():
            value = self.values.get(key, wanted)
            if value != wanted:
                raise UnsupportedError(
                    f"{self.path}: {key} is {value!r}, which training has no layer for; accepted: {wanted!r}"
                )

    def _expected(self, key: str, what: str) -> GGUFError:
        return GGUFError(f"{self.path}: {key} is {self.values.get(key)!r:.80}, expected {what}")
