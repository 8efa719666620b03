"""Metadata values: the thirteen value types and a reader that bounds every count before use."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from .cursor import Cursor, show

# Over all arrays of a file. Public files stay below 1.2 million (tokens, merges, scores, types).
MAX_ITEMS = 1 << 22
MAX_KEYS = 1 << 16
MAX_KEY_BYTES = 65535
# The only values that may hold bytes which are not UTF-8; they read as surrogate escapes.
RAW_TEXT_KEYS = frozenset({"tokenizer.ggml.tokens"})

_LENGTH = struct.Struct("<Q").unpack_from


class ValueType(IntEnum):
    """Numbers of the value types in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALARS: dict[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("<u1"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}


_KINDS = {kind.value: kind for kind in ValueType}


@dataclass(frozen=True)
class Value:
    """A value and its type as the file declares it: `uint32`, `string`, `array of float32`."""

    data: Any
    type_name: str
    byte: int


def read_metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    """Return the `count` key/value pairs at the cursor, in file order."""
    values: dict[str, Value] = {}
    items = 0
    for index in range(count):
        start = cursor.pos
        key = _read_key(cursor, index)
        if key in values:
            raise cursor.bad(
                f"metadata key {show(key)}", start, "occurs twice", "remove one of the two"
            )
        values[key] = _read_value(cursor, key, MAX_ITEMS - items)
        if isinstance(values[key].data, list):
            items += len(values[key].data)
    return values


def _read_key(cursor: Cursor, index: int) -> str:
    what = f"metadata key {index}"
    start = cursor.pos
    length = cursor.u64(f"length of {what}")
    if not 0 < length <= MAX_KEY_BYTES:
        why = f"has {length:,} bytes, accepted are 1 to {MAX_KEY_BYTES:,}"
        raise cursor.bad(what, start, why, "the file is damaged: fetch it again")
    return _text(cursor, cursor.take(length, what), what, start)


def _text(cursor: Cursor, raw: bytes, what: str, start: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 ({error.reason} at its byte {error.start})"
        raise cursor.bad(what, start, why, "convert the model again") from None


def _read_type(cursor: Cursor, what: str) -> ValueType:
    start = cursor.pos
    number = cursor.u32(f"type of {what}")
    if number not in _KINDS:
        known = ", ".join(f"{kind.value} {kind.name.lower()}" for kind in ValueType)
        why = f"is {number}, known are {known}"
        raise cursor.bad(f"type of {what}", start, why, "update sparkinfer or fetch it again")
    return _KINDS[number]


def _read_value(cursor: Cursor, key: str, items_left: int) -> Value:
    what = f"metadata value {show(key)}"
    kind = _read_type(cursor, what)
    start = cursor.pos
    if kind is ValueType.ARRAY:
        return _read_array(cursor, key, items_left)
    if kind is ValueType.STRING:
        text = _text(cursor, cursor.string(what), what, start)
        return Value(text, "string", start)
    dtype = SCALARS[kind]
    raw = cursor.take(dtype.itemsize, what)
    if kind is ValueType.BOOL:
        _check_bools(cursor, raw, what, start)
        return Value(raw != b"\0", "bool", start)
    return Value(np.frombuffer(raw, dtype)[0].item(), kind.name.lower(), start)


def _check_bools(cursor: Cursor, raw: bytes, what: str, start: int) -> None:
    if raw.translate(None, b"\0\1"):
        why = f"holds a bool of {max(raw)}, accepted are 0 and 1"
        raise cursor.bad(what, start, why, "convert the model again")


def _read_array(cursor: Cursor, key: str, items_left: int) -> Value:
    what = f"metadata array {show(key)}"
    start = cursor.pos
    kind = _read_type(cursor, what)
    count = cursor.u64(f"length of {what}")
    type_name = f"array of {kind.name.lower()}"
    if kind is ValueType.ARRAY:
        raise cursor.bad(what, start, "holds arrays, which are not supported", "use flat arrays")
    item_bytes = 8 if kind is ValueType.STRING else SCALARS[kind].itemsize
    cursor.need(count * item_bytes, f"{count:,} items of {what}")
    if count > items_left:
        why = f"has {count:,} items, the arrays of a file may have {MAX_ITEMS:,} together"
        raise cursor.bad(what, start, why, "the file is damaged or not a model")
    if kind is ValueType.STRING:
        return Value(_read_strings(cursor, key, count), type_name, start)
    raw = cursor.take(count * item_bytes, what)
    if kind is ValueType.BOOL:
        _check_bools(cursor, raw, what, start)
        return Value(np.frombuffer(raw, np.bool_).tolist(), type_name, start)
    return Value(np.frombuffer(raw, SCALARS[kind]).tolist(), type_name, start)


def _read_strings(cursor: Cursor, key: str, count: int) -> list[str]:
    """Return `count` strings. One pass finds them; numpy and one decode turn them into text.

    Blanking the eight length bytes of every string leaves text with eight NULs before each item,
    so checking it for UTF-8 as a whole checks every item, and splitting it is one call.
    """
    if count == 0:
        return []
    begin = cursor.pos
    starts = _string_starts(cursor, key, count)
    region = np.frombuffer(cursor.data, np.uint8, cursor.pos - begin, begin).copy()
    offsets = np.frombuffer(starts, np.uint64).astype(np.int64) - begin
    for place in range(8):
        region[offsets + place] = 0
    if region.size - np.count_nonzero(region) == 8 * count:
        errors = "surrogateescape" if key in RAW_TEXT_KEYS else "strict"
        try:
            return region.tobytes().decode("utf-8", errors).split("\0" * 8)[1:]
        except UnicodeDecodeError:
            pass  # decoded one by one below, which names the item
    return _strings_one_by_one(cursor, key, starts)


def _string_starts(cursor: Cursor, key: str, count: int) -> array[int]:
    """Return the offsets of the length fields and move the cursor behind the last string."""
    starts = array("Q")
    append, data = starts.append, cursor.data
    pos, last = cursor.pos, cursor.end - 8
    for _ in range(count):
        if pos > last:
            break
        append(pos)
        pos += 8 + _LENGTH(data, pos)[0]
    if len(starts) < count or pos > cursor.end:
        if pos > cursor.end:
            cursor.pos = starts[-1] + 8
            cursor.need(pos - cursor.pos, f"item {len(starts) - 1} of metadata array {show(key)}")
        cursor.pos = pos
        cursor.need(8, f"length of item {len(starts)} of metadata array {show(key)}")
    cursor.pos = pos
    return starts


def _strings_one_by_one(cursor: Cursor, key: str, starts: array[int]) -> list[str]:
    """The slow form for items that hold NUL characters or are not UTF-8."""
    texts = []
    for index, start in enumerate(starts):
        raw = cursor.data[start + 8 : start + 8 + _LENGTH(cursor.data, start)[0]]
        if key in RAW_TEXT_KEYS:
            texts.append(raw.decode("utf-8", "surrogateescape"))
        else:
            what = f"item {index} of metadata array {show(key)}"
            texts.append(_text(cursor, raw, what, start))
    return texts
