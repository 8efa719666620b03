"""Time the GPU's matrix products, norms and expert kernels at the shapes of real models, and check them first.

    python benchmarks/gpu_products.py [check] [time] [wide] [--out FILE]

check: every packed form against float64, and each row of a window bit by bit against that row alone.
time: microseconds a call by graph replays, weights rotated through more than the L2 cache, TB/s and the share of what
a plain read reaches. wide: the forms for prefill, with TFLOP/s.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kernel_machine import random_blocks, random_rows

from sparkinfer.backend.cuda import CudaBackend, CudaRecorder
from sparkinfer.kernels.experts import ExpertBuffers, experts_combine, experts_hidden, experts_out
from sparkinfer.kernels.gated_linear import gated_linear
from sparkinfer.kernels.linear import linear, pack_weight
from sparkinfer.kernels.linear.reference import quantised_rows
from sparkinfer.kernels.linear.triton_pack import TritonWeight, plane_widths
from sparkinfer.kernels.quantise import quantise
from sparkinfer.kernels.rms_norm import rms_norm
from sparkinfer.kernels.route import Routing, route, routing_words
from sparkinfer.kernels.route.triton_impl import slots_of
from sparkinfer.kernels.triton_quant import FORMS, HALF, HALF_MIN
from sparkinfer.quant.formats import dequantize

ROWS = (1, 2, 4, 6, 16)
READ = 4.42e12  # bytes a second that a plain read of this card's memory reaches
L2 = 60 << 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the interpreter: for trying this file


@dataclass
class Case:
    """`record(recorder, copy)` appends one call that reads `n_bytes` of weights (and does `flops`)."""

    name: str
    n_bytes: int
    copies: int
    record: Callable[[CudaRecorder, int], None]
    flops: float = 0.0


class Bench:
    """A backend, and buffers and weights of random content."""

    def __init__(self) -> None:
        self.backend = CudaBackend(DEVICE)
        self.seed = torch.Generator(device=DEVICE).manual_seed(0)

    def halves(self, *shape: int) -> torch.Tensor:
        values = torch.rand(shape, device=DEVICE, generator=self.seed) * 0.02 - 0.01
        return values.half().view(torch.uint8)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE, generator=self.seed)

    def weight(self, kind: str, outputs: int, inputs: int, experts: int = 1) -> TritonWeight:
        """Random planes of a packed weight; scales are small numbers."""
        form = FORMS[kind]
        shell = TritonWeight(kind, outputs, inputs, torch.empty(0), experts)
        total, groups = shell.total, shell.groups
        if kind == "F32":
            values = torch.randn(total * groups * 4, device=DEVICE, generator=self.seed)
            return replace(shell, words=values.view(torch.int32))
        widths = plane_widths(form, groups)
        planes = [self.noise(total * width) for width in widths[: -1 - form.has_super]]
        if form.mode in (HALF, HALF_MIN):
            planes.append(self.halves(total * widths[-1] // 2).reshape(-1))
        else:
            planes.append(self.noise(total * widths[-2]) & 63)
            planes.append(self.halves(total * widths[-1] // 2).reshape(-1))
        return replace(shell, words=torch.cat(planes).view(torch.int32))

    def activation(self, rows: int, width: int, *, quantised: bool = True) -> Any:
        act = self.backend.activation(rows, width, quantised=quantised)
        act.f32.array.copy_(torch.randn(rows, width, device=DEVICE, generator=self.seed))
        if quantised:
            recorder = self.backend.recorder(rows)
            quantise(recorder, act)
            self.run(recorder)
        return act

    def buffer(self, rows: int, width: int) -> Any:
        buffer = self.backend.buffer(rows, width)
        buffer.array.copy_(torch.randn(rows, width, device=DEVICE, generator=self.seed))
        return buffer

    def run(self, recorder: CudaRecorder) -> None:
        tape = recorder.finish()
        for step in tape.steps:
            step.run()
        self.backend.wait()

    def microseconds(self, case: Case, rows: int, repeats: int = 9) -> float:
        """Median time of one call: graph replays of a call on every copy."""
        recorder = self.backend.recorder(rows)
        for copy in range(case.copies):
            case.record(recorder, copy)
        tape = recorder.finish()
        tape.prepare()
        times = []
        for _ in range(repeats + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            tape.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times[2:]) / case.copies

    def compile(self, cases: list[tuple[Case, int]]) -> None:
        steps = []
        for case, rows in cases:
            recorder = self.backend.recorder(rows)
            case.record(recorder, 0)
            steps += recorder.steps
        self.backend.compile(steps)


def copies_of(n_bytes: int) -> int:
    return max(2, min(64, 2 * L2 // n_bytes + 1))


# ---- cases

PRODUCTS = (
    ("35b gdn in", "Q8_0", (8192, 4096, 32, 32), 2048),
    ("35b attn qkv", "Q8_0", (8192, 512, 512), 2048),
    ("35b mixer out", "Q8_0", (2048,), 4096),
    ("35b shared down", "Q8_0", (2048,), 512),
    ("35b router", "F32", (257,), 2048),
    ("35b head", "Q6_K", (248320,), 2048),
    ("9b gdn in", "Q4_K", (8192, 4096, 32, 32), 4096),
    ("9b gdn in more bits", "Q6_K", (8192,), 4096),
    ("9b mixer out", "Q4_K", (4096,), 4096),
    ("9b ffn down", "Q4_K", (4096,), 12288),
    ("9b ffn down more bits", "Q6_K", (4096,), 12288),
    ("9b head", "Q6_K", (248320,), 4096),
)
GATED = (
    ("35b shared gate+up", "Q8_0", 512, 2048),
    ("9b ffn gate+up", "Q4_K", 12288, 4096),
)


def product_case(
    bench: Bench, name: str, kind: str, outputs: tuple[int, ...], k: int, rows: int
) -> Case:
    n_bytes = sum(bench.weight(kind, n, k).n_bytes for n in outputs)
    copies = copies_of(n_bytes)
    weights = [[bench.weight(kind, n, k) for n in outputs] for _ in range(copies)]
    x = bench.activation(rows, k, quantised=FORMS[kind].quantised)
    out = [bench.buffer(rows, w.padded_outputs) for w in weights[0]]
    flops = 2.0 * sum(outputs) * k
    add = " out" in name or " down" in name  # to the residual stream
    return Case(name, n_bytes, copies, lambda r, c: linear(r, x, weights[c], out, add=add), flops)


def gated_case(bench: Bench, name: str, kind: str, n: int, k: int, rows: int) -> Case:
    n_bytes = 2 * bench.weight(kind, n, k).n_bytes
    copies = copies_of(n_bytes)
    pairs = [(bench.weight(kind, n, k), bench.weight(kind, n, k)) for _ in range(copies)]
    x, out = bench.activation(rows, k), bench.activation(rows, n)
    return Case(name, n_bytes, copies, lambda r, c: gated_linear(r, x, *pairs[c], out), 4.0 * n * k)


def expert_cases(bench: Bench, rows: int, n: int = 2048, width: int = 512) -> Iterator[Case]:
    """256 experts, 8 used, chosen by random logits; the bytes are those of the experts really chosen."""
    experts, used, copies = 256, 8, 3
    x = bench.activation(rows, n)
    logits = bench.buffer(rows, 264)
    table = bench.backend.buffer(1, routing_words(rows, used, experts), np.int64)
    routing = Routing(table, bench.backend.buffer(rows, used), experts, used)
    recorder = bench.backend.recorder(rows)
    route(recorder, logits, routing)
    bench.run(recorder)
    active = len(set((slots_of(recorder, routing)[: rows * used] & 0xFFFF).tolist()))
    sets = [
        [bench.weight("Q4_K", width, n, experts) for _ in range(2)]
        + [bench.weight("Q5_K", n, width, experts)]
        for _ in range(copies)
    ]
    buffers = ExpertBuffers(bench.activation(rows * used, width), bench.buffer(rows * used, n))
    shared, out = bench.buffer(rows, n), bench.buffer(rows, n)
    each = [w.n_bytes // experts * active for w in sets[0]]
    yield Case("35b route", 0, 16, lambda r, c: route(r, logits, routing))
    yield Case(
        f"35b experts hidden ({active})", each[0] + each[1], copies,
        lambda r, c: experts_hidden(r, x, sets[c][0], sets[c][1], routing, buffers),
        4.0 * n * width * used,
    )  # fmt: skip
    yield Case(
        f"35b experts out ({active})", each[2], copies,
        lambda r, c: experts_out(r, sets[c][2], routing, buffers),
        2.0 * n * width * used,
    )  # fmt: skip
    yield Case(
        "35b combine", 0, 16,
        lambda r, c: experts_combine(r, routing, buffers, shared, logits, 256, out),
    )  # fmt: skip

    router, shared_gate, shared_up = (
        bench.weight(kind, m, n) for kind, m in (("F32", 257), ("Q8_0", width), ("Q8_0", width))
    )
    shared_down, norm = bench.weight("Q8_0", n, width), bench.buffer(1, n)
    hidden, normed = bench.activation(rows, width), bench.activation(rows, n)

    def mixture(r: CudaRecorder, c: int) -> None:
        linear(r, x, [router], [logits])
        gated_linear(r, x, shared_gate, shared_up, hidden)
        route(r, logits, routing)
        experts_hidden(r, x, sets[c][0], sets[c][1], routing, buffers)
        experts_out(r, sets[c][2], routing, buffers)
        linear(r, hidden, [shared_down], [shared])
        experts_combine(r, routing, buffers, shared, logits, 256, out)
        rms_norm(r, out, norm, normed, eps=1e-6)

    common = router.n_bytes + shared_gate.n_bytes + shared_up.n_bytes + shared_down.n_bytes
    yield Case(f"35b mixture, 5 launches ({active})", sum(each) + common, copies, mixture)


def small_cases(bench: Bench, rows: int) -> Iterator[Case]:
    for n in (2048, 4096):
        x, weight, out = bench.buffer(rows, n), bench.buffer(1, n), bench.activation(rows, n)
        yield Case(
            f"norm {n}", 0, 16, lambda r, c, x=x, w=weight, o=out: rms_norm(r, x, w, o, eps=1e-6)
        )


# ---- check


def check(bench: Bench) -> list[dict[str, Any]]:
    found = []
    shapes = [(kind, 256, k) for kind in FORMS for k in (2048,)]
    shapes += [
        (kind, 128, k)
        for kind in ("Q8_0", "Q4_K", "Q6_K", "Q5_K", "F32")
        for k in (512, 4096, 12288)
    ]
    for kind, n, k in shapes:
        found.append(check_one(bench, kind, n, k))
    found += check_experts(bench)
    return found


def check_one(bench: Bench, kind: str, n: int, k: int) -> dict[str, Any]:
    """One random weight: every window against its rows alone, those against float64."""
    blocks = random_blocks(kind, n * k, seed=k)
    weight = pack_weight(bench.backend, kind, blocks, n, k)
    dense = np.asarray(dequantize(kind, blocks), np.float64).reshape(n, k)
    x = random_rows(16, k)
    act = bench.backend.activation(16, k, quantised=weight.quantised)
    bench.backend.upload(act.f32, x)
    if weight.quantised:
        recorder = bench.backend.recorder(16)
        quantise(recorder, act)
        bench.run(recorder)
    seen = quantised_rows(x) if weight.quantised else x
    results = {}
    for rows in (1, *ROWS[1:]):
        out = bench.backend.buffer(16, n)
        out.array.fill_(float("nan"))
        recorder = bench.backend.recorder(rows)
        linear(recorder, act, [weight], [out])
        bench.run(recorder)
        results[rows] = out.array[:rows].cpu().numpy()
    alone = []
    for row in range(16):
        one = replace(act, f32=act.f32.part(row, 1), q8=act.q8.part(row, 1) if act.q8 else None)
        out = bench.backend.buffer(1, n)
        recorder = bench.backend.recorder(1)
        linear(recorder, one, [weight], [out])
        bench.run(recorder)
        alone.append(out.array[:1].cpu().numpy())
    single = np.concatenate(alone)
    exact = all(value.tobytes() == single[:rows].tobytes() for rows, value in results.items())
    wanted = seen.astype(np.float64) @ dense.T
    error = np.abs(single - wanted).max() / (np.abs(seen) @ np.abs(dense).T).max()
    record = {"check": kind, "n": n, "k": k, "rows exact": exact, "error": float(error)}
    print(f"{kind:7s} {n:6d} x {k:5d}  rows exact {exact}  error {error:.1e}", flush=True)
    return record


def check_experts(
    bench: Bench, n: int = 2048, width: int = 512, experts: int = 64, used: int = 8, rows: int = 6
) -> list[dict[str, Any]]:
    """A window of `rows` rows through route, experts and norm against each row alone."""
    gate, up = (bench.weight("Q4_K", width, n, experts) for _ in range(2))
    down = bench.weight("Q5_K", n, width, experts)
    x, logits = bench.activation(rows, n), bench.buffer(rows, experts + 8)
    shared, base, norm = bench.buffer(rows, n), bench.buffer(rows, n), bench.buffer(1, n)

    def run(first: int, count: int) -> torch.Tensor:
        table = bench.backend.buffer(1, routing_words(count, used, experts), np.int64)
        routing = Routing(table, bench.backend.buffer(count, used), experts, used)
        buffers = ExpertBuffers(
            bench.backend.activation(count * used, width, quantised=True),
            bench.backend.buffer(count * used, n),
        )
        out = bench.backend.buffer(count, n)
        out.array.copy_(base.array[first : first + count])
        normed = bench.backend.activation(count, n, quantised=True)
        part = replace(x, f32=x.f32.part(first, count), q8=x.q8.part(first, count))
        scores = logits.part(first, count)
        recorder = bench.backend.recorder(count)
        route(recorder, scores, routing)
        experts_hidden(recorder, part, gate, up, routing, buffers)
        experts_out(recorder, down, routing, buffers)
        experts_combine(recorder, routing, buffers, shared.part(first, count), scores, experts, out)
        rms_norm(recorder, out, norm, normed, eps=1e-6)
        bench.run(recorder)
        return torch.cat(
            [out.array, normed.f32.array, normed.q8.array.view(torch.float32)], 1
        ).clone()

    window = run(0, rows)
    alone = torch.cat([run(row, 1) for row in range(rows)])
    exact = bool((window.view(torch.int32) == alone.view(torch.int32)).all())
    finite = bool(window[:, : 2 * n].isfinite().all())
    print(f"experts: rows exact {exact} finite {finite}", flush=True)
    return [{"check": "experts", "rows exact": exact, "finite": finite}]


# ---- time


def report(case: Case, rows: int, us: float, note: str = "") -> dict[str, Any]:
    rate = case.n_bytes / us * 1e6
    print(
        f"{case.name:32s} rows {rows:4d} {us:9.2f} us {case.n_bytes / 1e6:8.2f} MB {rate / 1e12:6.2f} TB/s"
        f" {rate / READ:6.1%} {case.flops * rows / us / 1e6:7.1f} TFLOP/s {note}",
        flush=True,
    )
    return {"case": case.name, "rows": rows, "us": us, "bytes": case.n_bytes, "note": note}


def time_all(bench: Bench) -> list[dict[str, Any]]:
    """Under a minute: weights are made once for all numbers of rows."""
    found = []
    most = max(ROWS)
    makers: list[Callable[[], list[Case]]] = [lambda: list(small_cases(bench, most))]
    for name, kind, outputs, k in PRODUCTS:
        if name not in ("9b head", "9b gdn in more bits"):
            makers.append(
                lambda n=name, kind=kind, o=outputs, k=k: [
                    product_case(bench, f"{n} {kind}", kind, o, k, most)
                ]
            )
    for name, kind, n, k in GATED:
        makers.append(
            lambda name=name, kind=kind, n=n, k=k: [
                gated_case(bench, f"{name} {kind}", kind, n, k, most)
            ]
        )
    for rows in ROWS:
        cases = list(expert_cases(bench, rows))
        bench.compile([(case, rows) for case in cases])
        found += [report(case, rows, bench.microseconds(case, rows)) for case in cases]
    for make in makers:
        cases = make()
        bench.compile([(case, rows) for case in cases for rows in ROWS])
        for case in cases:
            found += [report(case, rows, bench.microseconds(case, rows)) for rows in ROWS]
        del cases
        torch.cuda.empty_cache()
    return found


# ---- wide


def wide(bench: Bench) -> list[dict[str, Any]]:
    found = []
    for rows in (64, 512, 2048):
        cases = [
            product_case(bench, f"{n} {kind}", kind, outputs, k, rows)
            for n, kind, outputs, k in PRODUCTS
            if "head" not in n
        ]
        cases += [gated_case(bench, f"{n} {kind}", kind, w, k, rows) for n, kind, w, k in GATED]
        cases += [*expert_cases(bench, rows), *small_cases(bench, rows)]
        bench.compile([(case, rows) for case in cases])
        for case in cases:
            case.copies = min(case.copies, 3)
            found.append(report(case, rows, bench.microseconds(case, rows, 3)))
        del cases
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["check", "time"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bench = Bench()
    parts = {"check": check, "time": time_all, "wide": wide}
    for part in options.parts:
        print(f"# {part}", flush=True)
        records = parts[part](bench)
        if options.out:
            with options.out.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
