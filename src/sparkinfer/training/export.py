"""Writing a draft: the safetensors layout of published drafts, and GGUF with the keys and names of llama.cpp.

Additions of ours, in both: `mask_embedding` [n_embd], the learnt embedding of the mask; `draft_ids` int32 [outputs],
the target ids of the draft's outputs where it has a vocabulary of its own. The rows of the LM head are stored only
where the draft has learnt its own; else they are the target's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkinfer.dflash.prior import ACCEPTANCE, CLAIMS, checked_prior
from sparkinfer.errors import GGUFError, MissingFileError
from sparkinfer.gguf import GGUFFile, Typed, write_gguf
from sparkinfer.quant.encode import BLOCK, quantize
from sparkinfer.training.config import DraftShape

Arrays = Mapping[str, npt.NDArray[Any]]

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {
    "lm_head": "output",
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
}
_OWN = ("mask_embedding", "draft_ids")  # stored without `.weight`
_FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
}  # llama.cpp's numbers of file types


def config_json(shape: DraftShape) -> dict[str, Any]:
    """The config of the safetensors layout."""
    kind = "sliding_attention" if shape.window else "full_attention"
    inner: dict[str, Any] = {
        "mask_token_id": shape.mask_token,
        "target_layer_ids": list(shape.taps),
        "block_size": shape.block,
        "causal": shape.causal,
        "variable_block": shape.causal,
        "sample_from_anchor": shape.from_anchor,
    }
    if shape.markov_rank:
        inner["markov_rank"] = shape.markov_rank
    if shape.vocabulary:
        inner["draft_vocab_size"] = shape.vocabulary
    if shape.active:
        inner["draft_active_size"] = shape.active
    if shape.own_head:
        inner["own_head"] = True
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": shape.n_embd,
        "intermediate_size": shape.n_ff,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_base,
        "max_position_embeddings": shape.context_length,
        "vocab_size": shape.n_vocab,
        "attention_bias": False,
        "layer_types": [kind] * shape.layers,
        "use_sliding_window": bool(shape.window),
        "sliding_window": shape.window or None,
        "num_target_layers": shape.target_layers,
        "block_size": shape.block,
        "is_causal": shape.causal,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "dflash_config": inner,
    }


def shape_of_config(config: Mapping[str, Any]) -> DraftShape:
    """The shape that `config_json` wrote. Raises GGUFError for a key that is missing."""
    inner = config.get("dflash_config", {})
    try:
        return DraftShape(
            n_embd=config["hidden_size"],
            n_ff=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_size=config["head_dim"],
            n_vocab=config["vocab_size"],
            target_layers=config["num_target_layers"],
            taps=tuple(inner["target_layer_ids"]),
            block=config["block_size"],
            from_anchor=inner["sample_from_anchor"],
            causal=config["is_causal"],
            window=config["sliding_window"] or 0,
            rope_base=config["rope_theta"],
            eps=config["rms_norm_eps"],
            context_length=config["max_position_embeddings"],
            mask_token=inner["mask_token_id"],
            vocabulary=inner.get("draft_vocab_size", 0),
            markov_rank=inner.get("markov_rank", 0),
            own_head=inner.get("own_head", False),
            active=inner.get("draft_active_size", 0),
        )
    except KeyError as error:
        raise GGUFError(f"the draft's config has no {error}") from None


def write_folder(folder: Path, shape: DraftShape, tensors: Arrays) -> None:
    """Write config.json and model.safetensors (bfloat16); names as `tensor_names` gives them."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(shape), indent=2) + "\n")
    stored = {
        name: torch.from_numpy(np.ascontiguousarray(array)).to(
            torch.int32 if name == "draft_ids" else torch.bfloat16
        )
        for name, array in tensors.items()
    }
    save_file(stored, str(folder / "model.safetensors"), metadata={"format": "pt"})


