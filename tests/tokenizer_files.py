"""Small vocabularies for the tokenizer and chat tests, as open model files without the file."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparkinfer.vocabulary import BYTE_TO_CHAR

DATA = Path(__file__).parent / "data" / "tokenizer"


@dataclass(frozen=True)
class FakeFile:
    """What the tokenizer reads of an open GGUF file."""

    metadata: dict[str, Any]
    path: str = "toy.gguf"


@cache
def golden(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return data


def metadata(
    tokens: list[str], types: list[int], merges: list[str], pre: str = "gpt-2", **more: Any
) -> dict[str, Any]:
    """Metadata of a byte-level BPE file whose end token is `<|im_end|>`."""
    entries = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "eos_token_id": tokens.index("<|im_end|>"),
        **more,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in entries.items() if v is not None}


def synthetic(pre: str, **more: Any) -> FakeFile:
    """The golden synthetic vocabulary with a given pre-tokenizer."""
    data = golden("synthetic")
    return FakeFile(metadata(data["tokens"], data["types"], data["merges"], pre, **more))


def smollm2() -> FakeFile:
    """SmolLM2's vocabulary with only those merges that its golden texts need."""
    data = golden("smollm2")
    tokens = [f"<unused {i}>" for i in range(data["n_vocab"])]
    types = [5] * len(tokens)
    for token, (text, kind) in data["tokens"].items():
        tokens[int(token)], types[int(token)] = text, kind
    return FakeFile(metadata(tokens, types, data["merges"], "smollm"))


SPECIAL = {"<|im_start|>": 3, "<|im_end|>": 3, "<s>": 3, "[INST]": 3, "<think>": 4, "<pad0>": 5}


def toy(extra: dict[str, int] | None = None, merges: tuple[str, ...] = (), **more: Any) -> FakeFile:
    """All 256 bytes, the products of `merges`, then special tokens."""
    texts = dict.fromkeys([*BYTE_TO_CHAR.values(), *(m.replace(" ", "") for m in merges)], 1)
    texts |= SPECIAL | (extra or {})
    return FakeFile(metadata(list(texts), list(texts.values()), list(merges), **more))
