"""What every backend offers: named buffers, and a tape that records ops once and replays them.

A model calls ops on a `Recorder`; each op appends jobs to it. `Recorder.finish()` gives a `Tape`, and `Tape.replay()`
runs the whole sequence without walking Python again.
"""

import threading
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


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
        """Run every op; returns when all results are written."""


class Recorder(Protocol):
    """Receives the ops of a model while it is recorded."""

    backend: str
    rows: int

    def finish(self) -> Tape:
        """Close the recording."""


def aligned(n_bytes: int, alignment: int = 64) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeroed bytes at an aligned address; pages are only taken from the system once they are written."""
    raw = np.zeros(n_bytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + n_bytes]


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
