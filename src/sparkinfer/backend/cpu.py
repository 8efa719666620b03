"""The CPU backend: buffers in ordinary memory, a tape of compiled jobs and the threads that replay it."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend import executor
from sparkinfer.backend.base import (
    Activation,
    Arena,
    Buffer,
    CacheFormat,
    HostMailbox,
    HostMemory,
    Mailbox,
    aligned,
)
from sparkinfer.backend.compiled import Kernel, ahead, compile_all, source_hash
from sparkinfer.backend.isa import Isa
from sparkinfer.machine import available_memory

GROUP = 8  # rows that share a decoded weight block
Q8_RECORD = 48  # bytes per row and block of 32 in a quantised activation
PROLOGUE_ROWS = 16  # up to here cheap ops run in each thread instead of as a phase of their own


Word = int | Kernel  # of a kernel the address, which is known when its tape is linked


@dataclass(frozen=True)
class Job:
    """`kernel` run over `chunks` chunks with the int64 arguments `args`; a word at `count` multiplies them.

    That word may only change before the job's phase in a run, never after it: a late thread may still read it.
    """

    kernel: Kernel
    args: tuple[Word, ...]
    chunks: int
    count: int = 0


class CpuTape:
    """A finished recording. Holds every array its jobs point to.

    Kernels are compiled, and their addresses written into it, when it is linked: before it first runs, or with others
    by `CpuBackend.prepare`.
    """

    def __init__(
        self,
        backend: "CpuBackend",
        phases: list[tuple[list[Job], list[Job]]],
        keep: list[Any],
        places: "Places",
    ) -> None:
        self._backend = backend
        self._keep: list[Any] = keep
        self._places = places
        rows = np.zeros((max(1, len(phases)), executor.PHASE_WORDS), np.int64)
        for index, (jobs, prologue) in enumerate(phases):
            job_rows = [(j.kernel, self._pack(j.args), j.chunks, j.count) for j in jobs]
            prologue_rows = [(j.kernel, self._pack(j.args)) for j in prologue]
            rows[index] = (
                len(jobs),
                self._table(job_rows),
                len(prologue),
                self._table(prologue_rows),
            )
        counters = aligned(8 * executor.COUNTER_WORDS * max(1, len(phases)))
        self._keep += [rows, counters]
        self._head = self._pack((len(phases), rows.ctypes.data, counters.ctypes.data))
        self.n_phases = len(phases)
        backend.keep.append(
            self._keep
        )  # a late thread may still read a tape nobody replays any more

    def _pack(self, values: Iterable[Word]) -> int:
        array = packed([*values, 0], self._places)
        self._keep.append(array)
        return int(array.ctypes.data)

    def _table(self, rows: Sequence[tuple[Word, ...]]) -> int:
        return self._pack(value for row in rows for value in row)

    @property
    def kernels(self) -> Iterator[Kernel]:
        """Those whose addresses are not written yet."""
        return (kernel for _, _, kernel in self._places)

    def link(self) -> None:
        """Write the addresses of its kernels, compiled where they are not yet."""
        compile_all(self.kernels)
        for array, place, kernel in self._places:
            array[place] = kernel.address
        self._places = []

    def replay(self) -> None:
        if self._places:
            self.link()
        self._backend.run(self._head)

    def start(self) -> None:
        """Replay with the other threads; `CpuBackend.wait`, or another run, helps them to the end."""
        if self._places:
            self.link()
        self._backend.start(self._head)


Places = list[tuple[NDArray[np.int64], int, Kernel]]  # where addresses are to be written


def packed(values: Sequence[Word], places: Places) -> NDArray[np.int64]:
    """The values as an array; `places` gets those of kernels."""
    try:
        return np.array(values, np.int64)
    except TypeError:
        array = np.array([0 if isinstance(v, Kernel) else v for v in values], np.int64)
        places += [(array, i, value) for i, value in enumerate(values) if isinstance(value, Kernel)]
        return array


@dataclass
class CpuRecorder:
    """Collects phases. Ops that are cheap become the prologue of the next phase when there are few rows."""

    owner: "CpuBackend"
    rows: int
    cache_format: CacheFormat = "f16"
    backend: str = "cpu"
    phases: list[tuple[list[Job], list[Job]]] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)
    _pending: list[Job] = field(default_factory=list)
    _places: Places = field(default_factory=list)
    _together: list[Job] | None = None

    def phase(self, jobs: list[Job]) -> None:
        """A phase of `jobs` that may run side by side; pending prologue entries run before it in each thread."""
        if self._together is not None:
            self._together += jobs
            return
        self.phases.append((jobs, self._pending))
        self._pending = []

    @contextmanager
    def together(self) -> Iterator[None]:
        """Join the phases recorded inside into one: their ops must not read each other's results."""
        self._together = []
        yield
        jobs, self._together = self._together, None
        self.phase(jobs)

    @property
    def lanes(self) -> bool:
        """A CPU runs its ops one after the other."""
        return False

    @contextmanager
    def aside(self, *results: Buffer, late: bool = False) -> Iterator[None]:
        """They run in order with the others."""
        yield

    def prologue(self, job: Job) -> None:
        """Run `job` (one chunk) in each thread that takes part in the next phase, with the same result in each."""
        assert self._together is None, "a prologue belongs before the joined phases"
        self._pending.append(job)

    def waiting(self) -> list[Job]:
        """The prologue entries of the next phase so far, for a caller whose later phases need them again."""
        return list(self._pending)

    def take_prologue(self, kernel: Kernel) -> Job | None:
        """The latest prologue entry if it runs `kernel`: the caller's phase does its work instead."""
        if self._pending and self._pending[-1].kernel is kernel:
            return self._pending.pop()
        return None

    def take_phase(self, kernel: Kernel, place: int, value: int) -> Job | None:
        """The only job of the latest phase if it runs `kernel` with `value` at `place` of its arguments.

        The caller's next phase does its work instead, after the same prologue.
        """
        jobs, prologue = self.phases[-1] if self.phases else ([], [])
        if len(jobs) != 1 or jobs[0].kernel is not kernel or jobs[0].args[place] != value:
            return None
        assert not self._pending, "a prologue between two phases that are joined"
        self.phases.pop()
        self._pending = prologue
        return jobs[0]

    @property
    def prefers_prologue(self) -> bool:
        return self.rows <= PROLOGUE_ROWS

    def pin(self, array: Any) -> int:
        """Keep an array alive with the tape; returns its address."""
        self.keep.append(array)
        return int(array.ctypes.data)

    def words(self, values: Sequence[Word]) -> int:
        """Keep numbers and addresses of kernels with the tape; returns where they are."""
        return self.pin(packed(values, self._places))

    def also(self, kernel: Kernel) -> None:
        """Have a kernel compiled with those of the tape: the host calls it after a run."""
        self._places.append((np.zeros(1, np.int64), 0, kernel))

    def receive(self, buffer: Buffer, rows: int | None = None, columns: int | None = None) -> None:
        """Nothing: the host wrote it there."""

    def deliver(self, buffer: Buffer, rows: int | None = None) -> None:
        """Nothing: the host reads it there."""

    def finish(self) -> CpuTape:
        assert not self._pending, "a prologue without a phase"
        return CpuTape(self.owner, self.phases, self.keep, self._places)


