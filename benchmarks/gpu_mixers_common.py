"""What the parts of gpu_mixers.py share: the models' shapes, random buffers, times as medians of graph replays."""

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaBackend, CudaRecorder
from sparkinfer.kernels import run_params as P
from sparkinfer.kernels.shapes import Heads, RecurrentShape

PEAK = 4.42  # TB/s that this chip reads
ROWS, WIDE_ROWS = (1, 2, 4, 6, 8, 16), (512, 2048)
CONTEXTS = (128, 4096, 32768, 131072)
CONTEXT = CONTEXTS[-1] + WIDE_ROWS[-1]
EPS, VOCABULARY = 1e-6, 248320
EXACT_WINDOWS = (2, 6, 16)


@dataclass(frozen=True)
class Model:
    name: str
    kv_heads: int
    attention_layers: int
    recurrent_layers: int
    width: int

    def heads(self, layer: int) -> Heads:
        return Heads(layer, 16, self.kv_heads, 256, 64, False, True, EPS)

    @property
    def recurrent(self) -> RecurrentShape:
        return RecurrentShape(self.recurrent_layers, 8192, 4, 16, 32, 128, 16)


MODELS = (Model("35B", 2, 10, 30, 2048), Model("9B", 4, 8, 24, 4096))


class Bench:
    """The backend, random buffers, and the rows of the report."""

    def __init__(self) -> None:
        self.backend = CudaBackend("cuda")
        self.results: list[dict[str, Any]] = []
        self.generator = torch.Generator(device="cuda").manual_seed(1)

    def random(self, rows: int, width: int, scale: float = 1.0) -> Buffer:
        buffer = self.backend.buffer(rows, width)
        values = torch.randn((rows, width), generator=self.generator, device="cuda")
        buffer.array.copy_(scale * values)
        return buffer

    def params(self, **words: int) -> Buffer:
        buffer = self.backend.buffer(1, P.WORDS, np.int64)
        self.set(buffer, **words)
        return buffer

    def set(self, buffer: Buffer, **words: int) -> None:
        for name, value in words.items():
            buffer.array[0, getattr(P, name.upper()) // 8] = value

    def recorder(self, rows: int) -> CudaRecorder:
        return self.backend.recorder(rows)

    def run(self, recorder: CudaRecorder) -> None:
        for step in recorder.steps:
            step.run()
        torch.cuda.synchronize()

    def time(self, recorder: CudaRecorder, repeats: int = 15) -> float:
        """Median seconds of a replay of everything recorded, as one graph."""
        self.run(recorder)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in recorder.steps:
                step.run()
        times = []
        for _ in range(repeats + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times[2:])

    def parts(self, recorder: CudaRecorder, layers: int) -> str:
        """Microseconds a layer of each kernel by itself."""
        found = []
        for name in dict.fromkeys(step.kernel.fn.__name__ for step in recorder.steps):
            alone = self.recorder(recorder.rows)
            alone.steps = [step for step in recorder.steps if step.kernel.fn.__name__ == name]
            found.append(f"{name} {1e6 * self.time(alone, 5) / layers:.2f}")
        return ", ".join(found)

    def report(self, name: str, seconds: float, n_bytes: float, note: str = "") -> None:
        rate = n_bytes / seconds / 1e12
        self.results.append({"name": name, "us": 1e6 * seconds, "tbs": rate, "note": note})
        print(
            f"{name:44s} {1e6 * seconds:9.2f} us {rate:6.2f} TB/s {rate / PEAK:6.1%}  {note}",
            flush=True,
        )


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(
        torch.equal(left.contiguous().view(torch.int32), right.contiguous().view(torch.int32))
    )
