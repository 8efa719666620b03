"""A GGUF file's model as a folder of safetensors, written the way published folders are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from sparkinfer.gguf import GGUFFile, open_gguf
from sparkinfer.models.config import ModelConfig, read_config
from sparkinfer.pretokenizers import build, pre_tokenizer
from sparkinfer.training.target import WeightReader

_COMMON = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj",
    "ffn_up_exps.weight": "mlp.experts.up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_KINDS = {"llama": "llama", "qwen3": "qwen3"}
_KINDS |= {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}


def write_model_folder(
    source: Path, folder: Path, *, each_expert: bool = False, dtype: torch.dtype = torch.float32
) -> None:
    """The model, tokenizer and chat template of a GGUF file; `each_expert`: a tensor for each expert."""
    folder.mkdir(parents=True, exist_ok=True)
    with open_gguf(source) as file:
        config = read_config(file)
        (folder / "config.json").write_text(json.dumps(_config(config, file)))
        tensors = {name: value.to(dtype) for name, value in _tensors(config, file).items()}
        save_file(_experts(tensors, each_expert), folder / "model.safetensors")
        _write_tokenizer(folder, file)


def change_config(folder: Path, **values: Any) -> None:
    """Set keys of config.json; None takes one away."""
    path = folder / "config.json"
    stored = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in stored.items() if value is not None}))


def _config(c: ModelConfig, file: GGUFFile) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model_type": _KINDS[c.architecture],
        "vocab_size": c.n_vocab,
        "hidden_size": c.n_embd,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": c.context_length,
        "rms_norm_eps": c.eps,
        "rope_parameters": {
            "rope_theta": c.rope_base,
            "rope_type": "default",
            "partial_rotary_factor": c.rotated / c.head_size,
        },
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": [file.metadata["tokenizer.ggml.eos_token_id"], 0],
    }
    if c.gdn:
        values |= {
            "linear_conv_kernel_dim": c.gdn.taps,
            "linear_key_head_dim": c.gdn.head_size,
            "linear_value_head_dim": c.gdn.head_size,
            "linear_num_key_heads": c.gdn.key_heads,
            "linear_num_value_heads": c.gdn.value_heads,
            "layer_types": [
                "linear_attention" if recurrent else "full_attention" for recurrent in c.recurrent
            ],
        }
    if c.moe:
        return values | {
            "num_experts": c.moe.experts,
            "num_experts_per_tok": c.moe.used,
            "moe_intermediate_size": c.moe.width,
            "shared_expert_intermediate_size": c.moe.shared,
        }
    return values | {"intermediate_size": c.n_ff}


def _tensors(c: ModelConfig, file: GGUFFile) -> dict[str, torch.Tensor]:
    read = WeightReader(file, "cpu", torch.float32)
    tensors = {}
    for name in file.tensors:
        value, (_, layer, rest) = read(name), [*name.split(".", 2), "", ""][:3]
        if name in _TOP:
            known = _TOP[name]
        else:
            known = f"model.layers.{layer}.{_COMMON[rest]}"
        if c.gdn and name.endswith("norm.weight") and "ssm_norm" not in name:
            value = value - 1
        elif c.architecture == "llama" and rest in ("attn_q.weight", "attn_k.weight"):
            pairs = value.reshape(-1, c.head_size // 2, 2, value.shape[1])
            value = pairs.transpose(1, 2).reshape(value.shape)
        elif c.gdn:
            value = _delta_net(c, rest, value)
        tensors[known] = value.contiguous()
    return tensors


def _delta_net(c: ModelConfig, name: str, value: torch.Tensor) -> torch.Tensor:
    """Value heads one key head's after another's, as published folders have them."""
    assert c.gdn is not None
    g = c.gdn
    heads = torch.arange(g.value_heads).view(-1, g.key_heads).T.flatten()
    rows = (heads[:, None] * g.head_size + torch.arange(g.head_size)).flatten()
    after = torch.cat((torch.arange(2 * g.key_width), 2 * g.key_width + rows))
    match name:
        case "ssm_a":
            return value.neg().log()[heads]
        case "ssm_alpha.weight" | "ssm_beta.weight" | "ssm_dt.bias":
            return value[heads]
        case "attn_gate.weight":
            return value[rows]
        case "attn_qkv.weight":
            return value[after]
        case "ssm_conv1d.weight":
            return value[after][:, None]
        case "ssm_out.weight":
            return value[:, rows]
        case "ffn_gate_inp_shexp.weight":
            return value[None]
    return value


def _experts(tensors: dict[str, torch.Tensor], each: bool) -> dict[str, torch.Tensor]:
    out = {}
    for name, value in tensors.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith("mlp.experts"):
            out[name] = value
        elif each:
            out |= {
                f"{stem}.{number}.{last}.weight": part.clone() for number, part in enumerate(value)
            }
        elif last == "down_proj":
            out[name] = value
        elif last == "gate_proj":
            out[f"{stem}.gate_up_proj"] = torch.cat((value, tensors[f"{stem}.up_proj"]), 1)
    return out


def _write_tokenizer(folder: Path, file: GGUFFile) -> None:
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    tokens, types = keys["tokens"], keys["token_type"]
    normal = {text: token for token, text in enumerate(tokens) if types[token] in (1, 3, 4)}
    rule = pre_tokenizer(keys["pre"])
    merges = [tuple(line.split(" ")) for line in keys["merges"]]
    library = Library(BPE(vocab=normal, merges=merges, ignore_merges=rule.ignore_merges))
    library.pre_tokenizer = build(rule)
    library.add_special_tokens(
        [AddedToken(text, special=True) for text, token in normal.items() if types[token] == 3]
    )
    library.add_tokens(
        [AddedToken(text, special=False) for text, token in normal.items() if types[token] == 4]
    )
    library.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": {"content": tokens[keys["eos_token_id"]]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(file.metadata["tokenizer.chat_template"])


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(np.abs((a - b).numpy()).max())
