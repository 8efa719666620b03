"""QUANT_FORMATS, the table of block formats with a decoder, and KNOWN_TYPES, every tensor type of
the file format.

Adding a format is one file with `unpack`, one row here and one row in the tests. Sizes and type
numbers are those of ggml (https://github.com/ggml-org/ggml, `ggml_type` and its block structs).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, cast

import numpy as np

from ..errors import UnsupportedError
from . import plain
from .codes import F32, U8, Codes

__all__ = ["KNOWN_TYPES", "QUANT_FORMATS", "Codes", "QuantFormat", "dequantize", "unpack"]

CHUNK_VALUES = 1 << 19  # decoded at a time: temporaries stay near the cache


@dataclass(frozen=True)
class QuantFormat:
    """One block format. `module` has its `unpack`, None for plain floats; `halves` are byte offsets
    of float16 scales.
    """

    name: str
    type_id: int
    block_size: int
    block_bytes: int
    module: str | None
    halves: tuple[int, ...] = ()


class TypeSize(NamedTuple):
    """Name, values per block and bytes per block of a tensor type."""

    name: str
    block_size: int
    block_bytes: int


_FORMATS = (
    QuantFormat("F32", 0, 1, 4, None),
    QuantFormat("F16", 1, 1, 2, None),
    QuantFormat("BF16", 30, 1, 2, None),
    QuantFormat("Q4_0", 2, 32, 18, "q4_0", (0,)),
    QuantFormat("Q4_1", 3, 32, 20, "q4_1", (0, 2)),
    QuantFormat("Q5_0", 6, 32, 22, "q5_0", (0,)),
    QuantFormat("Q5_1", 7, 32, 24, "q5_1", (0, 2)),
    QuantFormat("Q8_0", 8, 32, 34, "q8_0", (0,)),
    QuantFormat("Q2_K", 10, 256, 84, "q2_k", (80, 82)),
    QuantFormat("Q3_K", 11, 256, 110, "q3_k", (108,)),
    QuantFormat("Q4_K", 12, 256, 144, "q4_k", (0, 2)),
    QuantFormat("Q5_K", 13, 256, 176, "q5_k", (0, 2)),
    QuantFormat("Q6_K", 14, 256, 210, "q6_k", (208,)),
    QuantFormat("IQ4_NL", 20, 32, 18, "iq4_nl", (0,)),
    QuantFormat("IQ4_XS", 23, 256, 136, "iq4_xs", (0,)),
)

QUANT_FORMATS: Mapping[str, QuantFormat] = MappingProxyType({f.name: f for f in _FORMATS})

_UNDECODED = {
    9: TypeSize("Q8_1", 32, 40),
    15: TypeSize("Q8_K", 256, 292),
    16: TypeSize("IQ2_XXS", 256, 66),
    17: TypeSize("IQ2_XS", 256, 74),
    18: TypeSize("IQ3_XXS", 256, 98),
    19: TypeSize("IQ1_S", 256, 50),
    21: TypeSize("IQ3_S", 256, 110),
    22: TypeSize("IQ2_S", 256, 82),
    24: TypeSize("I8", 1, 1),
    25: TypeSize("I16", 1, 2),
    26: TypeSize("I32", 1, 4),
    27: TypeSize("I64", 1, 8),
    28: TypeSize("F64", 1, 8),
    29: TypeSize("IQ1_M", 256, 56),
    31: TypeSize("Q4_0_4_4", 32, 18),
    32: TypeSize("Q4_0_4_8", 32, 18),
    33: TypeSize("Q4_0_8_8", 32, 18),
    34: TypeSize("TQ1_0", 256, 54),
    35: TypeSize("TQ2_0", 256, 66),
    36: TypeSize("IQ4_NL_4_4", 32, 18),
    37: TypeSize("IQ4_NL_4_8", 32, 18),
    38: TypeSize("IQ4_NL_8_8", 32, 18),
    39: TypeSize("MXFP4", 32, 17),
    40: TypeSize("NVFP4", 64, 36),
    41: TypeSize("Q1_0", 128, 18),
}

KNOWN_TYPES: Mapping[int, TypeSize] = MappingProxyType(
    _UNDECODED | {f.type_id: TypeSize(f.name, f.block_size, f.block_bytes) for f in _FORMATS}
)

_PLAIN: Mapping[str, Callable[[U8], F32]] = {
    "F32": plain.dequantize_f32,
    "F16": plain.dequantize_f16,
    "BF16": plain.dequantize_bf16,
}


def find_format(name: str) -> QuantFormat:
    """Return the format called `name`. Raises UnsupportedError listing the known ones."""
    found = QUANT_FORMATS.get(name)
    if found is None:
        raise UnsupportedError(
            f"tensor type {name!r} has no decoder; supported types: {', '.join(QUANT_FORMATS)}"
        )
    return found


def dequantize(format_name: str, blocks: U8) -> F32:
    """Return the weights of `blocks`, uint8 [n, block_bytes], as float32 [n, block_size]."""
    spec = _checked(format_name, blocks)
    plain_decode = _PLAIN.get(format_name)
    if plain_decode is not None:
        return plain_decode(blocks)
    decode = _decoder(spec)
    out = np.empty((len(blocks), spec.block_size), np.float32)
    for part in _parts(len(blocks), spec.block_size):
        out[part] = decode(blocks[part]).dequantize()
    return out


def unpack(format_name: str, blocks: U8) -> Codes:
    """Return the integer view of `blocks`, uint8 [n, block_bytes]. Raises UnsupportedError for
    plain floats.
    """
    spec = _checked(format_name, blocks)
    if spec.module is None:
        raise UnsupportedError(f"tensor type {format_name} has no integer codes; use dequantize")
    decode = _decoder(spec)
    parts = _parts(len(blocks), spec.block_size)
    if len(parts) == 1:
        return decode(blocks)
    out = _empty_like(decode(blocks[:1]), len(blocks))
    for part in parts:
        _store(out, part, decode(blocks[part]))
    return out


def _checked(format_name: str, blocks: U8) -> QuantFormat:
    spec = find_format(format_name)
    assert blocks.dtype == np.uint8 and blocks.ndim == 2, (blocks.dtype, blocks.shape)
    assert blocks.shape[1] == spec.block_bytes, (format_name, blocks.shape)
    assert blocks.strides[1] == 1 or not blocks.size, blocks.strides
    return spec


def _decoder(spec: QuantFormat) -> Callable[[U8], Codes]:
    module = importlib.import_module(f"{__package__}.{spec.module}")
    return cast("Callable[[U8], Codes]", module.unpack)


def _parts(n_blocks: int, block_size: int) -> list[slice]:
    step = CHUNK_VALUES // block_size
    return [slice(start, start + step) for start in range(0, max(n_blocks, 1), step)]


def _empty_like(sample: Codes, n: int) -> Codes:
    """Return uninitialised codes for `n` blocks with the fields that `sample` has."""
    return Codes(
        q=np.empty((n, sample.q.shape[1]), np.uint8),
        zero=sample.zero,
        d=np.empty(n, np.float16),
        m=None if sample.m is None else np.empty(n, np.float16),
        scales=None if sample.scales is None else np.empty((n, sample.scales.shape[1]), np.int8),
        mins=None if sample.mins is None else np.empty((n, sample.mins.shape[1]), np.uint8),
        group_size=sample.group_size,
    )


def _store(out: Codes, part: slice, codes: Codes) -> None:
    out.q[part] = codes.q
    out.d[part] = codes.d
    for name in ("m", "scales", "mins"):
        target = getattr(out, name)
        if target is not None:
            target[part] = getattr(codes, name)
