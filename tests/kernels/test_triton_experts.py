"""route and the routed experts on the GPU's kernels. Tolerance: 1e-6 (weights), 1e-5 of a row and a code (experts)."""

import numpy as np
import pytest
from gpu_machine import activation, backend, blank, blank_activation, filled, host, run
from kernel_machine import assert_close, random_blocks, random_rows, same_bits

from sparkinfer.kernels.experts import (
    ExpertBuffers,
    experts_combine,
    experts_hidden,
    experts_out,
    triton_large,
)
from sparkinfer.kernels.experts.reference import experts as experts_reference
from sparkinfer.kernels.gated_linear import gated_linear
from sparkinfer.kernels.gated_linear.reference import gated_linear as gated_reference
from sparkinfer.kernels.linear import linear, pack_weight
from sparkinfer.kernels.linear.reference import linear as linear_reference
from sparkinfer.kernels.linear.reference import quantised_rows
from sparkinfer.kernels.rms_norm import rms_norm
from sparkinfer.kernels.route import Routing, route, routing_words
from sparkinfer.kernels.route.reference import route as route_reference
from sparkinfer.kernels.route.triton_impl import exchanges, slots_of
from sparkinfer.quant.formats import dequantize


def routing_of(rows, experts, used):
    table = filled(np.full((1, routing_words(rows, used, experts)), -7, np.int64))
    return Routing(table, blank(rows, used), experts, used)


def routed(logits, used, experts):
    """The routing and the experts of its slots: each row's by rank."""
    routing, recorder = routing_of(len(logits), experts, used), backend().recorder(len(logits))
    route(recorder, filled(logits), routing)
    run(recorder)
    return routing, slots_of(recorder, routing)[: len(logits) * used].cpu().numpy()


def check_route(logits, used, experts):
    rows = len(logits)
    routing, slots = routed(logits, used, experts)
    ids, weights = route_reference(logits[:, :experts], used)
    assert_close(host(routing.weights), weights, 1.0, 1e-6)
    if rows > 16:
        check_table(host(routing.table)[0], slots, ids, rows, used, experts)
    else:
        np.testing.assert_array_equal((slots & 0xFFFF).reshape(rows, used), ids)
        np.testing.assert_array_equal(slots >> 16, np.arange(rows).repeat(used))
    alone, _ = routed(logits[-1:], used, experts)
    same_bits(host(alone.weights)[0], host(routing.weights)[-1])


def check_table(words, slot_pairs, ids, rows, used, experts):
    pairs = rows * used
    slots = words[1 : 1 + pairs].reshape(rows, used)
    active = words[1 + pairs :][: 3 * words[0]].reshape(-1, 3)
    of_slot = words[1 + pairs + 3 * min(experts, pairs) :][:pairs]
    assert sorted(slots.reshape(-1)) == list(range(pairs))
    assert active[:, 0].tolist() == sorted(set(ids.reshape(-1).tolist()))
    np.testing.assert_array_equal(np.repeat(active[:, 0], active[:, 1])[slots], ids)
    np.testing.assert_array_equal(of_slot[slots], np.arange(rows)[:, None].repeat(used, 1))
    np.testing.assert_array_equal(active[:, 2], np.r_[0, np.cumsum(active[:, 1])[:-1]])
    np.testing.assert_array_equal(slot_pairs[slots], ids | (np.arange(rows)[:, None] << 16))


@pytest.mark.parametrize(
    ("rows", "experts", "used"),
    [(1, 256, 8), (2, 512, 10), (6, 60, 8), (3, 1, 1), (16, 4, 4), (17, 8, 3), (20, 20, 4)],
)
def test_route(rows, experts, used):
    logits = random_rows(rows, experts + 1, seed=experts)
    logits[0] = np.arange(experts + 1)
    check_route(logits, used, experts)


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_exchanges_put_values_in_order(count):
    """What orders all zeros and ones orders everything."""
    rows = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1
    for a, b in exchanges(count):
        assert a < b
        rows[:, [a, b]] = np.stack([rows[:, [a, b]].max(1), rows[:, [a, b]].min(1)], 1)
    assert (rows[:, :-1] >= rows[:, 1:]).all()


