"""Hugging Face transformers as a side: float32 on dequantised weights of a `llama` GGUF file.

An independent reader (PyPI `gguf`), an independent model and plain float32 arithmetic: what the
file says, without rounding of activations. Settings: `model` (path), `threads`.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from protocol import Reply, run_side

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def split_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from neighbouring rotation pairs (GGUF) to two halves (transformers)."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


class Transformers:
    """LlamaForCausalLM with the file's weights."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        start = time.perf_counter()
        torch.set_num_threads(settings["threads"])
        reader = gguf.GGUFReader(settings["model"])
        self.field = {name: field.contents() for name, field in reader.fields.items()}
        if self.field["general.architecture"] != "llama":
            raise ValueError(f"{self.field['general.architecture']!r}: only llama is mapped here")
        config = self._config(reader)
        with torch.device("meta"):
            self.model = transformers.LlamaForCausalLM(config)
        weights = self._weights(reader, config)
        self.model.load_state_dict(weights, strict=False, assign=True)
        self.model.tie_weights()
        self.model.model.rotary_emb = type(self.model.model.rotary_emb)(config)
        missing = [name for name, value in self.model.named_parameters() if value.is_meta]
        if missing:
            raise ValueError(f"the file lacks weights for {missing}")
        self.model.eval()
        self.load_s = time.perf_counter() - start

    def _config(self, reader: gguf.GGUFReader) -> transformers.LlamaConfig:
        read = lambda name: self.field[f"llama.{name}"]  # noqa: E731
        names = {tensor.name for tensor in reader.tensors}
        vocab = next(t.shape[1] for t in reader.tensors if t.name == "token_embd.weight")
        return transformers.LlamaConfig(
            hidden_size=read("embedding_length"),
            intermediate_size=read("feed_forward_length"),
            num_hidden_layers=read("block_count"),
            num_attention_heads=read("attention.head_count"),
            num_key_value_heads=read("attention.head_count_kv"),
            rms_norm_eps=read("attention.layer_norm_rms_epsilon"),
            rope_parameters={"rope_type": "default", "rope_theta": read("rope.freq_base")},
            max_position_embeddings=read("context_length"),
            vocab_size=int(vocab),
            tie_word_embeddings="output.weight" not in names,
            attn_implementation="eager",
        )

    @staticmethod
    def _weights(
        reader: gguf.GGUFReader, config: transformers.LlamaConfig
    ) -> dict[str, torch.Tensor]:
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        weights = {}
        for tensor in reader.tensors:
            parts = tensor.name.split(".")
            value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if parts[0] == "blk":
                if parts[2] in heads:
                    value = split_halves(value, heads[parts[2]])
                name = f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
            else:
                name = f"{OTHER_NAMES[parts[0]]}.weight"
            weights[name] = torch.from_numpy(np.ascontiguousarray(value))
        return weights

    def info(self) -> Reply:
        return {
            "engine": "transformers",
            "versions": {
                "transformers": transformers.__version__,
                "torch": torch.__version__,
                "gguf": version("gguf"),
                "python": platform.python_version(),
            },
            "plan": {"dtype": "float32", "attention": "eager"},
            "n_vocab": self.model.config.vocab_size,
            "weight_bytes_per_token": None,
            "load_s": self.load_s,
        }

    @torch.inference_mode()
    def greedy(self, tokens: list[int], count: int) -> Reply:
        found: list[int] = []
        margins: list[float] = []
        cache = transformers.DynamicCache(config=self.model.config)
        fed = tokens
        while True:
            out = self.model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
            top = out.logits[0, -1].topk(2)
            found.append(int(top.indices[0]))
            margins.append(float(top.values[0] - top.values[1]))
            if len(found) == count:
                return {"tokens": found, "margins": margins}
            fed = found[-1:]

    @torch.inference_mode()
    def logits(self, tokens: list[int], path: str) -> Reply:
        out = self.model(torch.tensor([tokens]), use_cache=False)
        np.save(path, out.logits[0].numpy())
        return {"rows": len(tokens)}


if __name__ == "__main__":
    run_side(Transformers)
