"""Kernels in Gluon, which only a Hopper GPU runs. Tolerance: 1e-3 of a result's size, as of all float16 products."""

import numpy as np
import pytest
from gpu_machine import activation, backend, blank, blank_activation, filled, host, run
from kernel_machine import random_blocks, same_bits

from sparkinfer.kernels.experts import (
    ExpertBuffers,
    experts_combine,
    experts_hidden,
    experts_out,
    triton_large,
)
from sparkinfer.kernels.experts.reference import experts as experts_reference
from sparkinfer.kernels.linear import pack_weight, triton_order
from sparkinfer.kernels.route import Routing, route, routing_words
from sparkinfer.kernels.route.reference import route as route_reference
from sparkinfer.quant.formats import dequantize

pytestmark = pytest.mark.skipif(not backend().warpgroups, reason="needs a Hopper GPU")


def weight(kind, outputs, inputs, seed, experts=1):
    """A packed random weight and its values."""
    blocks = random_blocks(kind, experts * outputs * inputs, seed)
    packed = pack_weight(backend(), kind, blocks, outputs, inputs, experts)
    values = np.asarray(dequantize(kind, blocks), np.float64)
    return packed, values.reshape((experts,) * (experts > 1) + (outputs, inputs))


def kernels(recorder):
    return {step.kernel.fn.__name__ for step in recorder.steps}


def assert_near(got, wanted):
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - wanted) < 1e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("gate", "down"),
    [("Q4_K", "Q5_K"), ("Q6_K", "Q8_0"), ("Q5_0", "Q2_K"), ("Q8_0", "Q4_0"), ("Q4_1", "Q4_K"), ("Q5_1", "Q3_K"),
     ("Q2_K", "Q6_K"), ("IQ4_XS", "IQ4_NL"), ("Q5_K", "Q4_1")],
)  # fmt: skip
def test_experts(monkeypatch, gate, down):
    check_experts(monkeypatch, gate, down, 256, "left_out_kernel")


@pytest.mark.parametrize(("width", "out"), [(512, "left_out_kernel"), (768, "large_out_kernel")])
def test_rows_that_fit_and_rows_that_do_not(monkeypatch, width, out):
    """The down product's rows of a tile of slots stay in shared memory, if it has room."""
    check_experts(monkeypatch, "Q4_K", "Q5_K", width, out)


def check_experts(monkeypatch, gate, down, width, out_kernel):
    """Whole tiles, tails, an expert with few slots and one with none."""
    monkeypatch.setattr(triton_large, "FULL", 16)
    monkeypatch.setattr(triton_order, "ENOUGH", 64)
    experts, used, n, rows = 6, 2, 512, 300
    parts = [weight(gate, width, n, seed, experts) for seed in (1, 2)]
    parts.append(weight(down, n, width, 3, experts))
    rng = np.random.default_rng(0)
    x, shared, base = rng.standard_normal((3, rows, n)).astype(np.float32)
    logits = rng.standard_normal((rows, experts + 1)).astype(np.float32)
    logits[:, 3] = -1000
    logits[5:, 4] = -500
    logits[:, 1] += 3
    results = []
    for _ in range(2):
        table = filled(np.full((1, routing_words(rows, used, experts)), -7, np.int64))
        routing = Routing(table, blank(rows, used), experts, used)
        hidden = blank_activation(rows * used, width, quantised=True)
        buffers = ExpertBuffers(hidden, blank(rows * used, n))
        gates, out, recorder = filled(logits), filled(base), backend().recorder(rows)
        route(recorder, gates, routing)
        gate_up = [packed for packed, _ in parts[:2]]
        experts_hidden(recorder, activation(x, quantised=True), *gate_up, routing, buffers)
        experts_out(recorder, parts[2][0], routing, buffers)
        experts_combine(recorder, routing, buffers, filled(shared), gates, experts, out)
        run(recorder)
        assert {"left_hidden_kernel", out_kernel, "large_sum_kernel"} <= kernels(recorder)
        results.append(host(out))
    ids, weights = route_reference(logits[:, :experts], used)
    sigmoid = 1 / (1 + np.exp(-logits[:, -1:].astype(np.float64)))
    values = [v.astype(np.float32) for _, v in parts]
    wanted = sigmoid * shared + experts_reference(
        x, ids, weights, *values, 0 * shared, logits[:, -1]
    )
    assert_near(results[0] - base, wanted)
    same_bits(*results)
