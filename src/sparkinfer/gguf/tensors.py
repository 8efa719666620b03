"""The tensor table of one file: names, shapes, types and where the bytes lie, all checked."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

from ..errors import GGUFError
from ..quant.formats import KNOWN_TYPES
from .cursor import Cursor, fault, show

MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 64
MAX_DIMS = 4
MAX_VALUES = (1 << 63) - 1
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # length of the name, rank, a dimension, type, offset


@dataclass(frozen=True)
class TensorInfo:
    """One tensor. `shape[0]` is contiguous; `offset` is absolute in the file of `shard`.

    A type this build does not know has `type_name` "type <id>" and `n_bytes` 0.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    type_id: int
    offset: int
    n_bytes: int
    shard: int

    @property
    def n_values(self) -> int:
        return prod(self.shape)

    @property
    def n_rows(self) -> int:
        """How many rows of `shape[0]` values the tensor has."""
        return prod(self.shape[1:])


@dataclass(frozen=True)
class _Entry:
    """A row of the table as it is in the file: `relative` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    relative: int
    byte: int


def read_tensors(
    cursor: Cursor, count: int, alignment: int, shard: int = 0
) -> dict[str, TensorInfo]:
    """Return the `count` tensors described at the cursor, in file order."""
    entries: dict[str, _Entry] = {}
    for index in range(count):
        entry = _read_entry(cursor, index)
        if entry.name in entries:
            what = f"tensor {show(entry.name)}"
            raise cursor.bad(what, entry.byte, "occurs twice", "convert the model again")
        entries[entry.name] = entry
    base = -(-cursor.pos // alignment) * alignment
    tensors = {
        name: _place(cursor, entry, base, alignment, shard) for name, entry in entries.items()
    }
    _check_layout(cursor, list(tensors.values()), entries)
    return tensors


def _read_entry(cursor: Cursor, index: int) -> _Entry:
    byte = cursor.pos
    name = _read_name(cursor, index)
    what = f"tensor {show(name)}"
    start = cursor.pos
    n_dims = cursor.u32(f"number of dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        why = f"has {n_dims:,} dimensions, accepted are 1 to {MAX_DIMS}"
        raise cursor.bad(what, start, why, "convert the model again")
    start = cursor.pos
    shape = tuple(cursor.u64(f"dimension {axis} of {what}") for axis in range(n_dims))
    if 0 in shape:
        raise cursor.bad(what, start, f"has shape {shape} with a zero", "convert the model again")
    if prod(shape) > MAX_VALUES:
        why = f"has shape {shape}, more than 2^63 - 1 values"
        raise cursor.bad(what, start, why, "the file is damaged: fetch it again")
    return _Entry(name, shape, cursor.u32(f"type of {what}"), cursor.u64(f"offset of {what}"), byte)


def _read_name(cursor: Cursor, index: int) -> str:
    what = f"name of tensor {index}"
    start = cursor.pos
    length = cursor.u64(f"length of {what}")
    if not 0 < length <= MAX_NAME_BYTES:
        why = f"has {length:,} bytes, accepted are 1 to {MAX_NAME_BYTES}"
        raise cursor.bad(what, start, why, "convert the model again")
    raw = cursor.take(length, what)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        why = f"is not UTF-8: {raw[:40]!r}"
        raise cursor.bad(what, start, why, "convert the model again") from None


def _place(cursor: Cursor, entry: _Entry, base: int, alignment: int, shard: int) -> TensorInfo:
    """Return the tensor with its absolute offset, after checking its type, row and alignment."""
    what = f"tensor {show(entry.name)}"
    if entry.relative % alignment:
        why = f"its data offset {entry.relative:,} is not a multiple of the alignment {alignment}"
        raise cursor.bad(what, entry.byte, why, "convert the model again")
    known = KNOWN_TYPES.get(entry.type_id)
    name, n_bytes = f"type {entry.type_id}", 0
    if known is not None:
        if entry.shape[0] % known.block_size:
            why = (
                f"its rows have {entry.shape[0]:,} values, which is not a multiple of"
                f" {known.block_size}, the block size of {known.name}"
            )
            raise cursor.bad(what, entry.byte, why, "convert the model again")
        name, n_bytes = known.name, prod(entry.shape) // known.block_size * known.block_bytes
    offset = base + entry.relative
    return TensorInfo(entry.name, entry.shape, name, entry.type_id, offset, n_bytes, shard)


def _check_layout(cursor: Cursor, tensors: list[TensorInfo], entries: dict[str, _Entry]) -> None:
    """Raise unless every tensor lies inside the file and no two share a byte."""
    last = max(tensors, key=lambda tensor: tensor.offset + tensor.n_bytes, default=None)
    if last is not None and last.offset + last.n_bytes > cursor.size:
        raise _past_the_end(cursor, last, entries[last.name].byte)
    ordered = sorted(tensors, key=lambda tensor: (tensor.offset, tensor.n_bytes))
    for one, two in pairwise(ordered):
        if two.offset < one.offset + max(one.n_bytes, 1):
            raise _overlap(cursor, one, two, entries[two.name].byte)


def _past_the_end(cursor: Cursor, tensor: TensorInfo, byte: int) -> GGUFError:
    end = tensor.offset + tensor.n_bytes
    why = f"needs {end:,} bytes of file, present are {cursor.size:,}"
    action = "the file is cut off or damaged: fetch it again"
    return fault(f"tensor {show(tensor.name)}", cursor.path, byte, why, action)


def _overlap(cursor: Cursor, one: TensorInfo, two: TensorInfo, byte: int) -> GGUFError:
    why = (
        f"its data starts at byte {two.offset:,}, inside tensor {show(one.name)}"
        f" (bytes {one.offset:,} to {one.offset + one.n_bytes:,})"
    )
    what = f"tensor {show(two.name)}"
    return fault(what, cursor.path, byte, why, "the file is damaged: fetch it again")
