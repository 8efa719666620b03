"""ModelFolder: a target as config.json, safetensors and tokenizer.json, read as if it were a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from sparkinfer.dflash.checkpoint import open_safetensors
from sparkinfer.errors import GGUFError, ShapeError
from sparkinfer.gguf import GGUFFile, open_gguf
from sparkinfer.models.config import read_config
from sparkinfer.models.load import expected_tensors
from sparkinfer.models.weights import check_tensors
from sparkinfer.tokenizer import Tokenizer
from sparkinfer.training.folder_config import FolderConfig
from sparkinfer.training.folder_tensors import FolderTensor, make, tensors_of
from sparkinfer.training.folder_tokenizer import check_same_ids, tokenizer_metadata

T = TypeVar("T", int, float, bool, str, list[Any])


class ModelFolder:
    """A model folder under GGUF's keys and tensor names (`gguf.ModelFile`). All tensors are offered as F32.

    Raises: MissingFileError, GGUFError, ShapeError, UnsupportedError for what training cannot read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        config = FolderConfig(path)
        self._checkpoint = open_safetensors(path)
        self._tensors = tensors_of(config, self._checkpoint)
        n_vocab = self._tensors["token_embd.weight"].shape[-1]
        self._metadata = config.metadata() | tokenizer_metadata(path, n_vocab)
        shape = read_config(self)
        check_tensors(self, expected_tensors(shape), optional=("output.weight",))
        check_same_ids(path, Tokenizer.from_gguf(self))

    def __enter__(self) -> ModelFolder:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing to do: the mapped files go with the last array that views them."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._metadata

    @property
    def tensors(self) -> Mapping[str, FolderTensor]:
        return self._tensors

    @property
    def architecture(self) -> str:
        return self.require("general.architecture", str)

    @overload
    def get(self, key: str, type_: type[T]) -> T | None: ...
    @overload
    def get(self, key: str, type_: type[T], default: T) -> T: ...
    def get(self, key: str, type_: type[T], default: T | None = None) -> T | None:
        value = self._metadata.get(key, default)
        if value is not None and type(value) is not type_:
            raise GGUFError(f"{self.path}: {key} is {value!r:.80}, expected {type_.__name__}")
        if type(value) is float and not math.isfinite(value):
            raise GGUFError(f"{self.path}: {key} is {value}, expected a finite number")
        return value

    def require(self, key: str, type_: type[T]) -> T:
        value = self.get(key, type_)
        if value is None:
            raise GGUFError(f"{self.path}: {key} is missing")
        return value

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor in float32, made anew at every call."""
        if name not in self._tensors:
            raise GGUFError(f"{self.path} has no tensor {name}")
        return make(self._checkpoint, self._tensors[name]).reshape(-1).view(np.uint8)

    def release(self, name: str) -> None:
        """Let the system take back the pages of a tensor's sources."""
        for source in self._tensors[name].sources:
            self._checkpoint.release(source)

    def require_decodable(self, names: Iterable[str] | None = None) -> None:
        """Types were checked when the folder was opened. Raises ShapeError for a tensor that it lacks."""
        for name in names or ():
            if name not in self._tensors:
                raise ShapeError(f"{self.path} has no tensor {name}")


def open_model(path: Path) -> GGUFFile | ModelFolder:
    """A GGUF file, or a folder with safetensors. Raises: as both."""
    return ModelFolder(path) if path.is_dir() else open_gguf(path)
