"""Writes the trained pair anew with the metadata that says what it is; tensors are copied as they are.

python examples/hybrid-demo/describe.py TARGET.gguf DRAFT.gguf FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkinfer.gguf import Typed, open_gguf, write_gguf

COMMON = {
    "general.type": "model",
    "general.version": "1",
    "general.author": "sparkinfer",
    "general.license": "apache-2.0",
    "general.languages": ["en"],
    "general.quantization_version": 2,
}
TARGET = {
    "general.name": "sparkinfer hybrid demo",
    "general.basename": "sparkinfer-hybrid-demo",
    "general.size_label": "8x36M",
    "general.description": "For demonstrations and tests only: trained for four minutes on text that"
    " SmolLM2-135M-Instruct wrote. Its answers are fluent and mostly wrong.",
    "general.file_type": 15,
    "general.tags": ["qwen35moe", "demo", "test"],
    # Teacher of the text, source of the tokenizer and of the embedding's first values.
    "general.base_model.count": 1,
    "general.base_model.0.name": "SmolLM2 135M Instruct",
    "general.base_model.0.organization": "HuggingFaceTB",
    "general.base_model.0.repo_url": "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
}
DRAFT = {
    "general.name": "sparkinfer hybrid demo DFlash",
    "general.basename": "sparkinfer-hybrid-demo-dflash",
    "general.size_label": "7.5M",
    "general.description": "A DFlash draft for `sparkinfer hybrid demo`, trained on that model's own answers.",
    "general.file_type": 7,
    "general.tags": ["dflash", "draft", "demo", "test"],
    "general.base_model.count": 1,
    "general.base_model.0.name": TARGET["general.name"],
}


def describe(source: Path, facts: Mapping[str, Any], written: Path) -> None:
    """Copy a GGUF file; `facts` replace its general keys but for the architecture, all other keys keep their types."""
    with open_gguf(source) as file:
        kept = {
            key: Typed(value, file.type_name(key).removeprefix("array of "))
            for key, value in file.metadata.items()
            if not key.startswith("general.")
        }
        head = {"general.architecture": file.architecture, **COMMON, **facts}
        rows = [(t.name, t.shape, t.type_name, file.data(t.name)) for t in file.tensors.values()]
        write_gguf(written, head | kept, rows)


def main() -> None:
    """Both files."""
    target, draft, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    describe(target, TARGET, folder / "target.gguf")
    describe(draft, DRAFT, folder / "draft.gguf")


if __name__ == "__main__":
    main()
