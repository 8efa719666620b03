"""Times the token mixers' kernels on a GPU at the shapes of Qwen3.6-35B-A3B and Qwen3.5-9B, and checks their results.

    python benchmarks/gpu_mixers.py [--only attention,delta] [--sweep] [--json FILE]

A time is the median of graph replays over several layers (more memory than the cache of the chip holds), divided by the
layers. Row exactness: every row of a window is compared bit by bit with the same row run alone. Errors are the norm of
the difference over the norm of the result in float64.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_mixers_common import (
    CONTEXT,
    CONTEXTS,
    EXACT_WINDOWS,
    MODELS,
    ROWS,
    VOCABULARY,
    WIDE_ROWS,
    Bench,
    Model,
    error,
    same,
)
from gpu_mixers_recurrent import RecurrentCase

from sparkinfer.backend.base import Activation
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.argmax import argmax
from sparkinfer.kernels.attention import attention
from sparkinfer.kernels.attention import triton_impl as split
from sparkinfer.kernels.attention import triton_wide as wide
from sparkinfer.kernels.copy_rows import copy_rows
from sparkinfer.kernels.rope import rope


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
        before = split.SPLIT_WARPS, split.SPLIT_STAGES
        for choice in ((4, 2), (4, 3), (4, 4), (8, 2), (8, 3)):
            split.SPLIT_WARPS, split.SPLIT_STAGES = choice
            for context in (128, 4096, 32768):
                for rows in (1, 6):
                    self.bench.set(self.params, position=context - rows)
                    name = f"attention {self.model.name} ctx {context} rows {rows} warps, stages {choice}"
                    self.timed(name, rows, self.n_bytes(context))
        split.SPLIT_WARPS, split.SPLIT_STAGES = before
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