def read_folder(folder: Path) -> tuple[DraftShape, dict[str, npt.NDArray[Any]]]:
    """What `write_folder` wrote; floats as float32. Raises MissingFileError, GGUFError."""
    import torch
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "config.json").read_text())
        stored = load_file(str(folder / "model.safetensors"))
    except OSError as error:
        raise MissingFileError(f"cannot read the draft in {folder}: {error}") from error
    tensors = {
        name: (tensor if tensor.dtype == torch.int32 else tensor.float()).numpy()
        for name, tensor in stored.items()
    }
    return shape_of_config(config), tensors


def write_draft_gguf(
    path: Path,
    shape: DraftShape,
    tensors: Arrays,
    *,
    matrices: str = "Q8_0",
    table: str = "",
    name: str = "",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write one file of arch `dflash`: matrices in a block format, norms in F32.

    `table` is the format of the Markov head's two tables (default: that of the matrices). `extra` metadata is added
    as it is.
    """
    rows = []
    for source, array in tensors.items():
        rows.append(
            _row(gguf_name(source), array, (table or matrices) if "markov" in source else matrices)
        )
    kind = {"general.file_type": _FILE_TYPES[matrices]} if matrices in _FILE_TYPES else {}
    write_gguf(path, {**_metadata(shape, name), **kind, **(extra or {})}, rows)


def base_metadata(target: Mapping[str, Any]) -> dict[str, Any]:
    """What a draft's file says of the model it was trained for, from that one's metadata: name, home and licence."""
    of_base = {"name": "name", "organization": "organization", "repo_url": "repo_url"}
    named = {
        f"general.base_model.0.{ours}": target[f"general.{theirs}"]
        for ours, theirs in of_base.items()
        if target.get(f"general.{theirs}")
    }
    licence = {
        key: target[key]
        for key in ("general.license", "general.license.name", "general.license.link")
        if target.get(key)
    }
    return ({"general.base_model.count": 1, **named} if named else {}) | licence


def prior_metadata(acceptance: Sequence[float], claims: Sequence[float]) -> dict[str, Any]:
    """What a draft's file tells about its slots and claims (`dflash.prior`), as metadata."""
    checked_prior(acceptance, claims)
    values = {f"dflash.{ACCEPTANCE}": acceptance, f"dflash.{CLAIMS}": claims}
    return {key: Typed(list(numbers), "float32") for key, numbers in values.items() if numbers}


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor of the safetensors layout."""
    if name in _OWN:
        return name
    stem = name.removesuffix(".weight")
    if stem.startswith("layers."):
        _, layer, rest = stem.split(".", 2)
        return f"blk.{layer}.{_LAYER_NAMES[rest]}.weight"
    return f"{_NAMES[stem]}.weight"


def _row(name: str, array: npt.NDArray[Any], kind: str) -> tuple[str, tuple[int, ...], str, Any]:
    if name == "draft_ids":
        return name, array.shape, "I32", array.astype("<i4")
    fits = array.ndim == 2 and array.shape[1] % BLOCK == 0
    kind = kind if fits else "F32"
    return name, array.shape[::-1], kind, quantize(kind, array.astype(np.float32), fit=True)


def _metadata(shape: DraftShape, name: str) -> dict[str, Any]:
    arch = "dflash"
    values: dict[str, Any] = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": name or "DFlash draft",
        "general.quantization_version": 2,
        f"{arch}.block_count": shape.layers,
        f"{arch}.embedding_length": shape.n_embd,
        f"{arch}.feed_forward_length": shape.n_ff,
        f"{arch}.context_length": shape.context_length,
        f"{arch}.vocab_size": shape.n_vocab,
        f"{arch}.attention.head_count": shape.heads,
        f"{arch}.attention.head_count_kv": shape.kv_heads,
        f"{arch}.attention.key_length": shape.head_size,
        f"{arch}.attention.value_length": shape.head_size,
        f"{arch}.attention.layer_norm_rms_epsilon": float(shape.eps),
        f"{arch}.attention.causal": shape.causal,
        f"{arch}.rope.freq_base": float(shape.rope_base),
        f"{arch}.block_size": shape.block,
        f"{arch}.variable_block": shape.causal,
        f"{arch}.sample_from_anchor": shape.from_anchor,
        # Upstream counts inputs of layers: the stream after layer i is the input of layer i + 1.
        f"{arch}.target_layers": Typed([tap + 1 for tap in shape.taps], "int32"),
        f"{arch}.n_target_layers": shape.target_layers,
        "tokenizer.ggml.mask_token_id": shape.mask_token,
    }
    if shape.window:
        values[f"{arch}.attention.sliding_window"] = shape.window
        values[f"{arch}.attention.sliding_window_pattern"] = Typed([True] * shape.layers, "bool")
    if shape.markov_rank:
        values[f"{arch}.markov_rank"] = shape.markov_rank
    if shape.vocabulary:
        values[f"{arch}.draft_vocab_size"] = shape.vocabulary
    if shape.active:
        values[f"{arch}.draft_active_size"] = shape.active
    return values


def read_draft_gguf(file: GGUFFile) -> tuple[DraftShape, dict[str, npt.NDArray[Any]]]:
    """What `write_draft_gguf` wrote, dequantised, under the names of the safetensors layout. Raises GGUFError."""
    from sparkinfer.quant.formats import QUANT_FORMATS, dequantize

    shape = _shape_of_metadata(file)
    tensors: dict[str, npt.NDArray[Any]] = {}
    for source in tensor_names(shape):
        info = file.tensors.get(gguf_name(source))
        if info is None:
            raise GGUFError(f"{file.path} has no tensor {gguf_name(source)}")
        data = file.data(info.name)
        if info.type_name == "I32":
            tensors[source] = data.view("<i4").astype(np.int32)
            continue
        blocks = data.reshape(-1, QUANT_FORMATS[info.type_name].block_bytes)
        tensors[source] = dequantize(info.type_name, blocks).reshape(info.shape[::-1])
    return shape, tensors


def _shape_of_metadata(file: GGUFFile) -> DraftShape:
    def number(key: str, default: int | None = None) -> int:
        full = f"dflash.{key}"
        return file.require(full, int) if default is None else file.get(full, int, default)

    return DraftShape(
        n_embd=number("embedding_length"),
        n_ff=number("feed_forward_length"),
        layers=number("block_count"),
        heads=number("attention.head_count"),
        kv_heads=number("attention.head_count_kv"),
        head_size=number("attention.key_length"),
        n_vocab=number("vocab_size"),
        target_layers=number("n_target_layers"),
        taps=tuple(layer - 1 for layer in file.require("dflash.target_layers", list)),
        block=number("block_size"),
        from_anchor=file.get("dflash.sample_from_anchor", bool, False),
        causal=file.require("dflash.attention.causal", bool),
        window=number("attention.sliding_window", 0),
        rope_base=file.require("dflash.rope.freq_base", float),
        eps=file.require("dflash.attention.layer_norm_rms_epsilon", float),
        context_length=number("context_length"),
        mask_token=file.require("tokenizer.ggml.mask_token_id", int),
        vocabulary=number("draft_vocab_size", 0),
        markov_rank=number("markov_rank", 0),
        own_head="output.weight" in file.tensors,
        active=number("draft_active_size", 0),
    )


def tensor_names(shape: DraftShape) -> list[str]:
    """All tensors of a draft in the safetensors layout."""
    names = ["fc.weight", "hidden_norm.weight", "norm.weight", "mask_embedding"]
    names += [f"layers.{n}.{part}.weight" for n in range(shape.layers) for part in _LAYER_NAMES]
    if shape.markov_rank:
        names += ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
    if shape.own_head:
        names.append("lm_head.weight")
    if shape.vocabulary:
        names.append("draft_ids")
    return names
