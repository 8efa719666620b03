"""The CUDA backend: buffers in device memory, and launches of Triton kernels recorded as a CUDA graph.

On the device "cpu" the same kernels run under Triton's interpreter, without graphs: that is for tests.
Everything runs in order on torch's current stream.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from sparkinfer.backend.base import Activation, Buffer, CacheFormat
from sparkinfer.backend.board import Board
from sparkinfer.backend.kernel_keys import settle_key
from sparkinfer.backend.launchers import Turns
from sparkinfer.backend.mailbox import POSTS, PinnedMailbox
from sparkinfer.backend.sources import hash_sources
from sparkinfer.backend.triton_steps import (
    Fork,
    Join,
    Launch,
    Mark,
    Pending,
    Step,
    Transfer,
    run_lanes,
)
from sparkinfer.errors import UnsupportedError
from sparkinfer.machine import available_memory

ROW_BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16)  # row counts that scratch memory is sized for
EXACT_ROWS = ROW_BLOCKS[-1]  # more rows are a prefill, which may use other kernels
COMPILERS = 16  # threads that compile kernels
_TURNS = Turns(triton.knobs.build.cc)
if triton.knobs.build.impl is None:
    triton.knobs.build.impl = _TURNS.build
_DTYPES = {
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float16): torch.float16,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.uint8): torch.uint8,
}


def usable(number: int = 0) -> str:
    """Why torch has no GPU of this number here; empty when it has."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    count = torch.cuda.device_count()
    return (
        "" if number < count else f"there is no GPU {number}: torch finds {count}, numbered from 0"
    )


def free_memory() -> int:
    """Bytes that are free on the first GPU."""
    return int(torch.cuda.mem_get_info(0)[0])


