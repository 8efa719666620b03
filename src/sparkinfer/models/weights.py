"""Turn a file's tensors into packed weights: names and shapes checked first, all faults in one list."""

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend import workers
from sparkinfer.backend.base import Backend, Buffer, Weight
from sparkinfer.errors import ShapeError
from sparkinfer.kernels.gated_linear import pack_pair
from sparkinfer.kernels.linear import pack_weight
from sparkinfer.quant.formats import QUANT_FORMATS, dequantize
from sparkinfer.quant.tiles import LAYOUTS

Progress = Callable[[str, int, int], None]
Shape = tuple[int, ...]


class TensorEntry(Protocol):
    """One tensor; `shape[0]` is contiguous."""

    @property
    def shape(self) -> Shape: ...
    @property
    def type_name(self) -> str: ...
    @property
    def n_bytes(self) -> int: ...


class TensorSource(Protocol):
    """Where weights come from: a GGUF file, or another file behind the same table."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...
    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 [n_bytes]."""

    def release(self, name: str) -> None:
        """Let the system take back the memory of a tensor's pages."""

    def require_decodable(self, names: Iterable[str] | None = None) -> None:
        """Raise UnsupportedError for a tensor without decoder."""


def check_tensors(
    file: TensorSource, expected: Mapping[str, Shape], optional: Iterable[str] = ()
) -> None:
    """Compare the file with the tensors a model needs (shapes in GGUF order, contiguous dimension first).

    Raises ShapeError listing every missing tensor and every wrong shape, UnsupportedError for a type without decoder.
    """
    skip = {name for name in optional if name not in file.tensors}
    problems = tensor_problems(file, {k: v for k, v in expected.items() if k not in skip})
    if problems:
        raise ShapeError(f"{file.path} does not fit its metadata: {'; '.join(problems)}")
    file.require_decodable(name for name in expected if name not in skip)


def tensor_problems(file: TensorSource, expected: Mapping[str, Shape]) -> list[str]:
    """What is missing or has another shape, one phrase each."""
    problems = []
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is None:
            problems.append(f"{name} is missing")
        elif _trimmed(info.shape) != _trimmed(shape):
            problems.append(f"{name} is {_text(info.shape)}, expected {_text(shape)}")
    return problems


def _trimmed(shape: Shape) -> Shape:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _text(shape: Shape) -> str:
    return " x ".join(str(n) for n in shape)


@dataclass
class Weights:
    """Reads tensors of an open file. `exact`: expand every matrix to float32 (activations stay float32 too)."""

    file: TensorSource
    backend: Backend
    exact: bool
    progress: Progress | None = None
    matrices: list[Weight] = field(default_factory=list)
    formats: dict[str, int] = field(default_factory=dict)
    _done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def vector(self, name: str) -> Buffer:
        """A float32 vector as a 1 x n buffer."""
        return self.rows(self.floats(name).reshape(1, -1))

    def rows(self, values: NDArray[np.float32]) -> Buffer:
        buffer = self.backend.buffer(*values.shape)
        self.backend.upload(buffer, values)
        return buffer

    def floats(self, name: str) -> NDArray[np.float32]:
        """A whole tensor as float32, in row-major order (the reverse of the GGUF shape)."""
        info = self.file.tensors[name]
        block = QUANT_FORMATS[info.type_name].block_bytes
        values = dequantize(info.type_name, self.file.data(name).reshape(-1, block))
        self._count(name)
        return np.asarray(values, np.float32).reshape(info.shape[::-1])

    def matrix(self, *names: str, expand: bool = False) -> Weight:
        """Tensors of equal type stacked along their outputs; types that differ are expanded to float32."""
        kinds = {self.file.tensors[name].type_name for name in names}
        if self.exact or expand or len(kinds) > 1:
            values = np.concatenate([np.atleast_2d(self.floats(name)) for name in names])
            return self._released(self.packed_floats(values), *names)
        blocks = [self._blocks(name) for name in names]
        shapes = [(*self.file.tensors[name].shape, 1) for name in names]
        stacked = np.concatenate(blocks) if len(blocks) > 1 else blocks[0]
        outputs = sum(shape[1] for shape in shapes)
        return self._released(self._pack(kinds.pop(), stacked, outputs, shapes[0][0], 1), *names)

    def pair(self, gate: str, up: str) -> tuple[Weight, Weight]:
        """Two matrices, or stacks of experts, that read the same form of one activation.

        When one is of floats and the other quantised, that one is expanded to float32.
        """
        infos = [self.file.tensors[name] for name in (gate, up)]
        stack = len(infos[0].shape) == 3
        same = infos[0].type_name == infos[1].type_name
        if self.backend.on_host and same and not stack and not self.exact:
            return self._joined(gate, up)
        mixed = len({bool(LAYOUTS[info.type_name].floats) for info in infos}) > 1
        load = self.experts if stack else self.matrix
        return load(gate, expand=mixed), load(up, expand=mixed)

    def _joined(self, gate: str, up: str) -> tuple[Weight, Weight]:
        """Two matrices of one type in the form for `gated_linear` alone."""
        info = self.file.tensors[gate]
        blocks = self._blocks(gate), self._blocks(up)
        pair = pack_pair(self.backend, info.type_name, blocks, info.shape[1], info.shape[0])
        for weight, name in zip(pair, (gate, up), strict=True):
            self._note(info.type_name, weight)
            self._released(weight, name)
        return pair

    def experts(self, name: str, *, expand: bool = False) -> Weight:
        """A stack of expert matrices [inputs, outputs, experts]."""
        inputs, outputs, experts = (*self.file.tensors[name].shape, 1)[:3]
        if self.exact or expand:
            kind, blocks = "F32", self.floats(name).view(np.uint8).reshape(-1, 4)
        else:
            kind, blocks = self.file.tensors[name].type_name, self._blocks(name)
        return self._released(self._pack(kind, blocks, outputs, inputs, experts), name)

    def _released(self, weight: Weight, *names: str) -> Weight:
        """`weight`, after giving back the file's pages it was made from: they need not stay in memory twice."""
        for name in names:
            self.file.release(name)
        return weight

    def packed_floats(self, values: NDArray[np.float32]) -> Weight:
        blocks = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1, 4)
        return self._pack("F32", blocks, values.shape[0], values.shape[1], 1)

    def map(self, build: Callable[[int], Any], count: int) -> list[Any]:
        """build(0) .. build(count - 1), on the backend's threads."""
        with ThreadPoolExecutor(self.backend.threads) as pool:
            try:
                return list(pool.map(build, range(count)))
            except BaseException:  # a thread that waits for a kernel would be waited for
                workers.abandon()
                raise

    def _blocks(self, name: str) -> Any:
        info = self.file.tensors[name]
        self._count(name)
        return self.file.data(name).reshape(-1, QUANT_FORMATS[info.type_name].block_bytes)

    def _pack(self, kind: str, blocks: Any, outputs: int, inputs: int, experts: int) -> Weight:
        assert kind in LAYOUTS, kind
        weight = pack_weight(self.backend, kind, blocks, outputs, inputs, experts)
        self._note(kind, weight)
        return weight

    def _note(self, kind: str, weight: Weight) -> None:
        with self._lock:
            self.matrices.append(weight)
            self.formats[kind] = self.formats.get(kind, 0) + weight.n_bytes

    def _count(self, name: str) -> None:
        with self._lock:
            self._done += self.file.tensors[name].n_bytes
            done = self._done
        if self.progress:
            self.progress("load", done, self.total)

    @property
    def total(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(info.n_bytes for info in self.file.tensors.values())
