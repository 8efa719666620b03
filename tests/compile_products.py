"""Compile the matrix products' kernels for an H200 at real shapes; one JSON line per kernel.

    python tests/compile_products.py [decode | wide | hopper]

Without Triton's interpreter: a process of its own.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from compile_sm90 import Owner, activation, buffer, compile_all, recorder

from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.experts import ExpertBuffers, experts_combine, experts_hidden, experts_out
from sparkinfer.kernels.gated_delta import DeltaInputs, gated_delta
from sparkinfer.kernels.gated_linear import gated_linear
from sparkinfer.kernels.linear import linear
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.quantise import quantise
from sparkinfer.kernels.rms_norm import rms_norm
from sparkinfer.kernels.route import Routing, route, routing_words
from sparkinfer.kernels.shapes import RecurrentShape

PRODUCTS = (
    ("Q8_0", 8192, 2048), ("Q8_0", 2048, 4096), ("Q8_0", 2048, 512), ("Q6_K", 248320, 2048), ("F32", 257, 2048),
    ("Q4_K", 8192, 4096), ("Q4_K", 4096, 12288), ("Q6_K", 4096, 12288), ("Q5_K", 2048, 512), ("Q4_0", 64, 64),
    ("Q4_1", 576, 576), ("Q5_1", 576, 576), ("Q2_K", 512, 256), ("IQ4_XS", 512, 2560), ("F16", 512, 1024),
)  # fmt: skip
GATED = (
    ("Q8_0", "Q8_0", 512, 2048),
    ("Q4_K", "Q4_K", 12288, 4096),
    ("Q4_K", "Q6_K", 1024, 1024),
    ("Q8_0", "Q8_0", 128, 512),
    ("F32", "F16", 64, 128),
)


def weight(kind: str, outputs: int, inputs: int, experts: int = 1) -> TritonWeight:
    """A weight nobody reads."""
    return TritonWeight(kind, outputs, inputs, torch.empty(64, dtype=torch.int32), experts)


def hopper_recordings(rows: int) -> Iterator[tuple[str, CudaRecorder]]:
    """What is in Gluon: experts of several formats, the delta rule."""
    for kind in ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_1", "Q2_K"):
        yield f"experts in {kind}", mixture(rows, kind, "Q5_K" if kind == "Q4_K" else kind)
    run, channels = recorder(rows), 8192
    gates = [buffer(rows, 32), buffer(rows, 32), buffer(1, 32), buffer(1, 32)]
    inputs = DeltaInputs(buffer(rows, channels), *gates)
    shape, params = RecurrentShape(30, channels, 4, 16, 32, 128, 16), buffer(1, 16, torch.int64)
    gated_delta(run, inputs, shape, 1, params, buffer(rows, 4096), 1e-6)
    yield "delta rule", run


def recordings(rows: int) -> Iterator[tuple[str, CudaRecorder]]:
    for kind, n, k in PRODUCTS:
        run, w = recorder(rows), weight(kind, n, k)
        linear(
            run, activation(rows, k, quantised=w.quantised), [w], [buffer(rows, w.padded_outputs)]
        )
        yield f"{kind} {n} x {k}", run
    for gate, up, n, k in GATED:
        run, quantised = recorder(rows), weight(gate, n, k).quantised
        out = activation(rows, n)
        gated_linear(
            run, activation(rows, k, quantised=quantised), weight(gate, n, k), weight(up, n, k), out
        )
        yield f"gated {gate} {up} {n} x {k}", run
    run, x, shared = recorder(rows), activation(rows, 2048), weight("Q8_0", 512, 2048)
    rms_norm(run, buffer(rows, 2048), buffer(1, 2048), x, eps=1e-6)
    linear(run, x, [weight("F32", 257, 2048)], [buffer(rows, 264)])
    gated_linear(run, x, shared, shared, activation(rows, 512))
    yield "router after a norm", run
    run = recorder(rows)
    rms_norm(run, buffer(rows, 2048), buffer(1, 2048), activation(rows, 2048), eps=1e-6)
    quantise(run, activation(rows, 4096))
    yield "norms", run
    yield "experts", mixture(rows)
    if rows > 16:
        yield "experts, few slots", mixture(512)


def mixture(rows: int, kind: str = "Q4_K", down_kind: str = "Q5_K") -> CudaRecorder:
    """The routed experts of the 35B model."""
    run, slots = recorder(rows), rows * 8
    table = buffer(1, routing_words(rows, 8, 256), torch.int64)
    routing = Routing(table, buffer(rows, 8), 256, 8)
    buffers = ExpertBuffers(activation(slots, 512), buffer(slots, 2048))
    gate, down = weight(kind, 512, 2048, 256), weight(down_kind, 2048, 512, 256)
    logits, x, hidden = buffer(rows, 264), activation(rows, 2048), activation(rows, 512)
    shared, shared_down = weight("Q8_0", 512, 2048), weight("Q8_0", 2048, 512)
    common, out = buffer(rows, 2048), buffer(rows, 2048)
    linear(run, x, [weight("F32", 257, 2048)], [logits])
    gated_linear(run, x, shared, shared, hidden)
    route(run, logits, routing)
    experts_hidden(run, x, gate, gate, routing, buffers)
    experts_out(run, down, routing, buffers)
    linear(run, hidden, [shared_down], [common])
    experts_combine(run, routing, buffers, common, logits, 256, out)
    rms_norm(run, out, buffer(1, 2048), activation(rows, 2048), eps=1e-6)
    return run


def main() -> None:
    part = sys.argv[1] if sys.argv[1:] else "decode"
    Owner.warpgroups = part == "hopper"
    for rows in {"decode": (1, 6), "wide": (2048,), "hopper": (2048,)}[part]:
        for name, run in (hopper_recordings if part == "hopper" else recordings)(rows):
            for kernel, resources, compiled in compile_all(run):
                record: dict[str, Any] = {
                    "shape": name,
                    "rows": rows,
                    "kernel": kernel,
                    **resources,
                }
                ptx = compiled.asm["ptx"]
                record |= {
                    "dp4a": ptx.count("dp4a"),
                    "wgmma": ptx.count("wgmma.mma_async"),
                    "wide loads": ptx.count("ld.global.v4"),
                }
                print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
