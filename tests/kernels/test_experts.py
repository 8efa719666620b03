"""route and the routed experts. Tolerance: 1e-6 (weights), 1e-5 of a row (experts), one code of an int8 hidden row."""

import numpy as np
import pytest
from kernel_machine import ISAS, assert_close, machine, random_rows, same_bits

from sparkinfer.backend.isa import choose_isa
from sparkinfer.kernels.experts import (
    ExpertBuffers,
    experts_combine,
    experts_hidden,
    experts_out,
)
from sparkinfer.kernels.experts.reference import experts as reference
from sparkinfer.kernels.gated_linear.reference import gated_linear as gated_reference
from sparkinfer.kernels.linear.reference import linear as linear_reference
from sparkinfer.kernels.linear.reference import quantised_rows
from sparkinfer.kernels.route import Routing, route, routing_words
from sparkinfer.kernels.route.reference import route as route_reference


def routing_of(bench, rows, experts, used):
    slots = rows * used
    words = 1 + 2 * slots + 3 * min(experts, slots)
    table = bench.filled(np.full((1, words), -7, np.int64))
    routing = Routing(table, bench.blank(rows, used), experts, used)
    assert routing_words(rows, used, experts) == words
    return routing


def read_table(routing, rows):
    """Slots [rows, used], (expert, rows, first slot) of the active experts, the row of every slot."""
    words, used = routing.table.array[0], routing.used
    pairs = rows * used
    active = words[1 + pairs :][: 3 * words[0]].reshape(-1, 3)
    of_slot = words[1 + pairs + 3 * min(routing.experts, pairs) :][:pairs]
    return words[1 : 1 + pairs].reshape(rows, used), active, of_slot


def run_route(logits, used, experts):
    bench, rows = machine(), len(logits)
    routing = routing_of(bench, rows, experts, used)
    source = bench.filled(logits)
    bench.run(rows, lambda r: route(r, source, routing))
    return routing


def check_route(logits, used, experts):
    rows = len(logits)
    routing = run_route(logits, used, experts)
    ids, weights = route_reference(logits[:, :experts], used)
    slots, active, of_slot = read_table(routing, rows)
    assert_close(routing.weights.array, weights, 1.0, 1e-6)
    assert sorted(slots.reshape(-1)) == list(range(rows * used))
    assert active[:, 0].tolist() == sorted(set(ids.reshape(-1).tolist()))
    expert_of_slot = np.repeat(active[:, 0], active[:, 1])
    np.testing.assert_array_equal(expert_of_slot[slots], ids)
    np.testing.assert_array_equal(of_slot[slots], np.arange(rows)[:, None].repeat(used, 1))
    np.testing.assert_array_equal(active[:, 2], np.r_[0, np.cumsum(active[:, 1])[:-1]])
    for r in range(rows):
        alone = run_route(logits[r : r + 1], used, experts)
        same_bits(alone.weights.array[0], routing.weights.array[r])


@pytest.mark.parametrize(("experts", "used"), [(8, 3), (4, 4), (1, 1), (60, 8), (256, 8)])
@pytest.mark.parametrize("rows", [1, 2, 16, 64])
def test_route(experts, used, rows):
    logits = random_rows(
        rows, experts + 1, seed=experts
    )  # one column more: the shared expert's gate
    logits[0] = np.arange(experts + 1)
    check_route(logits, used, experts)


@pytest.mark.parametrize("values", [(0.0,), (1.0, 2.0), (-np.inf, 0.0), (-0.0, 0.0)])
def test_ties_go_to_the_lower_id(values):
    rng = np.random.default_rng(len(values))
    check_route(rng.choice(np.array(values, np.float32), (9, 17)), 2, 16)


