"""Checks of a whole model file: tokenizer metadata on every open, tensor values on request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import GGUFError
from ..quant.formats import QUANT_FORMATS, QuantFormat
from .cursor import fault, show
from .tensors import TensorInfo
from .values import Value

CHUNK_BYTES = 16 << 20
TOKENS = "tokenizer.ggml.tokens"

_TOKENIZER_TYPES = {
    TOKENS: ("array of string",),
    "tokenizer.ggml.merges": ("array of string",),
    "tokenizer.ggml.scores": ("array of float32",),
    "tokenizer.ggml.token_type": ("array of int32", "array of uint32"),
    "tokenizer.ggml.model": ("string",),
    "tokenizer.ggml.pre": ("string",),
    "tokenizer.chat_template": ("string",),
    "general.architecture": ("string",),
}
_PER_TOKEN = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")
_TOKEN_ID_SUFFIX = "_token_id"
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}


def check_metadata(path: Path, metadata: Mapping[str, Value]) -> None:
    """Raise GGUFError for tokenizer entries of a wrong type or length and for ids past the end."""
    for key, accepted in _TOKENIZER_TYPES.items():
        value = metadata.get(key)
        if value is not None and value.type_name not in accepted:
            why = f"has type {value.type_name}, expected {' or '.join(accepted)}"
            raise _bad(path, key, value, why)
    tokens = metadata.get(TOKENS)
    if tokens is None:
        return
    n_vocab = len(tokens.data)
    for key in _PER_TOKEN:
        value = metadata.get(key)
        if value is not None and len(value.data) != n_vocab:
            why = f"has {len(value.data):,} entries, but there are {n_vocab:,} tokens"
            raise _bad(path, key, value, why)
    for key, value in metadata.items():
        if key.endswith(_TOKEN_ID_SUFFIX):
            _check_token_id(path, key, value, n_vocab)


def _check_token_id(path: Path, key: str, value: Value, n_vocab: int) -> None:
    if not value.type_name.startswith(("uint", "int")):
        raise _bad(path, key, value, f"has type {value.type_name}, expected an integer")
    if not 0 <= value.data < n_vocab:
        why = f"is {value.data}, but the vocabulary has ids 0 to {n_vocab - 1}"
        raise _bad(path, key, value, why)


def _bad(path: Path, key: str, value: Value, why: str) -> GGUFError:
    return fault(f"metadata value {show(key)}", path, value.byte, why, "convert the model again")


def check_tensor_values(path: Path, tensor: TensorInfo, blocks: npt.NDArray[np.uint8]) -> None:
    """Raise GGUFError naming the first block of `tensor` with a scale or value that is not finite.

    Shapes: `blocks` [n, block_bytes]. A quantised tensor whose scales are all zero is an error too.
    """
    spec = QUANT_FORMATS[tensor.type_name]
    step = max(CHUNK_BYTES // spec.block_bytes, 1)
    any_scale = False
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        bad, nonzero = _inspect_plain(part, spec) if spec.module is None else _inspect(part, spec)
        any_scale = any_scale or nonzero
        if bad is not None:
            kind = "value" if spec.module is None else "block"
            why = f"{kind} {start + bad:,} of {len(blocks):,} is not a finite number"
            if spec.module is not None:
                why = (
                    f"block {start + bad:,} of {len(blocks):,} has a scale that is NaN or infinite"
                )
            byte = tensor.offset + (start + bad) * spec.block_bytes
            raise fault(_named(tensor), path, byte, why, "the model is damaged: fetch it again")
    if spec.module is not None and not any_scale:
        why = f"all scales of its {len(blocks):,} blocks are zero"
        raise fault(_named(tensor), path, tensor.offset, why, "convert the model again")


def _named(tensor: TensorInfo) -> str:
    return f"tensor {show(tensor.name)} ({tensor.type_name})"


def _inspect(blocks: npt.NDArray[np.uint8], spec: QuantFormat) -> tuple[int | None, bool]:
    """Return the first block with a non-finite scale and whether any scale is not zero."""
    bad = np.zeros(len(blocks), np.bool_)
    nonzero = False
    for offset in spec.halves:
        bits = np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<u2").reshape(-1)
        bad |= (bits & 0x7C00) == 0x7C00
        nonzero = nonzero or bool((bits & 0x7FFF).any())
    return (int(bad.argmax()) if bad.any() else None), nonzero


def _inspect_plain(blocks: npt.NDArray[np.uint8], spec: QuantFormat) -> tuple[int | None, bool]:
    dtype, exponent = _EXPONENTS[spec.name]
    bits = np.ascontiguousarray(blocks).view(dtype).reshape(-1)
    bad = (bits & exponent) == exponent
    return (int(bad.argmax()) if bad.any() else None), True
