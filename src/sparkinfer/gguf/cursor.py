"""A bounded little-endian cursor over a mapped file header, and the wording of its errors."""

from __future__ import annotations

import struct
from mmap import mmap
from pathlib import Path

from ..errors import GGUFError

# The largest header seen in public files is about 20 MB (tokenizers of 262k tokens).
MAX_HEADER_BYTES = 256 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def show(text: object, limit: int = 80) -> str:
    """Return `text` quoted, on one line and at most about `limit` characters long."""
    quoted = repr(str(text))
    return quoted if len(quoted) <= limit else f"{quoted[: limit - 4]}...{quoted[0]}"


def fault(what: str, path: Path, byte: int | None, why: str, action: str) -> GGUFError:
    """Return the error for a bad field that starts at offset `byte` of `path`, None if absent."""
    place = "" if byte is None else f" at byte {byte}"
    return GGUFError(f"{what} in {show(path, 200)}{place}: {why}; {action}")


class Cursor:
    """Reads fields front to back; every read is checked against the end before it is made."""

    def __init__(self, path: Path, data: mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.pos = 0

    def need(self, n_bytes: int, what: str) -> int:
        """Return the current offset if `n_bytes` follow it. Raises GGUFError otherwise."""
        if n_bytes > self.end - self.pos:
            raise self._short(n_bytes, what)
        return self.pos

    def u32(self, what: str) -> int:
        start = self.need(4, what)
        self.pos = start + 4
        return int(_U32.unpack_from(self.data, start)[0])

    def u64(self, what: str) -> int:
        start = self.need(8, what)
        self.pos = start + 8
        return int(_U64.unpack_from(self.data, start)[0])

    def take(self, n_bytes: int, what: str) -> bytes:
        start = self.need(n_bytes, what)
        self.pos = start + n_bytes
        return self.data[start : self.pos]

    def string(self, what: str) -> bytes:
        """Return the bytes of a string: a 64-bit length, then that many bytes."""
        return self.take(self.u64(f"length of {what}"), what)

    def bad(self, what: str, byte: int, why: str, action: str) -> GGUFError:
        return fault(what, self.path, byte, why, action)

    def _short(self, n_bytes: int, what: str) -> GGUFError:
        needed = self.pos + n_bytes
        if needed > self.size:
            why = f"needs {needed:,} bytes of file, present are {self.size:,}"
            action = "the file is cut off or damaged: fetch it again"
        else:
            why = f"ends at byte {needed:,}, and headers up to {MAX_HEADER_BYTES:,} are accepted"
            action = "the file is damaged or not a model"
        return self.bad(what, self.pos, why, action)
