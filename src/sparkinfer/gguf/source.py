"""What reading a model needs of its file, so that another layout can stand in for GGUF."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

T = TypeVar("T", int, float, bool, str, list[Any])


class TensorDescription(Protocol):
    """`shape[0]` is contiguous."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type_name(self) -> str: ...


class ModelFile(Protocol):
    """An open model under GGUF's keys and tensor names. `reader.GGUFFile` says what each member does."""

    path: Path

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, TensorDescription]: ...
    @property
    def architecture(self) -> str: ...
    @overload
    def get(self, key: str, type_: type[T]) -> T | None: ...
    @overload
    def get(self, key: str, type_: type[T], default: T) -> T: ...
    def require(self, key: str, type_: type[T]) -> T: ...
    def data(self, name: str) -> npt.NDArray[np.uint8]: ...
    def require_decodable(self, names: Iterable[str] | None = None) -> None: ...
    def close(self) -> None: ...
