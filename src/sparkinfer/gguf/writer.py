"""write_gguf: a small GGUF version 3 writer for tests, exports and synthetic models."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import GGUFError
from ..quant.formats import KNOWN_TYPES
from .shard import DEFAULT_ALIGNMENT, MAGIC, MAX_ALIGNMENT
from .tensors import MAX_DIMS, MAX_NAME_BYTES
from .values import SCALARS, ValueType

Tensor = tuple[str, Sequence[int], str, Any]

_TYPE_IDS = {size.name: type_id for type_id, size in KNOWN_TYPES.items()}


@dataclass(frozen=True)
class Typed:
    """A metadata value, or a list of them, with its type: `Typed(7, "uint16")`."""

    value: Any
    type_name: str


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Iterable[Tensor] = (),
    alignment: int = DEFAULT_ALIGNMENT,
) -> None:
    """Write a GGUF file; it appears under `path` only when it is complete.

    A tensor is (name, shape, type name, bytes) with the contiguous dimension first. Integers become
    uint32 (int32 when negative or in a list) or 64 bits wide when they must; floats become
    float32; `Typed` says otherwise. Raises GGUFError for what no reader could read back.
    """
    if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise GGUFError(f"alignment {alignment}: accepted are powers of two from 8 to 65536")
    entries = dict(metadata)
    if alignment != DEFAULT_ALIGNMENT:
        entries["general.alignment"] = Typed(alignment, "uint32")
    rows = [_checked(tensor) for tensor in tensors]
    if len({row.name for row in rows}) != len(rows):
        raise GGUFError("two tensors have the same name")
    header = _header(entries, rows, alignment)
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header)
            _write_data(file, rows, alignment)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class _Row:
    name: str
    shape: tuple[int, ...]
    type_id: int
    data: memoryview


def _checked(tensor: Tensor) -> _Row:
    name, dims, type_name, raw = tensor
    shape = tuple(int(dim) for dim in dims)
    if not 1 <= len(name.encode()) <= MAX_NAME_BYTES:
        raise GGUFError(f"tensor name {name!r}: accepted are 1 to {MAX_NAME_BYTES} bytes")
    if not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1:
        raise GGUFError(f"tensor {name!r} has shape {shape}: accepted are 1 to 4 positive numbers")
    if type_name not in _TYPE_IDS:
        raise GGUFError(f"tensor {name!r} has type {type_name!r}: known are {', '.join(_TYPE_IDS)}")
    type_id = _TYPE_IDS[type_name]
    _, block_size, block_bytes = KNOWN_TYPES[type_id]
    if shape[0] % block_size:
        raise GGUFError(f"tensor {name!r}: rows of {shape[0]} are not a multiple of {block_size}")
    view = memoryview(raw) if isinstance(raw, bytes) else np.ascontiguousarray(raw).data
    data = view.cast("B")
    expected = prod(shape) // block_size * block_bytes
    if len(data) != expected:
        raise GGUFError(f"tensor {name!r} has {len(data)} bytes, its shape needs {expected}")
    return _Row(name, shape, type_id, data)


def _header(metadata: Mapping[str, Any], rows: list[_Row], alignment: int) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", 3, len(rows), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(key, value)]
    offset = 0
    for row in rows:
        dims = struct.pack(f"<I{len(row.shape)}Q", len(row.shape), *row.shape)
        parts += [_string(row.name), dims, struct.pack("<IQ", row.type_id, offset)]
        offset += _padded(len(row.data), alignment)
    header = b"".join(parts)
    return header + bytes(_padded(len(header), alignment) - len(header))


def _write_data(file: BinaryIO, rows: list[_Row], alignment: int) -> None:
    for row in rows:
        file.write(row.data)
        file.write(bytes(_padded(len(row.data), alignment) - len(row.data)))


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment


def _string(text: str | bytes) -> bytes:
    """Surrogate escapes become the raw bytes that they stand for."""
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> bytes:
    """Return type number and value; for an array, its item type, length and items."""
    kind = _kind(key, value)
    data = value.value if isinstance(value, Typed) else value
    if isinstance(data, list):
        head = struct.pack("<IIQ", ValueType.ARRAY, kind, len(data))
        return head + _items(key, kind, data)
    return struct.pack("<I", kind) + _items(key, kind, [data])


def _items(key: str, kind: ValueType, items: list[Any]) -> bytes:
    if kind is ValueType.STRING:
        if not all(isinstance(item, str | bytes) for item in items):
            raise GGUFError(f"metadata value {key!r}: not all items are strings")
        return b"".join(map(_string, items))
    try:
        return np.array(items, SCALARS[kind]).tobytes()
    except (ValueError, OverflowError, TypeError) as error:
        raise GGUFError(f"metadata value {key!r} is not {kind.name.lower()}: {error}") from None


def _kind(key: str, value: Any) -> ValueType:
    if isinstance(value, Typed):
        try:
            kind = ValueType[value.type_name.upper()]
        except KeyError:
            kind = ValueType.ARRAY
        if kind is ValueType.ARRAY:
            raise GGUFError(f"metadata value {key!r}: unknown type {value.type_name!r}")
        return kind
    items = value if isinstance(value, list) else [value]
    if not items:
        raise GGUFError(f"metadata value {key!r} is an empty list: give its type with Typed")
    if all(isinstance(item, bool) for item in items):
        return ValueType.BOOL
    if all(isinstance(item, str | bytes) for item in items):
        return ValueType.STRING
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return _integer_kind(items, is_list=isinstance(value, list))
    if all(isinstance(item, int | float) and not isinstance(item, bool) for item in items):
        return ValueType.FLOAT32
    raise GGUFError(f"metadata value {key!r}: {type(items[0]).__name__} has no type in GGUF")


def _integer_kind(items: list[int], *, is_list: bool) -> ValueType:
    low, high = min(items), max(items)
    if low >= -(1 << 31) and high < 1 << 31 and (is_list or low < 0):
        return ValueType.INT32
    if low >= 0:
        return ValueType.UINT32 if high < 1 << 32 else ValueType.UINT64
    return ValueType.INT64