@pytest.mark.parametrize("values", [(0.0,), (1.0, 2.0), (-np.inf, 0.0), (-0.0, 0.0), (-1.0, -2.0)])
def test_ties_go_to_the_lower_id(values):
    rng = np.random.default_rng(len(values))
    check_route(rng.choice(np.array(values, np.float32), (5, 17)), 2, 16)


class Block:
    """Experts of one format and what a mixture needs beside them."""

    def __init__(self, gate, down, experts, used, n, width):
        self.experts, self.used, self.n, self.width = experts, used, n, width
        self.gate, self.gate_values = self.weight(gate, width, n, 1)
        self.up, self.up_values = self.weight(gate, width, n, 2)
        self.down, self.down_values = self.weight(down, n, width, 3)

    def weight(self, kind, outputs, inputs, seed):
        blocks = random_blocks(kind, self.experts * outputs * inputs, seed)
        packed = pack_weight(backend(), kind, blocks, outputs, inputs, self.experts)
        values = np.asarray(dequantize(kind, blocks), np.float32)
        return packed, values.reshape(self.experts, outputs, inputs)

    def run(self, x, logits, shared, base):
        rows = len(x)
        routing, slots = routing_of(rows, self.experts, self.used), rows * self.used
        hidden = blank_activation(slots, self.width, quantised=self.down.quantised)
        buffers = ExpertBuffers(hidden, blank(slots, self.down.padded_outputs))
        act = activation(x, quantised=self.gate.quantised)
        gates, common, out = filled(logits), filled(shared), filled(base)
        recorder = backend().recorder(rows)
        route(recorder, gates, routing)
        experts_hidden(recorder, act, self.gate, self.up, routing, buffers)
        experts_out(recorder, self.down, routing, buffers)
        experts_combine(recorder, routing, buffers, common, gates, self.experts, out)
        run(recorder)
        self.kernels = [step.kernel for step in recorder.steps]
        return host(out)

    def launched(self, *kernels):
        """Whether the last run had them."""
        return set(kernels) <= set(self.kernels)

    def reference(self, x, logits, shared, base):
        """The specification, and how much one code of an int8 hidden row can change."""
        ids, weights = route_reference(logits[:, : self.experts], self.used)
        seen = quantised_rows(x) if self.gate.quantised else x
        out = shared / (1 + np.exp(-logits[:, -1:].astype(np.float64)))
        slack = np.zeros_like(out)
        for r in range(len(x)):
            for e, weight in zip(ids[r], weights[r], strict=True):
                h = gated_reference(seen[r : r + 1], self.gate_values[e], self.up_values[e])
                if self.down.quantised:
                    code = np.abs(h).max() / 127
                    slack[r] += weight * code * np.abs(self.down_values[e]).max(axis=1)
                    h = quantised_rows(h)
                out[r] += weight * linear_reference(h, self.down_values[e])[0]
        return (base + out).astype(np.float32), slack


def inputs(rows, n, experts):
    x, logits = random_rows(rows, n, scale=0.1), random_rows(rows, experts + 1, seed=1)
    return x, logits, random_rows(rows, n, seed=2), random_rows(rows, n, seed=3)


def agree(block, part, tolerance=1e-5):
    got = block.run(*part)
    wanted, slack = block.reference(*part)
    terms = np.abs(wanted).max(axis=1, keepdims=True)
    assert (np.abs(got - wanted) <= tolerance * terms + slack).all()
    return got


@pytest.mark.parametrize(
    ("gate", "down", "n", "width"),
    [
        ("Q8_0", "Q8_0", 64, 32),
        ("Q4_K", "F16", 256, 64),
        ("F32", "F32", 64, 32),
        ("Q4_K", "Q8_0", 256, 32),
        ("Q4_K", "Q6_K", 256, 256),
    ],
)
def test_experts(gate, down, n, width):
    block, rows = Block(gate, down, 4, 2, n, width), 3 if n < 256 else 2  # the interpreter is slow
    everything = inputs(rows, n, 4)
    got = agree(block, everything)
    alone = [block.run(*(part[r : r + 1] for part in everything)) for r in range(rows)]
    same_bits(got, np.concatenate(alone), "rows against single ones")


