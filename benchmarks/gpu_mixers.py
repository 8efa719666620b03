"""Times the token mixers' kernels on a GPU at the shapes of Qwen3.6-35B-A3B and Qwen3.5-9B, and checks their results.

    python benchmarks/gpu_mixers.py [--only attention,delta] [--sweep] [--json FILE]

A time is the median of graph replays over several layers (more memory than the cache of the chip holds), divided by the
layers. Row exactness: every row of a window is compared bit by bit with the same row run alone. Errors are the norm of
the difference over the norm of the result in float64.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaBackend, CudaRecorder
from sparkinfer.kernels import run_params as P
from sparkinfer.kernels.argmax import argmax
from sparkinfer.kernels.attention import attention
from sparkinfer.kernels.attention import triton_impl as split
from sparkinfer.kernels.attention import triton_wide as wide
from sparkinfer.kernels.conv import commit_conv, conv
from sparkinfer.kernels.conv import triton_impl as conv_impl
from sparkinfer.kernels.copy_rows import copy_rows
from sparkinfer.kernels.delta_net import DeltaNet, delta_net
from sparkinfer.kernels.delta_net import triton_impl as net_impl
from sparkinfer.kernels.gated_delta import DeltaInputs, commit_delta, gated_delta
from sparkinfer.kernels.gated_delta import triton_impl as delta
from sparkinfer.kernels.gated_delta import triton_wide as delta_wide
from sparkinfer.kernels.gated_norm import gated_norm
from sparkinfer.kernels.rope import rope
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


class AttentionCase:
    """A cache of random keys and values for every layer, and a window of queries."""

    def __init__(self, bench: Bench, model: Model) -> None:
        self.bench, self.model = bench, model
        shape = (model.attention_layers, model.kv_heads, CONTEXT, 256)
        self.keys = torch.empty(shape, dtype=torch.float16, device="cuda")
        self.values = torch.empty(shape, dtype=torch.float16, device="cuda")
        for layer in range(model.attention_layers):
            for cache in (self.keys, self.values):
                cache[layer].copy_(torch.randn(shape[1:], generator=bench.generator, device="cuda"))
        self.params = bench.params(
            keys=self.keys.data_ptr(), values=self.values.data_ptr(), head_bytes=CONTEXT * 256 * 2
        )
        self.q, self.gate = bench.random(WIDE_ROWS[-1], 4096), bench.random(WIDE_ROWS[-1], 8192)
        self.out = bench.backend.activation(WIDE_ROWS[-1], 4096, quantised=True)

    def record(self, rows: int, layers: int, first: int = 0) -> CudaRecorder:
        """All of the first `rows` rows, or one row standing at `first`."""
        recorder = self.bench.recorder(rows)
        q, gate = self.q.part(first, rows), self.gate.part(first, rows)
        q8 = self.out.q8 if rows <= 16 else None
        out = Activation(self.out.f32.part(first, rows), q8.part(first, rows) if q8 else None)
        for layer in range(layers):
            attention(recorder, q, self.model.heads(layer), self.params, gate, out, CONTEXT)
        return recorder

    def n_bytes(self, context: int) -> int:
        return 2 * self.model.kv_heads * context * 256 * 2

    def wanted(self, position: int, rows: list[int]) -> torch.Tensor:
        """float64 results of some rows of layer 0."""
        results = []
        group = 16 // self.model.kv_heads
        for row in rows:
            end = position + row + 1
            q = self.q.array[row].view(self.model.kv_heads, group, 256).double()
            k, v = self.keys[0, :, :end].double(), self.values[0, :, :end].double()
            mixed = torch.softmax(q @ k.transpose(1, 2) / 16, -1) @ v
            gate = self.gate.array[row].view(16, 2, 256)[:, 1].double()
            results.append((mixed.reshape(16, 256) * torch.sigmoid(gate)).reshape(-1))
        return torch.stack(results)

    def exact(self, position: int, rows: int) -> bool:
        """Rows of a window have the bits of the same rows alone."""
        self.bench.set(self.params, position=position)
        self.bench.run(self.record(rows, 1))
        window = self.out.f32.array[:rows].clone()
        for row in range(rows):
            self.bench.set(self.params, position=position + row)
            self.bench.run(self.record(1, 1, row))
            if not same(self.out.f32.array[row], window[row]):
                return False
        return True

    def few(self) -> None:
        for context in CONTEXTS:
            for rows in ROWS:
                self.bench.set(self.params, position=context - rows)
                seconds = self.bench.time(self.record(rows, self.model.attention_layers))
                self.bench.run(self.record(rows, 1))
                parts = self.bench.parts(
                    self.record(rows, self.model.attention_layers), self.model.attention_layers
                )
                picked = sorted({0, rows - 1})
                wrong = error(self.out.f32.array[picked], self.wanted(context - rows, picked))
                name = f"attention {self.model.name} ctx {context} rows {rows}"
                self.bench.report(
                    name,
                    seconds / self.model.attention_layers,
                    self.n_bytes(context),
                    f"error {wrong:.1e} ({parts})",
                )
        for position in (100, 8185, 30000):
            found = [self.exact(position, rows) for rows in EXACT_WINDOWS]
            print(
                f"attention {self.model.name} at {position}: rows exact for {EXACT_WINDOWS}: {found}",
                flush=True,
            )

    def many(self) -> None:
        for rows in WIDE_ROWS:
            for context in (rows, 4096, 32768):
                self.bench.set(self.params, position=context - rows)
                seconds = self.bench.time(self.record(rows, 2), 5) / 2
                picked = [0, rows // 2, rows - 1]
                self.bench.run(self.record(rows, 1))
                wrong = error(self.out.f32.array[picked], self.wanted(context - rows, picked))
                flops = 4 * rows * 16 * 256 * (context - rows / 2)
                note = f"{flops / seconds / 1e12:.0f} TFLOP/s, error {wrong:.1e}"
                name = f"attention {self.model.name} ctx {context} rows {rows}"
                self.bench.report(name, seconds, self.n_bytes(context), note)

    def sweep(self) -> None:
        before = split.SPLIT_WARPS, split.SPLIT_STAGES, split.SPLIT_PROGRAMS
        for choice in ((4, 1, 1), (4, 1, 2), (4, 2, 1), (8, 1, 2), (8, 2, 1)):
            split.SPLIT_WARPS, split.SPLIT_STAGES, split.SPLIT_PROGRAMS = choice
            for context in (128, 4096, 32768):
                for rows in (1, 6):
                    self.bench.set(self.params, position=context - rows)
                    name = f"attention {self.model.name} ctx {context} rows {rows} warps, stages, programs {choice}"
                    self.timed(name, rows, self.n_bytes(context))
        split.SPLIT_WARPS, split.SPLIT_STAGES, split.SPLIT_PROGRAMS = before
        before = wide.TILE, wide.KEYS_AT_ONCE, wide.STAGES
        self.bench.set(self.params, position=0)
        for choice in (
            (128, 64, 2),
            (128, 32, 3),
            (128, 32, 2),
            (64, 64, 2),
            (64, 32, 3),
            (128, 64, 1),
        ):
            wide.TILE, wide.KEYS_AT_ONCE, wide.STAGES = choice
            self.timed(
                f"attention {self.model.name} rows 2048 tile, keys, stages {choice}",
                2048,
                self.n_bytes(2048),
            )
        wide.TILE, wide.KEYS_AT_ONCE, wide.STAGES = before

    def timed(self, name: str, rows: int, n_bytes: int) -> None:
        layers = self.model.attention_layers if rows <= 16 else 1
        try:
            seconds = self.bench.time(self.record(rows, layers), 7) / layers
        except (
            Exception
        ) as failure:  # a variant that does not fit the chip is a result of the sweep
            print(f"{name}: {type(failure).__name__} {str(failure)[:80]}", flush=True)
        else:
            self.bench.report(name, seconds, n_bytes)


class RecurrentCase:
    """States and records of every recurrent layer, and a window of rows."""

    def __init__(self, bench: Bench, model: Model) -> None:
        self.bench, self.model, self.shape = bench, model, model.recurrent
        s, rows = self.shape, WIDE_ROWS[-1]

        def made(*sizes: int) -> torch.Tensor:
            return 0.1 * torch.randn(sizes, generator=bench.generator, device="cuda")

        self.conv, self.delta = made(s.layers, 3, s.channels), made(s.layers, 32, 128, 128)
        self.records = {
            "conv_record": made(s.layers, 16, s.channels), "key_record": made(s.layers, 16, 2048),
            "delta_record": made(s.layers, 16, 4096), "decay_record": made(s.layers, 16, 32),
        }  # fmt: skip
        self.params = bench.params(
            conv=self.conv.data_ptr(), recurrent=self.delta.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in self.records.items()},
        )  # fmt: skip
        self.x, self.weight = bench.random(rows, s.channels), bench.random(4, s.channels, 0.5)
        self.mixed, self.alpha, self.beta = (
            bench.random(rows, s.channels),
            bench.random(rows, 32),
            bench.random(rows, 32),
        )
        self.rate, self.bias = bench.random(1, 32), bench.random(1, 32)
        self.rate.array.copy_(-self.rate.array.abs() - 0.01)
        self.out, self.gate, self.norm = (
            bench.random(rows, 4096),
            bench.random(rows, 4096),
            bench.random(1, 128),
        )
        self.normed = bench.backend.activation(rows, 4096, quantised=True)

    def inputs(self, first: int, rows: int) -> DeltaInputs:
        parts = [b.part(first, rows) for b in (self.mixed, self.alpha, self.beta)]
        return DeltaInputs(*parts, self.rate, self.bias)

    def record_conv(self, rows: int, layers: int, first: int = 0) -> CudaRecorder:
        recorder = self.bench.recorder(rows)
        for layer in range(layers):
            conv(recorder, self.x.part(first, rows), self.weight, self.shape, layer, self.params,
                 self.mixed.part(first, rows))  # fmt: skip
        return recorder

    def record_delta(self, rows: int, layers: int, first: int = 0) -> CudaRecorder:
        recorder = self.bench.recorder(rows)
        for layer in range(layers):
            gated_delta(recorder, self.inputs(first, rows), self.shape, layer, self.params,
                        self.out.part(first, rows), EPS)  # fmt: skip
        return recorder

    def record_net(self, rows: int, layers: int, first: int = 0) -> CudaRecorder:
        recorder = self.bench.recorder(rows)
        x, gate, out = (b.part(first, rows) for b in (self.x, self.gate, self.out))
        normed = Activation(self.normed.f32.part(first, rows), self.normed.q8.part(first, rows))
        for layer in range(layers):
            net = DeltaNet(self.shape, layer, self.weight, self.norm, EPS)
            delta_net(recorder, net, x, self.inputs(first, rows), gate, self.params, out, normed)
        return recorder

    def record_norm(self, rows: int, layers: int, first: int = 0) -> CudaRecorder:
        recorder = self.bench.recorder(rows)
        for _ in range(layers):
            gated_norm(recorder, self.out, self.gate, self.norm, self.normed, heads=32, eps=EPS)
        return recorder

    def wanted_delta(self, rows: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 rows and state of layer 0 after `state`."""
        x = self.mixed.array[:rows].double()
        q, k, v = (
            x[:, :2048].view(rows, 16, 128),
            x[:, 2048:4096].view(rows, 16, 128),
            x[:, 4096:].view(rows, 32, 128),
        )
        q = q / (q.pow(2).sum(-1, keepdim=True) + EPS).sqrt() / 128**0.5
        k = k / (k.pow(2).sum(-1, keepdim=True) + EPS).sqrt()
        q, k = q.repeat(1, 2, 1), k.repeat(1, 2, 1)
        sums = self.alpha.array[:rows].double() + self.bias.array.double()
        decay = torch.exp(
            self.rate.array.double() * torch.nn.functional.softplus(sums, threshold=50)
        )
        gate, s, out = torch.sigmoid(self.beta.array[:rows].double()), state.double().clone(), []
        for r in range(rows):
            s *= decay[r, :, None, None]
            change = gate[r, :, None] * (v[r] - torch.einsum("hk,hkv->hv", k[r], s))
            s += k[r, :, :, None] * change[:, None]
            out.append(torch.einsum("hk,hkv->hv", q[r], s))
        return torch.stack(out).view(rows, -1), s

    def delta_error(self, rows: int) -> float:
        """Of rows and state together, from the state as it stands."""
        wanted, after = self.wanted_delta(rows, self.delta[0])
        self.bench.set(self.params, advance=1)
        self.bench.run(self.record_delta(rows, 1))
        return max(error(self.out.array[:rows], wanted), error(self.delta[0], after))

    def exact(
        self, record: Callable[..., CudaRecorder], result: Buffer, state: torch.Tensor, rows: int
    ) -> bool:
        """Rows of a recorded window, and each advanced alone, have the same bits."""
        self.bench.set(self.params, advance=0)
        self.bench.run(record(rows, 1))
        window, before = result.array[:rows].clone(), state.clone()
        self.bench.set(self.params, advance=1)
        kept = []
        for row in range(rows):
            self.bench.run(record(1, 1, row))
            kept.append(state[0].clone())
        good = same(result.array[:rows], window)
        for count in (1, rows):
            state.copy_(before)
            self.bench.set(self.params, commit_rows=count)
            recorder = self.bench.recorder(1)
            commit_conv(recorder, self.shape, self.params)
            commit_delta(recorder, self.shape, self.params)
            self.bench.run(recorder)
            good = good and same(state[0], kept[count - 1])
        state.copy_(before)
        return good

    def few(self) -> None:
        layers, name = self.shape.layers, self.model.name
        for rows in ROWS:
            self.bench.set(self.params, advance=int(rows == 1), commit_rows=rows)
            for what, record, n_bytes in (
                (
                    "net",
                    self.record_net,
                    4 * 32 * 128 * 128 * (2 if rows == 1 else 1) + 4 * 24000 * rows,
                ),
                ("conv", self.record_conv, 4 * 8192 * (2 * rows + 4 + 6)),
                (
                    "delta",
                    self.record_delta,
                    4 * 32 * 128 * 128 * (2 if rows == 1 else 1) + 4 * 12288 * rows,
                ),
                ("norm", self.record_norm, 4 * 4096 * 3 * rows + 5120 * rows),
            ):
                self.bench.report(
                    f"{what} {name} rows {rows}",
                    self.bench.time(record(rows, layers)) / layers,
                    n_bytes,
                )
            recorder = self.bench.recorder(1)
            commit_conv(recorder, self.shape, self.params)
            commit_delta(recorder, self.shape, self.params)
            moved = self.shape.state_bytes * 2 + self.shape.record_bytes * rows // 16
            self.bench.report(
                f"commit {name} rows {rows} (all layers)", self.bench.time(recorder), moved
            )
        print(f"delta {name}: error of 16 rows {self.delta_error(16):.1e}", flush=True)
        self.delta.mul_(0.1)
        for rows in EXACT_WINDOWS:
            found = (
                self.exact(self.record_conv, self.mixed, self.conv, rows),
                self.exact(self.record_delta, self.out, self.delta, rows),
                self.exact(self.record_net, self.normed.f32, self.delta, rows),
            )
            print(
                f"conv, delta, net {name}: rows exact, commit exact for {rows} rows: {found}",
                flush=True,
            )

    def many(self) -> None:
        name = self.model.name
        self.bench.set(self.params, advance=1)
        for rows in WIDE_ROWS:
            for what, record, n_bytes in (
                ("conv", self.record_conv, 4 * 8192 * 2 * rows),
                ("delta", self.record_delta, 4 * 12288 * rows),
                ("norm", self.record_norm, 4 * 4096 * 3 * rows + 5120 * rows),
            ):
                seconds = self.bench.time(record(rows, 3), 5) / 3
                note = f"{1e9 * seconds / rows:.0f} ns a row"
                if what == "delta":
                    note += f" ({self.bench.parts(record(rows, 3), 3)})"
                    self.delta.mul_(0.1)
                    note += f", error {self.delta_error(rows):.1e}"
                self.bench.report(f"{what} {name} rows {rows}", seconds, n_bytes, note)

    def sweep(self) -> None:
        before = delta.COLUMNS, delta.WARPS
        for choice in ((8, 1), (16, 1), (32, 1), (32, 2), (32, 4), (64, 4)):
            delta.COLUMNS, delta.WARPS = choice
            for rows in (1, 6):
                self.bench.set(self.params, advance=int(rows == 1))
                seconds = (
                    self.bench.time(self.record_delta(rows, self.shape.layers)) / self.shape.layers
                )
                self.bench.report(
                    f"delta rows {rows} columns, warps {choice}",
                    seconds,
                    2**21 * (2 if rows == 1 else 1),
                )
        net_before = net_impl.COLUMNS, net_impl.WARPS
        for choice in ((8, 1), (16, 1), (32, 1), (32, 2)):
            net_impl.COLUMNS, net_impl.WARPS = choice
            for rows in (1, 6):
                self.bench.set(self.params, advance=int(rows == 1))
                seconds = (
                    self.bench.time(self.record_net(rows, self.shape.layers)) / self.shape.layers
                )
                self.bench.report(
                    f"net rows {rows} columns, warps {choice}",
                    seconds,
                    2**21 * (2 if rows == 1 else 1),
                )
        net_impl.COLUMNS, net_impl.WARPS = net_before
        delta.COLUMNS, delta.WARPS = before
        self.bench.set(self.params, advance=1)
        wide_before = (
            delta_wide.PRECISION,
            delta_wide.COLUMNS,
            delta_wide.SCAN_WARPS,
            delta_wide.SCAN_STAGES,
        )
        for choice in (("bf16x3", 32, 4, 1), ("bf16x3", 64, 4, 1), ("tf32", 32, 4, 2)):
            (
                delta_wide.PRECISION,
                delta_wide.COLUMNS,
                delta_wide.SCAN_WARPS,
                delta_wide.SCAN_STAGES,
            ) = choice
            try:
                seconds = self.bench.time(self.record_delta(2048, 1), 5)
            except (
                Exception
            ) as failure:  # a variant that does not fit the chip is a result of the sweep
                print(f"delta {choice}: {type(failure).__name__} {str(failure)[:80]}", flush=True)
                continue
            self.delta.mul_(0.1)
            note = f"{1e9 * seconds / 2048:.0f} ns a row, error {self.delta_error(2048):.1e}"
            self.bench.report(
                f"delta rows 2048 precision, columns, warps, stages {choice}",
                seconds,
                0,
                note,
            )
        (
            delta_wide.PRECISION,
            delta_wide.COLUMNS,
            delta_wide.SCAN_WARPS,
            delta_wide.SCAN_STAGES,
        ) = wide_before
        conv_before = conv_impl.CHANNELS
        for channels in (32, 64, 128, 256):
            conv_impl.CHANNELS = channels
            seconds = self.bench.time(self.record_conv(1, self.shape.layers)) / self.shape.layers
            self.bench.report(f"conv rows 1 channels {channels}", seconds, 4 * 8192 * 12)
        conv_impl.CHANNELS = conv_before