def _end(
    stop: Callable[..., None], control: Any, keep: list[Any], workers: list[threading.Thread]
) -> None:
    """End the threads; until then `keep` holds every tape that one of them may still read."""
    stop(int(control.ctypes.data))
    for worker in workers:
        worker.join()


def _nothing() -> None:
    pass


class CpuBackend(HostMemory):
    """Threads and buffers of one loaded model. `run` is not reentrant: one forward at a time."""

    name = "cpu"
    chunk = 64
    on_host = True
    cache_formats: tuple[CacheFormat, ...] = ("f32", "f16", "q8_0")

    def __init__(self, isa: Isa, threads: int) -> None:
        self.isa = isa
        self.threads = threads
        self.asynchronous = threads > 1
        self.arena = Arena()
        self.keep: list[list[Any]] = []
        self._scratch: dict[str, list[np.ndarray[Any, np.dtype[np.uint8]]]] = {}
        self._control = aligned(8 * executor.CONTROL_WORDS)
        self._control.view(np.int64)[executor.THREADS // 8] = threads
        self._address = int(self._control.ctypes.data)
        self._run: Callable[..., None] | None = None
        self._started = 0  # tape that was started and not waited for
        self._lock = threading.Lock()
        self._workers: list[threading.Thread] = []
        self._stop: Callable[[], Any] = _nothing
        ahead(executor.KERNELS)

    def _begin(self) -> None:
        """Start the threads, before the first run. Holds the lock."""
        compile_all(executor.KERNELS)
        self._start = executor.START.native(2)
        self._join = executor.JOIN.native(2)
        self._workers += [
            threading.Thread(
                target=executor.WORK.native(2), args=(self._address, index), daemon=True
            )
            for index in range(1, self.threads)
        ]
        for worker in self._workers:
            worker.start()
        # Also when nobody closes: a thread must never wait in memory that is gone.
        stop = executor.STOP_ALL.native(1)
        self._stop = weakref.finalize(self, _end, stop, self._control, self.keep, self._workers)
        self._run = executor.RUN.native(2)

    @property
    def plan(self) -> dict[str, Any]:
        return {
            "backend": self.name,
            "isa": self.isa.name,
            "isa_reason": self.isa.reason,
            "threads": self.threads,
            "mode": "graph",
            "kernels": source_hash(),
        }

    def memory(self) -> int:
        return available_memory()

    def run(self, head: int) -> None:
        with self._lock:
            if self._run is None:
                self._begin()
            self._finish()
            self._run(self._address, head)  # type: ignore[misc]

    def start(self, head: int) -> None:
        """Run without waiting, where there are threads beside the caller's."""
        if self.threads == 1:
            self.run(head)
            return
        with self._lock:
            if self._run is None:
                self._begin()
            self._finish()
            self._started = head
            self._start(self._address, head)

    def _finish(self) -> None:
        """Help with what was started. Holds the lock."""
        head, self._started = self._started, 0
        if head:
            self._join(self._address, head)

    def close(self) -> None:
        """Stop the threads. Idempotent; no tape may be replayed afterwards."""
        self._stop()

    def upload(self, buffer: Buffer, values: NDArray[Any]) -> None:
        buffer.array[:] = values

    def download(self, array: Any) -> NDArray[Any]:
        return np.array(array)

    def staging(self, buffer: Buffer) -> NDArray[Any]:
        """The buffer itself."""
        array: NDArray[Any] = buffer.array
        return array

    def mailbox(self, buffer: Buffer) -> Mailbox:
        return HostMailbox(buffer)

    def board(self, rows: int) -> None:
        """The host reads what tapes leave in buffers."""

    def mark(self) -> None:
        """Nothing runs beside anything."""

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(
        self, tapes: Sequence[Any], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compile what the tapes need, side by side, and link them; `progress(done, total)` by kernels."""
        kernels = [kernel for tape in tapes for kernel in tape.kernels]
        compile_all([*executor.KERNELS, *kernels], progress)
        for tape in tapes:
            tape.link()

    def wait(self) -> None:
        """A replay returns when it is done: only what was started is waited for."""
        if self._started:
            with self._lock:
                self._finish()

    def recorder(self, rows: int, cache_format: CacheFormat = "f16") -> CpuRecorder:
        return CpuRecorder(self, rows, cache_format)

    def buffer(
        self, rows: int, width: int, dtype: Any = np.float32, *, private: bool = False
    ) -> Buffer:
        """Zeroed memory of rows x width, each row 64-byte aligned; one copy per thread when `private`."""
        item = np.dtype(dtype).itemsize
        stride = -(-width * item // 64) * 64
        copies = self.threads if private else 1
        size = -(-rows * stride // 64) * 64 + 64
        raw = aligned(size * copies)
        array = raw[: rows * stride].view(dtype).reshape(rows, stride // item)[:, :width]
        return Buffer(array, int(raw.ctypes.data), rows, width, stride, size if private else 0)

    def shared_scratch(self, name: str, n_bytes: int) -> int:
        """Address of at least `n_bytes` that live as long as the backend; the same for equal names and sizes."""
        kept = self._scratch.setdefault(name, [])
        if not kept or kept[-1].size < n_bytes:
            kept.append(aligned(n_bytes))
        return int(kept[-1].ctypes.data)

    def activation(
        self, rows: int, width: int, *, quantised: bool, private: bool = False
    ) -> Activation:
        """Memory for the input of a matrix product; `quantised` adds the int8 form (width a multiple of 32)."""
        f32 = self.buffer(rows, width, private=private)
        if not quantised:
            return Activation(f32, None)
        blocks = -(-width // 32)
        return Activation(f32, self.buffer(rows, blocks * Q8_RECORD, np.uint8, private=private))