def test_all_rows_may_choose_the_same_expert():
    block = Block("Q8_0", "Q8_0", 4, 1, 64, 32)
    x, logits, shared, base = inputs(16, 64, 4)
    logits[:, 2] = 1000
    got = agree(block, (x, logits, shared, base))
    one = block.run(x[5:6], logits[5:6], shared[5:6], base[5:6])
    same_bits(got[5:6], one)


@pytest.mark.parametrize(("gate", "down"), [("Q8_0", "Q4_0"), ("F32", "F32")])
def test_more_rows_than_a_window(gate, down):
    """Float16 products where weights are quantised: 1e-3 of the size of what is added."""
    block, (x, logits, shared, base) = Block(gate, down, 4, 2, 64, 32), inputs(37, 64, 4)
    got = block.run(x, logits, shared, base)
    ids, weights = route_reference(logits[:, :4], 2)
    gate = 1 / (1 + np.exp(-logits[:, -1:].astype(np.float64)))
    parts = (block.gate_values, block.up_values, block.down_values)
    wanted = (
        base + gate * shared + experts_reference(x, ids, weights, *parts, 0 * shared, logits[:, -1])
    )
    assert np.linalg.norm(got - wanted) < 1e-3 * np.linalg.norm(wanted - base)


@pytest.mark.parametrize(
    ("gate", "down", "n", "width"),
    [
        ("Q8_0", "Q4_0", 64, 32),
        ("Q4_1", "Q5_1", 64, 32),
        pytest.param("Q4_K", "Q5_K", 256, 256, marks=pytest.mark.long),
        pytest.param("Q6_K", "Q8_0", 256, 256, marks=pytest.mark.long),
    ],
)
def test_many_slots_of_an_expert(monkeypatch, gate, down, n, width):
    """Tiles of 32 slots: whole ones, tails, an expert without slots. 1e-3 of the size of what is added."""
    for name, outputs, inputs_ in (("HIDDEN", width, n), ("OUT", n, width)):
        tile = triton_large.Tile(32, min(outputs, 64), min(inputs_ // 32, 4), 4, 2, 16)
        monkeypatch.setattr(triton_large, name, tile)
    monkeypatch.setattr(triton_large, "FULL", 16)
    block, (x, logits, shared, base) = Block(gate, down, 4, 2, n, width), inputs(37, n, 4)
    logits[:, 3] = -1000
    logits[:34, 1] = 1000
    got = block.run(x, logits, shared, base)
    assert block.launched(triton_large.large_hidden_kernel, triton_large.large_sum_kernel)
    ids, weights = route_reference(logits[:, :4], 2)
    sigmoid = 1 / (1 + np.exp(-logits[:, -1:].astype(np.float64)))
    parts = (block.gate_values, block.up_values, block.down_values)
    wanted = (
        base
        + sigmoid * shared
        + experts_reference(x, ids, weights, *parts, 0 * shared, logits[:, -1])
    )
    assert np.linalg.norm(got - wanted) < 1e-3 * np.linalg.norm(wanted - base)
    same_bits(block.run(x, logits, shared, base), got)


class Mixture(Block):
    """A block with its router, shared expert and the norm that follows, as a model records them."""

    def __init__(self, gate, down, common, used, n, width):
        super().__init__(gate, down, 4, used, n, width)
        self.router = self.dense("F32", 5, n, 11)
        self.shared_gate, self.shared_up = (self.dense("Q8_0", width, n, seed) for seed in (12, 13))
        self.shared_down = self.dense(common, n, width, 14)
        self.norm = filled(random_rows(1, n, seed=5))

    def dense(self, kind, outputs, inputs, seed):
        return pack_weight(
            backend(), kind, random_blocks(kind, outputs * inputs, seed), outputs, inputs
        )

    def record(self, x, base, apart):
        """Results and the number of launches; `apart`: with something in between that keeps launches from joining."""
        rows, n, width = len(x), self.n, self.width
        slots = rows * self.used
        act, routing = activation(x, quantised=True), routing_of(rows, self.experts, self.used)
        hidden = blank_activation(slots, width, quantised=self.down.quantised)
        buffers = ExpertBuffers(hidden, blank(slots, n))
        logits, common, out = blank(rows, 8), blank(rows, n), filled(base)
        shared = blank_activation(rows, width, quantised=True)
        normed = blank_activation(rows, n, quantised=True)
        recorder, copy = backend().recorder(rows), filled(np.zeros((1, 1), np.float32))

        def between():
            if apart:
                recorder.receive(copy, 1)

        linear(recorder, act, [self.router], [logits])
        between()
        gated_linear(recorder, act, self.shared_gate, self.shared_up, shared)
        route(recorder, logits, routing)
        experts_hidden(recorder, act, self.gate, self.up, routing, buffers)
        experts_out(recorder, self.down, routing, buffers)
        between()
        linear(recorder, shared, [self.shared_down], [common])
        experts_combine(recorder, routing, buffers, common, logits, self.experts, out)
        rms_norm(recorder, out, self.norm, normed, eps=1e-6)
        run(recorder)
        launches = len(recorder.steps) - 2 * apart
        return [host(b) for b in (logits, out, normed.f32, normed.q8)], launches


@pytest.mark.parametrize(
    ("formats", "used", "n", "width", "launches"),
    [
        (("Q8_0", "Q4_0", "Q8_0"), 2, 64, 32, 5),
        (("Q8_0", "F16", "Q8_0"), 2, 64, 32, 7),
        (("Q4_K", "Q5_K", "Q4_1"), 2, 256, 256, 5),
        (("Q5_0", "Q6_K", "Q6_K"), 3, 32, 256, 5),
        (("Q4_0", "Q8_0", "Q8_0"), 2, 64, 96, 7),
    ],
)
def test_a_mixture_in_few_launches_has_the_bits_of_single_rows(formats, used, n, width, launches):
    """And it agrees with the same mixture in more launches: in another order of the sums, 1e-5 of a row's largest."""
    mixture = Mixture(*formats, used, n, width)
    x, base = random_rows(2, n, scale=0.1), random_rows(2, n, seed=3)
    joined, few = mixture.record(x, base, False)
    single, many = mixture.record(x, base, True)
    assert (few, many) == (launches, 8)
    for one, other in zip(joined[:3], single[:3], strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()
    alone = [mixture.record(x[r : r + 1], base[r : r + 1], False)[0] for r in range(2)]
    for index, rows in enumerate(joined):
        same_bits(rows, np.concatenate([part[index] for part in alone]))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_router_and_a_shared_expert_of_several_rows_have_the_bits_of_single_rows(kind):
    """Seven rows: a router's program has eight at once, gated ones four, the last of which is no row."""
    router, gate, up = (
        pack_weight(backend(), *(form, random_blocks(form, outputs * 64, seed)), outputs, 64)
        for form, outputs, seed in (("F32", 5, 1), (kind, 32, 2), (kind, 32, 3))
    )
    x = random_rows(7, 64, scale=0.1)

    def record(part):
        logits, hidden = (
            blank(len(part), 8),
            blank_activation(len(part), 32, quantised=True),
        )
        recorder = backend().recorder(len(part))
        act = activation(part, quantised=True)
        linear(recorder, act, [router], [logits])
        gated_linear(recorder, act, gate, up, hidden)
        run(recorder)
        assert len(recorder.steps) == 1
        return host(logits)[:, :5], host(hidden.f32)

    together = record(x)
    alone = [record(x[r : r + 1]) for r in range(7)]
    for index, rows in enumerate(together):
        assert np.isfinite(rows).all()
        same_bits(rows, np.concatenate([part[index] for part in alone]))
