"""Write a copy of a GGUF model in another format with llama.cpp's own quantizer.

PEER_PYTHON benchmarks/sides/requantise.py SOURCE.gguf TARGET.gguf Q4_0
"""

from __future__ import annotations

import sys

import llama_cpp

FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K_M": 15, "Q6_K": 18}


def main(source: str, target: str, file_type: str) -> None:
    """Requantise all matrices of `source`; norms stay as they are."""
    if file_type not in FILE_TYPES:
        raise SystemExit(f"unknown file type {file_type!r}; known: {', '.join(FILE_TYPES)}")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[file_type]
    params.allow_requantize = True
    params.nthread = 2
    code = llama_cpp.llama_model_quantize(source.encode(), target.encode(), params)
    if code:
        raise SystemExit(f"llama_model_quantize returned {code}")


if __name__ == "__main__":
    main(*sys.argv[1:])
