"""What every backend offers: named buffers, and a tape that records ops once and replays them.

A model calls ops on a `Recorder`; each op appends jobs to it. `Recorder.finish()` gives a `Tape`, and `Tape.replay()`
runs the whole sequence without walking Python again.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sparkinfer.backend.board import Board

CacheFormat = Literal["f32", "f16", "q8_0"]  # of keys and values


@dataclass(frozen=True)
class Buffer:
    """Memory of `rows` rows of `width` elements; `stride` is the distance of two rows in bytes.

    `thread_stride` is 0 for memory that all threads share, else the distance in bytes of the copies each thread has.
    """

    array: Any
    address: int
    rows: int
    width: int
    stride: int
    thread_stride: int = 0

    def part(self, first: int, count: int) -> "Buffer":
        """`count` rows from `first` on of a shared buffer."""
        assert self.thread_stride == 0 and 0 <= first <= self.rows - count, (self.rows, first)
        array, address = self.array[first : first + count], self.address + first * self.stride
        return replace(self, array=array, address=address, rows=count)


@dataclass(frozen=True)
class Activation:
    """Input of a matrix product, as float32 rows and, when a quantised weight reads it, as int8 blocks of 32.

    `q8` is block-major over groups of 8 rows (the last group may be smaller): for a group of R rows, each block of 32
    columns is a record of R x 32 int8 codes, then R float32 scales d, R int32 sums of codes 0-15, R int32 sums of codes
    16-31 and R float32 d * (sum of all codes): 48 R bytes.
    """

    f32: Buffer
    q8: Buffer | None

    @property
    def private(self) -> bool:
        """Each thread has its copy: a prologue of the one phase that reads it must write it."""
        return self.f32.thread_stride != 0


class Tape(Protocol):
    """A recorded sequence of ops."""

    def replay(self) -> None:
        """Start every op, in order; `Backend.wait` returns when all results are written."""

    def start(self) -> None:
        """The same, but returns at once on the host too: until `Backend.wait` or another replay, its results and what
        it reads belong to it.
        """


class Recorder(Protocol):
    """Receives the ops of a model while it is recorded. `rows` may be lowered before the last ops.

    What the host writes into staging memory reaches a buffer by `receive`, what it reads comes by `deliver`; what is
    sent to a `Mailbox` arrives before the next replay.
    """

    backend: str
    rows: int
    cache_format: CacheFormat  # of the keys and values that the ops read and write

    @property
    def prefers_prologue(self) -> bool:
        """Few enough rows that each thread computes a cheap op for itself, into its private copy."""

    def together(self) -> AbstractContextManager[None]:
        """The ops recorded inside may run side by side: they do not read each other's results."""

    @property
    def lanes(self) -> bool:
        """Whether ops recorded `aside` may run beside those recorded after them."""

    def aside(self, *results: Buffer, late: bool = False) -> AbstractContextManager[None]:
        """The ops recorded inside run beside what is recorded after them until something reads one of the results.

        Their inputs are there when it is entered. What writes over these, or over the results, comes after something
        that reads the results. `late`: they start where the kernels after them leave room. Only with `lanes`.
        """

    def receive(self, buffer: Buffer, rows: int | None = None, columns: int | None = None) -> None:
        """Bring the first rows (default: as many as the recorder has) and columns (default: all) of its staging memory
        to a buffer.
        """

    def deliver(self, buffer: Buffer, rows: int | None = None) -> None:
        """Bring the first rows of a buffer to its staging memory."""

    def finish(self) -> Tape:
        """Close the recording."""


class Mailbox(Protocol):
    """Numbers that the host gives a buffer of one row, in order with the replays before and after."""

    def send(self, values: Sequence[int]) -> None:
        """Write the buffer's first columns. Returns at once, also while something runs."""


class HostMailbox:
    """Of a backend whose buffers the host writes itself."""

    def __init__(self, buffer: Buffer) -> None:
        self._row = buffer.array[0]

    def send(self, values: Sequence[int]) -> None:
        self._row[: len(values)] = values


class Weight(Protocol):
    """A matrix (or a stack of `experts` matrices) in the backend's own form."""

    @property
    def format_name(self) -> str: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def quantised(self) -> bool:
        """It reads the int8 form of an activation."""

    @property
    def padded_outputs(self) -> int:
        """Columns the result buffer must have."""

    @property
    def n_bytes(self) -> int: ...