def q8_views(q8: Buffer) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of a quantised activation as int32 [rows, n / 4] and its floats [rows, 2 x n / 32]: the scales, then
    scale times sum of codes. Row strides count words of four bytes.
    """
    words = q8.array.view(torch.int32)
    codes = q8.width * 4 // 5 // 4  # n codes and 8 bytes per 32 of them: n = width x 4 / 5
    return words[:, :codes], words[:, codes:].view(torch.float32)


class CudaTape:
    """A finished recording. One for few rows, or a whole chunk, becomes a graph when it is first needed."""

    def __init__(
        self,
        backend: "CudaBackend",
        steps: list[Step],
        keep: list[Any],
        *,
        graph: bool,
    ):
        self._backend, self.steps, self._keep = backend, steps, keep
        self._captures, self._graph = graph, None
        self._compiled = False

    def prepare(self) -> None:
        """Compile what is not compiled yet and capture the graph. Nothing is executed."""
        self._backend.enter()
        if not self._compiled:
            self._backend.compile([step for step in self.steps if isinstance(step, Launch)])
            self._compiled = True
        if self._captures and self._graph is None:
            self._graph = self._capture()

    def _capture(self) -> Any:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(
            graph, stream=self._backend.side_stream, capture_error_mode="thread_local"
        ):
            run_lanes(self.steps, self._backend.second_lane)
        return graph

    def replay(self) -> None:
        """Start it; `CudaBackend.wait` tells when it is done."""
        self.prepare()
        if self._graph is not None:
            self._graph.replay()
            return
        for step in self.steps:
            step.run()

    def start(self) -> None:
        """A replay only starts it anyway."""
        self.replay()


@dataclass
class CudaRecorder:
    """Collects launches. `rows` may be lowered before the last ops."""

    owner: "CudaBackend"
    rows: int
    cache_format: CacheFormat = "f16"
    backend: str = "cuda"
    steps: list[Step] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)
    prefers_prologue: bool = False
    blocked: set[int] = field(default_factory=set)  # float32 rows whose int8 blocks are there too
    _pending: Pending = field(default_factory=Pending)
    _aside: list[Step] | None = None
    _held: list[Step] = field(default_factory=list)
    _first_rows: int = 0

    def __post_init__(self) -> None:
        self._first_rows = self.rows

    @property
    def wide(self) -> bool:
        """More rows than a verify window: kernels need not have the bits of those for few rows."""
        return self.rows > EXACT_ROWS

    @property
    def row_block(self) -> int:
        """The compiled row count that serves `rows`."""
        assert not self.wide, self.rows
        return next(block for block in ROW_BLOCKS if block >= self.rows)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Launches run one after the other."""
        yield

    def launch(
        self,
        kernel: Any,
        grid: Sequence[int],
        *args: Any,
        num_warps: int = 4,
        num_stages: int = 1,
        overlap: bool = False,
        **constants: Any,
    ) -> None:
        """Append `kernel[grid](*args, **constants)`; `overlap` as kernels/triton_overlap.py has it."""
        options = {**constants, "num_warps": num_warps, "num_stages": num_stages}
        if self._aside is not None:
            self._aside.append(Launch(kernel, tuple(grid), args, options, aside=True))
            return
        mark = self._pending.met(args)
        if mark is not None:
            self.steps += [*self._released(), Join(mark)]
        elif overlap and self.owner.overlaps:
            options["launch_pdl"] = True
        self.steps.append(Launch(kernel, tuple(grid), args, options))

    @property
    def lanes(self) -> bool:
        """Whether launches recorded `aside` may run beside others."""
        return self.wide

    @contextmanager
    def aside(self, *results: Buffer, late: bool = False) -> Iterator[None]:
        """Record launches of the second lane; `late`: they start at the next `release`, or when a result is read."""
        assert self.lanes and self._aside is None
        mark = Mark()
        self._aside = []
        yield
        launches, self._aside = self._aside, None
        self._held += [*launches, mark]
        self._pending.add(mark, [buffer.array for buffer in results])
        if not late:
            self.release()

    def release(self) -> None:
        """Start what was held back."""
        self.steps += self._released()

    def _released(self) -> list[Step]:
        held, self._held = self._held, []
        return [Fork(), *held] if held else []

    def scratch(self, name: str, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """At least `count` elements that every tape of the backend may use between its launches of one lane."""
        return self.owner.scratch(
            f"{name} aside" if self._aside is not None else name, count, dtype
        )

    def pin(self, value: Any) -> Any:
        """Keep something alive with the tape."""
        self.keep.append(value)
        return value

    def receive(self, buffer: Buffer, rows: int | None = None, columns: int | None = None) -> None:
        """Bring what the host wrote to the buffer's staging memory: its first rows (default: those of this run)."""
        count = min(buffer.rows, self.rows) if rows is None else rows
        host = self.owner.staging_tensor(buffer)
        part = (slice(count), slice(columns))
        self.steps.append(Transfer(buffer.array[part], host[part]))

    def deliver(self, buffer: Buffer, rows: int | None = None) -> None:
        """Bring the buffer's first rows to its staging memory."""
        count = min(buffer.rows, self.rows) if rows is None else rows
        host = self.owner.staging_tensor(buffer)
        self.steps.append(Transfer(host[:count], buffer.array[:count]))

    def finish(self) -> CudaTape:
        """Windows and whole chunks of a prompt become graphs; other row counts are many, and launched one by one."""
        left = self._pending.rest()
        if left is not None:
            self.steps += [*self._released(), Join(left)]
        graph = self.owner.graphs and (
            self._first_rows <= EXACT_ROWS or self._first_rows == self.owner.chunk
        )
        return CudaTape(self.owner, self.steps, self.keep, graph=graph)


class CudaBackend:
    """Buffers and tapes on one GPU. One forward at a time."""

    name = "cuda"
    threads = 4  # that load weights
    chunk = 4096
    on_host = False
    asynchronous = True
    cache_formats: tuple[CacheFormat, ...] = ("f32", "f16", "q8_0")

    def __init__(self, device: str = "cuda", *, graphs: bool = True) -> None:
        """`graphs` False: every launch by itself.

        Raises UnsupportedError without a usable GPU.
        """
        self.device = torch.device("cuda:0" if device == "cuda" else device)
        self.interpreted = self.device.type == "cpu"
        if self.interpreted != bool(triton.knobs.runtime.interpret):
            raise UnsupportedError(
                f"device '{device}' needs Triton's interpreter {'on' if self.interpreted else 'off'}"
            )
        self.graphs = graphs and not self.interpreted
        self.sms = 1  # under the interpreter few large programs are fastest
        self.side_stream: Any = None
        self.overlaps = False  # kernels may start before the one before them has ended
        self.warpgroups = False  # matrix instructions of Hopper, by Gluon as Triton 3.6 has it
        if not self.interpreted:
            if not torch.cuda.is_available():
                raise UnsupportedError("no CUDA device is available to torch")
            torch.cuda.set_device(self.device)
            self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
            self.side_stream = torch.cuda.Stream(self.device, priority=-1)
            capability = torch.cuda.get_device_capability(self.device)
            self.overlaps = capability >= (9, 0)
            self.warpgroups = capability[0] == 9 and triton.__version__.startswith("3.6.")
            self._other = torch.cuda.Stream(self.device)
            self.second_lane = torch.cuda.Stream(self.device)
            self._needed, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._scratch: dict[str, torch.Tensor] = {}
        self._staging: dict[Any, torch.Tensor] = {}
        self._compiled: set[Any] = set()
        self._settled: set[int] = set()
        self.waits = 0  # times that the host has waited
        self._parted = False  # something was started on the other stream since they were joined

    @property
    def plan(self) -> dict[str, Any]:
        kernels = hash_sources(f"{torch.__version__} {triton.__version__}", gpu=True)
        if self.interpreted:
            return {
                "backend": self.name,
                "device": "interpreter",
                "mode": "eager",
                "kernels": kernels,
            }
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "backend": self.name,
            "device": properties.name,
            "multiprocessors": self.sms,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "mode": "graph" if self.graphs else "eager",
            "prompt_kernels": "gluon" if self.warpgroups else "triton",
            "kernels": kernels,
        }

    def enter(self) -> None:
        """Let this thread's launches go to this GPU: a new thread's go to the first one."""
        if self.device.index:
            torch.cuda.set_device(self.device)

    def memory(self) -> int:
        if self.interpreted:
            return available_memory()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def taken(self) -> int:
        return 0 if self.interpreted else int(torch.cuda.memory_allocated(self.device))

    # ---- memory

    def zeros(self, shape: Sequence[int], dtype: Any = np.float32) -> torch.Tensor:
        """Zeroed device memory. Raises MemoryError."""
        self.join()  # the memory may have been that of something in use on the other stream
        try:
            return torch.zeros(tuple(shape), dtype=_DTYPES[np.dtype(dtype)], device=self.device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error).splitlines()[0]) from error

    def address(self, array: torch.Tensor) -> int:
        return array.data_ptr()

    def copy(self, array: torch.Tensor) -> torch.Tensor:
        self.join()
        return array.clone()

    def buffer(
        self, rows: int, width: int, dtype: Any = np.float32, *, private: bool = False
    ) -> Buffer:
        """Zeroed memory of rows x width, each row 64-byte aligned; threads share it (`private` changes nothing)."""
        item = np.dtype(dtype).itemsize
        stride = -(-width * item // 64) * 64
        tensor = self.zeros((rows, stride // item), dtype)
        return Buffer(tensor[:, :width], tensor.data_ptr(), rows, width, stride)

    def activation(
        self, rows: int, width: int, *, quantised: bool, private: bool = False
    ) -> Activation:
        """Memory for the input of a matrix product; `quantised` adds the int8 form (width a multiple of 32).

        A row of it: `width` int8 codes, a float32 scale per block of 32, float32 scale times sum of codes per block.
        """
        f32 = self.buffer(rows, width)
        if not quantised:
            return Activation(f32, None)
        return Activation(f32, self.buffer(rows, width + 8 * (width // 32), np.uint8))

    def upload(self, buffer: Buffer, values: NDArray[Any]) -> None:
        """Fill a buffer from the host."""
        buffer.array.copy_(torch.from_numpy(np.array(values)))  # a copy: files map read-only

    def download(self, array: torch.Tensor) -> NDArray[Any]:
        values: NDArray[Any] = array.to("cpu", copy=True).numpy()
        return values

    def staging(self, buffer: Buffer) -> NDArray[Any]:
        """The host's side of a buffer, which `Recorder.receive` and `deliver` copy from and to."""
        host: NDArray[Any] = self.staging_tensor(buffer).numpy()
        return host

    def staging_tensor(self, buffer: Buffer) -> torch.Tensor:
        # An address alone may be that of a buffer that is gone by now.
        shape, dtype = (buffer.rows, buffer.width), buffer.array.dtype
        key = (buffer.address, shape, dtype)
        if key not in self._staging:
            self._staging[key] = torch.zeros(shape, dtype=dtype, pin_memory=not self.interpreted)
        return self._staging[key]

    def mailbox(self, buffer: Buffer) -> PinnedMailbox:
        shape, dtype = (2 * POSTS, buffer.width), buffer.array.dtype
        rows = torch.zeros(shape, dtype=dtype, pin_memory=not self.interpreted)
        return PinnedMailbox(self, buffer.array[0], rows)

    def board(self, rows: int) -> Board:
        # 16 bytes a row: a kernel that begins at another row is compiled for such addresses as well.
        words = torch.zeros((rows, 2), dtype=torch.int64, pin_memory=not self.interpreted)
        seen = memoryview(words.numpy()[:, 0])
        buffer = Buffer(words[:, :1], words.data_ptr(), rows, 1, 16)
        return Board(buffer, seen, self._ended, self._waited)

    def _ended(self) -> bool:
        """Raises what torch raises for a device that has failed."""
        return self.interpreted or bool(torch.cuda.current_stream(self.device).query())

    def scratch(self, name: str, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """At least `count` elements, shared by everything that asks for this name and type."""
        key = f"{name} {dtype}"
        found = self._scratch.get(key)
        if found is None or found.numel() < count:
            found = torch.zeros(count, dtype=dtype, device=self.device)
            self._scratch[key] = found
        return found

    # ---- running

    def recorder(self, rows: int, cache_format: CacheFormat = "f16") -> CudaRecorder:
        return CudaRecorder(self, rows, cache_format)

    def compile(
        self, launches: Iterable[Launch], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compile every variant that is new, several at a time; `progress(done, total)`."""
        if self.interpreted:
            return
        fresh = {launch.variant: launch for launch in launches}
        for known in self._compiled & fresh.keys():
            del fresh[known]
        ordered = sorted(fresh.values(), key=Launch.turn)
        for launch in ordered:
            settle_key(launch.kernel, self._settled)
        with ThreadPoolExecutor(COMPILERS) as pool:
            jobs = [pool.submit(self._compile, launch) for launch in ordered]
            for done, job in enumerate(jobs, 1):
                job.result()
                if progress:
                    progress(done, len(jobs))
        self._compiled |= fresh.keys()

    def _compile(self, launch: Launch) -> None:
        """Compile and load."""
        torch.cuda.set_device(self.device)
        compiled = launch.compile()
        with _TURNS.taken():
            compiled._init_handles()

    def prepare(
        self, tapes: Iterable[CudaTape], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compile and capture tapes ahead of use."""
        tapes = list(tapes)
        steps = (step for tape in tapes for step in tape.steps)
        self.compile((step for step in steps if isinstance(step, Launch)), progress)
        for tape in tapes:
            tape.prepare()

    def mark(self) -> None:
        """What is started `beside` later needs nothing but what was started up to now."""
        if self.graphs:
            self._needed.record(torch.cuda.current_stream(self.device))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """On another stream, after the last `mark`."""
        if not self.graphs:
            yield
            return
        self._other.wait_event(self._needed)
        with torch.cuda.stream(self._other):
            yield
            self._done.record()
        self._parted = True

    def join(self) -> None:
        if self._parted:
            torch.cuda.current_stream(self.device).wait_event(self._done)
            self._parted = False

    def wait(self) -> None:
        """Return when everything that was started is done; staging memory may be read and written then."""
        self.join()
        if not self.interpreted:
            torch.cuda.synchronize(self.device)
        self._waited()

    def _waited(self) -> None:
        self.waits += 1

    def close(self) -> None:
        """Let go of graphs' shared memory. Idempotent."""
        self._scratch.clear()
        self._staging.clear()
