"""GGUFFile: a model file, or a set of split files, opened strictly and read without copying.

Source of the layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ..errors import GGUFError, UnsupportedError
from ..quant.formats import KNOWN_TYPES, QUANT_FORMATS
from .checks import check_metadata, check_tensor_values
from .cursor import fault, show
from .shard import Identity, Shard
from .split import open_all
from .tensors import TensorInfo

__all__ = ["GGUFFile", "TensorInfo", "open_gguf"]

T = TypeVar("T", int, float, bool, str, list[Any])
U8 = npt.NDArray[np.uint8]


def open_gguf(path: str | os.PathLike[str], *, check_tensors: bool = False) -> GGUFFile:
    """Open a GGUF file, or the split model that it is a part of.

    `check_tensors` reads all weights and refuses scales and values that are NaN or infinite.
    Raises MissingFileError, GGUFError, and UnsupportedError for `check_tensors` of a type that
    has no decoder.
    """
    shards = open_all(Path(path))
    for shard in shards:
        check_metadata(shard.path, shard.metadata)
    file = GGUFFile(shards)
    if check_tensors:
        file.check_tensors()
    return file


class GGUFFile:
    """An open model. Arrays taken from it stay valid after `close`, which only forbids new ones."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        first = shards[0]
        self.path = first.path
        self.version = first.version
        self.alignment = first.alignment
        self.shards: tuple[Path, ...] = tuple(shard.path for shard in shards)
        self.metadata: Mapping[str, Any] = MappingProxyType(
            {key: value.data for key, value in first.metadata.items()}
        )
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: info for shard in shards for name, info in shard.tensors.items()}
        )
        self._values = first.metadata
        self._identities = tuple(shard.identity for shard in shards)
        self._bytes: tuple[U8, ...] | None = tuple(
            np.frombuffer(shard.data, np.uint8) for shard in shards
        )

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the mapped files; each is unmapped with the last array that views it."""
        self._bytes = None

    @property
    def architecture(self) -> str:
        return self.require("general.architecture", str)

    def type_name(self, key: str) -> str:
        """Return the type of a metadata value as the file declares it, such as `array of int32`."""
        return self._values[key].type_name

    @overload
    def get(self, key: str, type_: type[T]) -> T | None: ...
    @overload
    def get(self, key: str, type_: type[T], default: T) -> T: ...
    def get(self, key: str, type_: type[T], default: T | None = None) -> T | None:
        """Return a metadata value of type int, float, bool, str or list, `default` if absent.

        Raises GGUFError naming the key and both types when the file has another type.
        """
        value = self._values.get(key)
        if value is None:
            return default
        data = value.data
        if type(data) is not type_:
            why = f"has type {value.type_name}, expected {_EXPECTED[type_]}"
            raise self._bad(key, value.byte, why)
        if type(data) is float and not math.isfinite(data):
            raise self._bad(key, value.byte, f"is {data}, expected a finite number")
        return data

    def require(self, key: str, type_: type[T]) -> T:
        """Return a metadata value as `get` does. Raises GGUFError when it is absent."""
        value = self.get(key, type_)
        if value is None:
            why = f"is missing, expected {_EXPECTED[type_]}"
            raise self._bad(key, None, why)
        return value

    def data(self, name: str) -> U8:
        """Return the bytes of a tensor, uint8 [n_bytes], a read-only view of the mapped file."""
        info = self._tensor(name)
        if self._bytes is None:
            raise ValueError(f"{show(self.path, 200)} is closed")
        return self._bytes[info.shard][info.offset : info.offset + info.n_bytes]

    def blocks(self, name: str) -> U8:
        """Return the bytes of a tensor by rows, uint8 [n_rows, row_bytes], a read-only view."""
        return self.data(name).reshape(self._tensor(name).n_rows, -1)

    def release(self, name: str) -> None:
        """Let the system take back the memory of a tensor's pages; reading it again reads the file."""
        info = self._tensor(name)
        base = self._bytes[info.shard].base if self._bytes is not None else None
        mapped = base.obj if isinstance(base, memoryview) else base
        if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            page = mmap.PAGESIZE
            first = -(-info.offset // page) * page
            last = (info.offset + info.n_bytes) // page * page
            if last > first:
                mapped.madvise(mmap.MADV_DONTNEED, first, last - first)

    def require_decodable(self, names: Iterable[str] | None = None) -> None:
        """Raise UnsupportedError when one of the tensors, by default any, has no decoder."""
        for name in self.tensors if names is None else names:
            kind = self._tensor(name, known=False).type_name
            if kind not in QUANT_FORMATS:
                raise UnsupportedError(
                    f"tensor {show(name)} in {show(self.path, 200)} has {_describe_type(kind)};"
                    f" supported types: {', '.join(QUANT_FORMATS)}"
                )

    def check_tensors(self) -> None:
        """Read every tensor. Raises GGUFError for a value or a block scale that is not finite."""
        self.require_decodable()
        for name, info in self.tensors.items():
            block_bytes = QUANT_FORMATS[info.type_name].block_bytes
            blocks = self.data(name).reshape(-1, block_bytes)
            check_tensor_values(self.shards[info.shard], info, blocks)

    def changed(self) -> bool:
        """Return whether a file was replaced, resized, rewritten or removed since it was opened."""
        for path, identity in zip(self.shards, self._identities, strict=True):
            try:
                if Identity.of(path.stat()) != identity:
                    return True
            except OSError:
                return True
        return False

    def _tensor(self, name: str, *, known: bool = True) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise GGUFError(f"{show(self.path, 200)} has no tensor {show(name)}")
        if known and info.type_id not in KNOWN_TYPES:
            self.require_decodable([name])
        return info

    def _bad(self, key: str, byte: int | None, why: str) -> GGUFError:
        what = f"metadata value {show(key)}"
        return fault(what, self.path, byte, why, "convert the model again")


_EXPECTED: Mapping[type, str] = {
    int: "an integer",
    float: "a float",
    bool: "a bool",
    str: "a string",
    list: "an array",
}


def _describe_type(kind: str) -> str:
    if kind.startswith("type "):
        return f"the unknown {kind}"
    return f"type {kind}, which has no decoder"