class Memory(Protocol):
    """Where state lives."""

    def zeros(self, shape: Sequence[int], dtype: Any = ...) -> Any:
        """A zeroed array that can be sliced and assigned to."""

    def address(self, array: Any) -> int:
        """Where its first element lies, as kernels see it."""

    def copy(self, array: Any) -> Any:
        """An independent copy."""

    def join(self) -> None:
        """What comes now is to see the results of what was started `beside` other work."""


class Backend(Memory, Protocol):
    """Where a model's buffers live and its tapes run."""

    name: str
    threads: int  # that load weights
    chunk: int  # most rows of a run
    on_host: bool  # the host reads and writes buffers directly
    asynchronous: bool  # what is started runs while the host does something else
    cache_formats: tuple[CacheFormat, ...]  # of keys and values that it has kernels for

    @property
    def plan(self) -> dict[str, Any]:
        """What it resolved: name, device and kind of replay, for records."""

    def memory(self) -> int:
        """Bytes that are free for weights and state."""

    def taken(self) -> int:
        """Bytes of a device that this process's weights and buffers take; only where the backend is not `on_host`."""

    def buffer(self, rows: int, width: int, dtype: Any = ..., *, private: bool = ...) -> Buffer:
        """Zeroed memory of rows x width; one copy per thread when `private`."""

    def activation(
        self, rows: int, width: int, *, quantised: bool, private: bool = ...
    ) -> Activation:
        """Memory for the input of a matrix product."""

    def upload(self, buffer: Buffer, values: NDArray[Any]) -> None:
        """Fill a buffer."""

    def download(self, array: Any) -> NDArray[Any]:
        """The numbers of an array of this backend, copied to the host."""

    def staging(self, buffer: Buffer) -> NDArray[Any]:
        """The host's side of a buffer. To be touched only when nothing runs (`wait`)."""

    def mailbox(self, buffer: Buffer) -> Mailbox:
        """The way to a buffer of one row that is written between replays."""

    def recorder(self, rows: int, cache_format: CacheFormat = ...) -> Recorder:
        """Begin to record ops on `rows` rows; keys and values are float16 unless said otherwise."""

    def prepare(
        self, tapes: Sequence[Any], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Make tapes of this backend ready ahead of use; `progress(done, total)`."""

    def board(self, rows: int) -> "Board | None":
        """What a device tells the host about so many rows; None on the host."""

    def mark(self) -> None:
        """What is started `beside` later needs nothing but what was started up to now."""

    def beside(self) -> AbstractContextManager[None]:
        """What is started inside may run beside what is started after it, until `join`. It writes nothing that others
        read or write until then, and uses no scratch memory.
        """

    def wait(self) -> None:
        """Return when everything that was replayed has run."""

    def close(self) -> None:
        """Stop what runs. Idempotent."""


def aligned(n_bytes: int, alignment: int = 64) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeroed bytes at an aligned address; pages are only taken from the system once they are written."""
    raw = np.zeros(n_bytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + n_bytes]


class HostMemory:
    """Ordinary memory; pages are only taken from the system once they are written."""

    def zeros(self, shape: Sequence[int], dtype: Any = np.float32) -> Any:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return aligned(size + 64)[:size].view(dtype).reshape(shape)

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def copy(self, array: Any) -> Any:
        return array.copy()

    def join(self) -> None:
        """Nothing runs beside anything."""


class Arena:
    """Memory for weights, in slabs large enough that the system backs them with huge pages; never freed in part."""

    _SLAB = 64 * 2**20
    _TAIL = 4096  # kernels may ask for memory a little ahead of the last weight

    def __init__(self) -> None:
        self._slab = aligned(0)
        self._used = 0
        self._lock = threading.Lock()

    def take(self, n_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """`n_bytes` zeroed bytes at a 64-byte boundary. Thread-safe."""
        with self._lock:
            if self._used + n_bytes + self._TAIL > self._slab.size:
                self._slab, self._used = aligned(max(self._SLAB, n_bytes + self._TAIL)), 0
            start = self._used
            self._used += -(-n_bytes // 64) * 64
            return self._slab[start : start + n_bytes]
