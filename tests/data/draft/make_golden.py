"""Write the fixtures of this folder: small random drafts and what an independent program computes for them.

Needs torch, transformers, safetensors, gguf and the model code of PyPI `dflash` 0.1.0. Tests never import this file.
    python make_golden.py <folder of golden models>
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from gguf import GGUFReader
from safetensors.torch import save_file
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

HERE = Path(__file__).parent
TARGET = "llama-tiny-F32"  # hidden size 64, 4 layers, 320 ids, head tied to the embedding
CONTEXTS = (1, 23, 40)  # context rows before each block
COMMON = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 32,
    "vocab_size": 320,
    "num_target_layers": 4,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
FIVE = [0, 1, 1, 2, 3]
EIGHT = [0, 0, 1, 1, 2, 2, 3, 3]


def heads(n: int, kv: int, size: int = 16) -> dict:
    return {"num_attention_heads": n, "num_key_value_heads": kv, "head_dim": size}


def layers(types: str, window: int | None = None) -> dict:
    """`f` full, `s` sliding."""
    names = {"f": "full_attention", "s": "sliding_attention"}
    return {
        "num_hidden_layers": len(types),
        "layer_types": [names[t] for t in types],
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": len(types),
    }


CASES = {
    # block_size and rope_theta at the top level
    "qwen3-8b": {
        **heads(4, 1), **layers("fffff"), "block_size": 16, "rope_theta": 1e6, "max_position_embeddings": 40960,
        "dflash_config": {"mask_token_id": 319, "target_layer_ids": FIVE},
    },
    # heads together wider than the model
    "qwen35-4b": {
        **heads(8, 2), **layers("ff"), "block_size": 16, "rope_theta": 1e7, "max_position_embeddings": 262144,
        "dflash_config": {"mask_token_id": 300, "target_layer_ids": FIVE},
    },
    "qwen36-35b-old": {
        **heads(8, 1), **layers("f"), "block_size": 16, "rope_theta": 1e7, "max_position_embeddings": 262144,
        "dflash_config": {"mask_token_id": 300, "target_layer_ids": FIVE},
    },
    # everything nested, rope_parameters, mixed layers
    "qwen36-35b": {
        **heads(8, 2), **layers("sssssf", 14), "max_position_embeddings": 262144,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "dflash_config": {"mask_token_id": 311, "target_layer_ids": EIGHT, "block_size": 16},
    },
    "qwen36-27b": {
        **heads(4, 1), **layers("ssssf", 18), "max_position_embeddings": 262144,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "dflash_config": {"mask_token_id": 300, "target_layer_ids": FIVE, "block_size": 16},
    },
    "specforge-0.5b": {
        **heads(14, 2), **layers("f"), "block_size": 16, "rope_theta": 1e6, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "dflash_config": {"mask_token_id": 319, "target_layer_ids": FIVE},
    },
    # sliding layers whose blocks are not causal; one window shorter than a block
    "symmetric": {
        **heads(4, 1), **layers("sss", 5), "is_causal": False, "max_position_embeddings": 262144,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "dflash_config": {"mask_token_id": 300, "target_layer_ids": FIVE, "block_size": 8},
    },
    # YaRN, causal full layers, scaled embeddings and logits, a cap on logits, two shards with prefixed names
    "scaled": {
        **heads(4, 2), **layers("ff"), "is_causal": True, "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        },
        "dflash_config": {
            "mask_token_id": 310, "target_layer_ids": [0, 2, 3], "block_size": 10, "input_embedding_scale": 1.5,
            "output_multiplier": 0.5, "final_logit_softcapping": 4.0,
        },
    },
    # the second generation: convolutions over the block and a selector of candidates
    "dflash2": {
        **heads(4, 1), **layers("ss", 12), "is_causal": False, "architectures": ["DFlash2DraftModel"],
        "max_position_embeddings": 262144, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "dflash_config": {
            "mask_token_id": 300, "target_layer_ids": [0, 1, 3], "block_size": 8, "conv_kernel_size": 4,
            "conv_group_size": 16, "selector_rank": 16, "selector_top_k": 8,
        },
    },
}  # fmt: skip


def random_model(config: dict, seed: int) -> DFlashDraftModel:
    """Weights that bfloat16 holds exactly, large enough that attention has something to choose."""
    kind = DFlash2DraftModel if "DFlash2DraftModel" in config["architectures"] else DFlashDraftModel
    model = kind(Qwen3Config(**config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            new = 1 + 0.3 * noise if "norm" in name else 1.4 * noise / value.shape[-1] ** 0.5
            value.copy_(new.bfloat16().float())
    return model.float()


def embedding(models: Path) -> torch.Tensor:
    reader = GGUFReader(models / f"{TARGET}.gguf")
    found = next(t for t in reader.tensors if t.name == "token_embd.weight")
    return torch.from_numpy(np.array(found.data, np.float32))


def expected(
    model: DFlashDraftModel, table: torch.Tensor, features: np.ndarray, anchors: np.ndarray
):
    """Hidden states of the block after each number of context rows; logits of the last one where they are scaled."""
    config, block = model.config.dflash_config, model.block_size
    head = torch.nn.Linear(table.shape[1], table.shape[0], bias=False)
    head.weight.data = table
    out = {}
    with torch.inference_mode():
        for count, anchor in zip(CONTEXTS, anchors, strict=True):
            ids = torch.full((1, block), model.mask_token_id)
            ids[0, 0] = int(anchor)
            hidden = model(
                position_ids=torch.arange(count + block)[None],
                noise_embedding=table[ids] * config.get("input_embedding_scale", 1.0),
                target_hidden=torch.from_numpy(features[None, :count].astype(np.float32)),
            )
            out[f"hidden_{count}"] = hidden[0].numpy()
            if isinstance(model, DFlash2DraftModel):
                out[f"path_{count}"] = model.propose(hidden[:, 1:], ids[:, 0], head, 0.0)[0][
                    0
                ].numpy()
        if "output_multiplier" in config:
            out["logits"] = model.compute_logits(hidden, head)[0].numpy()
    return out


def write_weights(model: DFlashDraftModel, folder: Path, sharded: bool) -> None:
    """Codebooks have bare names in published files."""
    tensors = {
        name.replace("codebook.weight", "codebook"): value.detach().bfloat16().contiguous()
        for name, value in model.named_parameters()
    }
    if not sharded:
        save_file(tensors, folder / "model.safetensors")
        return
    names = sorted(tensors)
    weight_map = {}
    for index, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{index:05d}-of-00002.safetensors"
        save_file({f"model.{name}": tensors[name] for name in part}, folder / file)
        weight_map |= {f"model.{name}": file for name in part}
    text = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)


def main() -> None:
    table = embedding(Path(sys.argv[1]))
    for seed, (name, case) in enumerate(CASES.items()):
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        config = COMMON | case
        model = random_model(config, seed)
        rng = np.random.default_rng(seed)
        width = 64 * len(model.target_layer_ids)
        features = rng.standard_normal((CONTEXTS[-1], width)).astype(np.float16)
        anchors = rng.integers(0, 290, len(CONTEXTS)).astype(np.int32)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        write_weights(model, folder, sharded=name == "scaled")
        np.savez(
            folder / "expected.npz", features=features, anchors=anchors, contexts=np.array(CONTEXTS, np.int32),
            **expected(model, table, features, anchors),
        )  # fmt: skip


main()
