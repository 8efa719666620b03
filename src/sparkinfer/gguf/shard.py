"""One mapped GGUF file: the fixed header, its metadata and its tensor table."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

from ..errors import GGUFError, MissingFileError
from .cursor import Cursor, show
from .sniff import HEAD_BYTES, describe
from .tensors import MAX_TENSORS, MIN_TENSOR_BYTES, TensorInfo, read_tensors
from .values import MAX_KEYS, Value, read_metadata

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16
MIN_KEY_BYTES = 8 + 4 + 1  # length of the key, type, the smallest value


@dataclass(frozen=True)
class Identity:
    """What tells whether a file is still the one that was opened."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Shard:
    """One file of a model, mapped and checked."""

    path: Path
    data: mmap
    identity: Identity
    version: int
    alignment: int
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]


def open_shard(path: Path, index: int = 0) -> Shard:
    """Map `path` and read its header. Raises MissingFileError, GGUFError."""
    data, identity = _map(path)
    cursor = Cursor(path, data)
    version = _read_version(cursor)
    n_tensors = _read_count(cursor, "tensor count", MAX_TENSORS, MIN_TENSOR_BYTES)
    n_keys = _read_count(cursor, "metadata count", MAX_KEYS, MIN_KEY_BYTES)
    metadata = read_metadata(cursor, n_keys)
    alignment = _alignment(cursor, metadata)
    tensors = read_tensors(cursor, n_tensors, alignment, index)
    return Shard(path, data, identity, version, alignment, metadata, tensors)


def _map(path: Path) -> tuple[mmap, Identity]:
    """Map a regular file without ever waiting on a pipe or a device."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise MissingFileError(f"{show(path, 200)} is not a regular file; name a GGUF file")
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(handle)
            if status.st_size < len(MAGIC):
                why = f"{show(path, 200)} is not a GGUF file ({status.st_size} bytes)"
                raise GGUFError(f"{why}; fetch it again")
            return mmap(handle, 0, access=ACCESS_READ), Identity.of(status)
        finally:
            os.close(handle)
    except FileNotFoundError:
        raise MissingFileError(f"{show(path, 200)} does not exist; name a GGUF file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MissingFileError(f"{show(path, 200)} cannot be read: {reason}") from None


def _read_version(cursor: Cursor) -> int:
    if cursor.take(4, "magic") != MAGIC:
        looks_like, action = describe(cursor.data[:HEAD_BYTES])
        raise cursor.bad("magic", 0, f"not a GGUF file, this is {looks_like}", action)
    version = cursor.u32("version")
    if version in VERSIONS:
        return version
    why = f"is {version}, supported are 2 and 3"
    action = "convert the model again with a current converter"
    if version & 0xFFFF == 0 and version:
        why = "the file is big-endian (its bytes are swapped), supported are versions 2 and 3"
        action = "convert the model again as little-endian"
    raise cursor.bad("version", 4, why, action)


def _read_count(cursor: Cursor, what: str, most: int, item_bytes: int) -> int:
    start = cursor.pos
    count = cursor.u64(what)
    if count > most:
        why = f"is {count:,}, accepted are at most {most:,}"
        raise cursor.bad(what, start, why, "the file is damaged: fetch it again")
    cursor.need(count * item_bytes, f"{what} of {count:,}")
    return count


def _alignment(cursor: Cursor, metadata: dict[str, Value]) -> int:
    value = metadata.get("general.alignment")
    if value is None:
        return DEFAULT_ALIGNMENT
    what = "metadata value 'general.alignment'"
    if value.type_name != "uint32":
        why = f"has type {value.type_name}, expected uint32"
        raise cursor.bad(what, value.byte, why, "convert the model again")
    alignment = int(value.data)
    if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        why = f"is {alignment}, accepted are powers of two from 8 to {MAX_ALIGNMENT}"
        raise cursor.bad(what, value.byte, why, "convert the model again")
    return alignment