class Block:
    """Experts of one format and what a mixture needs beside them."""

    def __init__(self, bench, gate, down, experts, used, n, width):
        self.bench, self.experts, self.used, self.n, self.width = bench, experts, used, n, width
        self.gate, self.gate_values = bench.weight(gate, width, n, 1, experts)
        self.up, self.up_values = bench.weight(gate, width, n, 2, experts)
        self.down, self.down_values = bench.weight(down, n, width, 3, experts)

    def run(self, x, logits, shared, base):
        bench, rows = self.bench, len(x)
        routing = routing_of(bench, rows, self.experts, self.used)
        slots = rows * self.used
        hidden = bench.blank_activation(slots, self.width, quantised=self.down.quantised)
        buffers = ExpertBuffers(hidden, bench.blank(slots, self.down.padded_outputs))
        act = bench.input(x, self.gate.quantised)
        gates, common, out = bench.filled(logits), bench.filled(shared), bench.filled(base)

        def record(recorder):
            route(recorder, gates, routing)
            experts_hidden(recorder, act, self.gate, self.up, routing, buffers)
            experts_out(recorder, self.down, routing, buffers)
            experts_combine(recorder, routing, buffers, common, gates, self.experts, out)

        bench.run(rows, record)
        return out.array

    def reference(self, x, logits, shared, base):
        """The specification, and with int8 activations how much one code of a hidden row can change."""
        ids, weights = route_reference(logits[:, : self.experts], self.used)
        seen = quantised_rows(x) if self.gate.quantised else x
        if not self.down.quantised:
            parts = (self.gate_values, self.up_values, self.down_values)
            return base + reference(seen, ids, weights, *parts, shared, logits[:, -1]), 0.0
        out = shared / (1 + np.exp(-logits[:, -1:].astype(np.float64)))
        slack = np.zeros_like(out)
        for r in range(len(x)):
            for e, weight in zip(ids[r], weights[r], strict=True):
                h = gated_reference(seen[r : r + 1], self.gate_values[e], self.up_values[e])
                out[r] += weight * linear_reference(quantised_rows(h), self.down_values[e])[0]
                code = np.abs(h).max() / 127
                slack[r] += weight * code * np.abs(self.down_values[e]).max(axis=1)
        return (base + out).astype(np.float32), slack


def inputs(rows, n, experts):
    x, logits = random_rows(rows, n, scale=0.1), random_rows(rows, experts + 1, seed=1)
    return x, logits, random_rows(rows, n, seed=2), random_rows(rows, n, seed=3)


FORMATS = (("F32", "F32"), ("Q8_0", "Q8_0"), ("Q4_K", "Q6_K"), ("Q4_K", "F16"))
OTHERS = [isa for isa in ISAS if isa != choose_isa().name]


@pytest.mark.parametrize(
    ("isa", "gate", "down"),
    [("auto", *formats) for formats in FORMATS]
    + [(isa, "Q8_0", "Q8_0") for isa in OTHERS]
    + [pytest.param(isa, *f, marks=pytest.mark.long) for isa in OTHERS for f in FORMATS],
)
@pytest.mark.parametrize(("experts", "used"), [(8, 3), (3, 1)])
def test_experts(isa, gate, down, experts, used):
    block = Block(machine(isa), gate, down, experts, used, 256, 256)
    everything = inputs(17, 256, experts)
    alone = [block.run(*(part[r : r + 1] for part in everything)) for r in range(17)]
    for rows in (1, 2, 5, 16, 17):
        part = [values[:rows] for values in everything]
        got = block.run(*part)
        wanted, slack = block.reference(*part)
        terms = np.abs(wanted).max(axis=1, keepdims=True)
        assert (np.abs(got - wanted) <= 1e-5 * terms + slack).all()
        same_bits(got, np.concatenate(alone[:rows]), f"{rows} rows against single ones")


def test_all_rows_may_choose_the_same_expert():
    block = Block(machine(), "Q8_0", "Q8_0", 4, 1, 64, 32)
    x, logits, shared, base = inputs(16, 64, 4)
    logits[:, 2] = 1000
    got = block.run(x, logits, shared, base)
    wanted, slack = block.reference(x, logits, shared, base)
    assert (np.abs(got - wanted) <= 1e-5 * np.abs(wanted).max() + slack).all()


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_change_the_bits(threads):
    everything = inputs(16, 512, 8)  # several parts of every expert
    results = [
        Block(machine(threads=t), "Q4_K", "Q6_K", 8, 3, 512, 512).run(*everything)
        for t in (1, threads)
    ]
    same_bits(*results)