def small_ops(bench: Bench, model: Model, case: AttentionCase) -> None:
    """rope, argmax, copy_rows."""
    q, kv = case.gate, [bench.random(WIDE_ROWS[-1], 256 * model.kv_heads) for _ in range(2)]
    table, norms = bench.random(CONTEXT, 128), [bench.random(1, 256) for _ in range(2)]
    bench.set(case.params, position=100)
    for rows in (*ROWS, *WIDE_ROWS):
        recorder = bench.recorder(rows)
        for layer in range(model.attention_layers):
            rope(recorder, q, *kv, model.heads(layer), table, case.params, case.q, *norms)
        moved = rows * 4 * (2 * 4096 + 512 * model.kv_heads) + rows * 1024 * model.kv_heads
        bench.report(
            f"rope {model.name} rows {rows}", bench.time(recorder) / model.attention_layers, moved
        )
    stream, features = bench.random(16, model.width), bench.random(16, 5 * model.width)
    target = replace(features, array=features.array[:, : model.width], width=model.width)
    logits, ids = bench.random(16, VOCABULARY), bench.backend.buffer(16, 2, np.int64)
    for rows in ROWS:
        recorder = bench.recorder(rows)
        for _ in range(20):
            copy_rows(recorder, stream, target)
        bench.report(
            f"copy_rows {model.name} rows {rows}", bench.time(recorder) / 20, 8 * rows * model.width
        )
        recorder = bench.recorder(rows)
        argmax(recorder, logits, ids, VOCABULARY)
        bench.report(f"argmax rows {rows}", bench.time(recorder), 4 * rows * VOCABULARY)
    print(
        "argmax right:",
        bool((ids.array[:, 0] == logits.array.argmax(-1)).all()),
        ids.array[0].tolist(),
        flush=True,
    )


@contextmanager
def freed() -> Iterator[None]:
    """Give the memory of a case back."""
    yield
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="attention,recurrent,small", help="parts to run")
    parser.add_argument("--models", default="35B,9B")
    parser.add_argument("--sweep", action="store_true", help="also time variants of the kernels")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    parts, bench = options.only.split(","), Bench()
    for model in (m for m in MODELS if m.name in options.models.split(",")):
        with freed():
            if "recurrent" in parts:
                case: Any = RecurrentCase(bench, model)
                case.few()
                case.many()
                if options.sweep:
                    case.sweep()
            if "attention" in parts or "small" in parts:
                case = AttentionCase(bench, model)
                if "attention" in parts:
                    case.few()
                    case.many()
                if "attention" in parts and options.sweep:
                    case.sweep()
                if "small" in parts:
                    small_ops(bench, model, case)
            case = None
    if options.json:
        Path(options.json).write_text(json.dumps(bench.results, indent=1))


if __name__ == "__main__":
    main()
