"""The GPU's kernels at the shapes of Qwen3.6-35B-A3B and Qwen3.5-9B: values, the bits of single rows. Only on a GPU.

Values are checked in some outputs of a large product: unpacking all of it on the host would take minutes. Tolerances
are those of the tests with small shapes. REAL_SHAPES=small tries these tests under the interpreter, with other numbers.
"""

import os

import gpu_machine as gpu
import numpy as np
import pytest
import test_triton_attention as attention_test
import test_triton_delta_net as net_test
from kernel_machine import assert_close, random_rows, same_bits
from real_models import scaled_blocks

from sparkinfer.kernels.argmax import argmax
from sparkinfer.kernels.argmax.reference import argmax as argmax_reference
from sparkinfer.kernels.attention.reference import attention as attention_reference
from sparkinfer.kernels.experts import ExpertBuffers, experts_combine, experts_hidden, experts_out
from sparkinfer.kernels.gated_linear import gated_linear
from sparkinfer.kernels.gated_linear.reference import gated_linear as gated_reference
from sparkinfer.kernels.linear import linear, pack_weight
from sparkinfer.kernels.linear.reference import linear as linear_reference
from sparkinfer.kernels.linear.reference import quantised_rows
from sparkinfer.kernels.rms_norm import rms_norm
from sparkinfer.kernels.rms_norm.reference import rms_norm as norm_reference
from sparkinfer.kernels.route import Routing, route, routing_words
from sparkinfer.kernels.route.reference import route as route_reference
from sparkinfer.quant.formats import QUANT_FORMATS, dequantize

SMALL = bool(os.environ.get("REAL_SHAPES"))
pytestmark = pytest.mark.skipif(gpu.DEVICE != "cuda" and not SMALL, reason="needs an NVIDIA GPU")
WIDTHS = range(1, 17) if not SMALL else (1, 3)
MOST = max(WIDTHS)
SAMPLE = 300  # outputs whose values are checked
TOLERANCE = 2e-6


class Matrix:
    """A packed random weight; `values` unpacks some rows of it."""

    def __init__(self, kind, outputs, inputs, experts=1, seed=1):
        self.kind, self.outputs, self.inputs, self.experts = kind, outputs, inputs, experts
        spec = QUANT_FORMATS[kind]
        blocks = scaled_blocks(kind, experts * outputs * inputs, inputs**-0.5, seed)
        self.blocks = blocks.reshape(experts * outputs, inputs // spec.block_size, spec.block_bytes)
        self.packed = pack_weight(gpu.backend(), kind, blocks, outputs, inputs, experts)

    def values(self, rows):
        blocks = np.ascontiguousarray(self.blocks[rows]).reshape(-1, self.blocks.shape[2])
        return np.asarray(dequantize(self.kind, blocks), np.float32).reshape(-1, self.inputs)

    def expert(self, index):
        return self.values(slice(index * self.outputs, (index + 1) * self.outputs))


def some(outputs):
    picked = np.random.default_rng(outputs).integers(0, outputs, SAMPLE)
    return np.unique(np.r_[0, picked, outputs - 1])


def rows_and_single_rows(run, what):
    """run(slice) gives a list of arrays for these rows: all widths have the bits of single rows, which are returned."""
    single = [run(slice(r, r + 1)) for r in range(MOST)]
    alone = [np.concatenate(parts) for parts in zip(*single, strict=True)]
    for width in WIDTHS:
        for got, wanted in zip(run(slice(0, width)), alone, strict=True):
            same_bits(got, wanted[:width], f"{what}: {width} rows")
    return alone


# ---- products

PRODUCTS = {
    "35B recurrent": (
        2048,
        [("Q8_0", 8192), ("Q8_0", 4096), ("Q8_0", 32), ("Q8_0", 32)],
        False,
    ),
    "35B attention": (2048, [("Q8_0", 8192), ("Q8_0", 512), ("Q8_0", 512)], False),
    "35B mixer out": (4096, [("Q8_0", 2048)], True),
    "35B router": (2048, [("F32", 257)], False),
    "35B shared down": (512, [("Q8_0", 2048)], False),
    "35B head": (2048, [("Q6_K", 248320)], False),
    "9B recurrent": (4096, [("Q4_K", 8192), ("Q4_K", 4096), ("Q4_K", 32), ("Q4_K", 32)], False),
    "9B recurrent, more bits": (
        4096,
        [("Q6_K", 8192), ("Q4_K", 4096), ("Q4_K", 32), ("Q4_K", 32)],
        False,
    ),
    "9B attention": (4096, [("Q4_K", 8192), ("Q4_K", 1024), ("Q6_K", 1024)], False),
    "9B mixer out": (4096, [("Q4_K", 4096)], True),
    "9B down": (12288, [("Q4_K", 4096)], True),
    "9B down, more bits": (12288, [("Q6_K", 4096)], True),
    "9B head": (4096, [("Q6_K", 248320)], False),
}
if SMALL:
    PRODUCTS = {"small": (1280, [("Q8_0", 64), ("Q4_K", 16)], True), "router": (256, [("F32", 9)], False)}  # fmt: skip


@pytest.mark.parametrize("case", PRODUCTS)
def test_products(case):
    inputs, kinds, add = PRODUCTS[case]
    matrices = [Matrix(kind, n, inputs, seed=n) for kind, n in kinds]
    weights = [matrix.packed for matrix in matrices]
    wide = 40 if not SMALL else 17
    x = random_rows(wide, inputs)
    base = [random_rows(wide, w.padded_outputs, seed=9) for w in weights]

    def run(part):
        rows = len(x[part])
        act = gpu.activation(x[part], quantised=weights[0].quantised)
        out = [
            gpu.filled(b[part]) if add else gpu.blank(rows, w.padded_outputs)
            for b, w in zip(base, weights, strict=True)
        ]
        recorder = gpu.backend().recorder(rows)
        linear(recorder, act, weights, out, add=add)
        gpu.run(recorder)
        return [gpu.host(buffer) for buffer in out]

    alone = rows_and_single_rows(run, case)
    seen = quantised_rows(x) if weights[0].quantised else x
    many = run(slice(0, wide))
    for matrix, few, rows, before in zip(matrices, alone, many, base, strict=True):
        picked = some(matrix.outputs)
        values = matrix.values(picked)
        start = before[:, picked] if add else 0
        size = np.abs(seen) @ np.abs(values).T + np.abs(start)
        wanted = linear_reference(seen, values) + start
        assert_close(few[:, picked], wanted[:MOST], size[:MOST], TOLERANCE)
        wanted = linear_reference(x, values) + start
        error = np.linalg.norm(rows[:, picked] - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        assert (error < 1e-3).all(), error.max()


GATED = {"35B shared": ("Q8_0", 512, 2048), "9B": ("Q4_K", 12288, 4096)}
if SMALL:
    GATED = {"small": ("Q4_K", 64, 256)}


@pytest.mark.parametrize("case", GATED)
def test_gated_products_and_the_one_that_reads_them(case):
    """The int8 blocks of the middle are tested by what is made of them: another code would show."""
    kind, width, inputs = GATED[case]
    gate, up = (Matrix(kind, width, inputs, seed=seed) for seed in (1, 2))
    down = Matrix("Q8_0", inputs, width, seed=3)
    x = random_rows(MOST, inputs)

    def run(part):
        rows = len(x[part])
        hidden, out = gpu.blank_activation(rows, width, quantised=True), gpu.blank(rows, inputs)
        recorder = gpu.backend().recorder(rows)
        act = gpu.activation(x[part], quantised=True)
        gated_linear(recorder, act, gate.packed, up.packed, hidden)
        linear(recorder, hidden, [down.packed], [out])
        gpu.run(recorder)
        return [gpu.host(hidden.f32), gpu.host(out)]

    hidden, out = rows_and_single_rows(run, case)
    picked, seen = some(width), quantised_rows(x)
    a, b = gate.values(picked), up.values(picked)
    g, u = np.abs(seen) @ np.abs(a).T, np.abs(seen) @ np.abs(b).T
    exact_g, exact_u = (np.abs(linear_reference(seen, values)) for values in (a, b))
    size = 1.1 * g * exact_u + exact_g * u + g * u * TOLERANCE + exact_g * exact_u
    assert_close(hidden[:, picked], gated_reference(seen, a, b), size, TOLERANCE)
    read, picked = quantised_rows(hidden), some(inputs)
    values = down.values(picked)
    step = np.abs(hidden).max(axis=1, keepdims=True) / 127 * np.abs(values).max()  # one code
    size = np.abs(read) @ np.abs(values).T + step / TOLERANCE
    assert_close(out[:, picked], linear_reference(read, values), size, TOLERANCE)


# ---- the mixture of experts


class Mixture:
    """Router, shared expert, routed experts and the norm that follows, as a model records them."""

    def __init__(self, embed=2048, width=512, experts=256, used=8):
        self.embed, self.width, self.experts, self.used = embed, width, experts, used
        self.router = Matrix("F32", experts + 1, embed, seed=11)
        self.shared = [Matrix("Q8_0", width, embed, seed=seed) for seed in (12, 13)]
        self.shared_down = Matrix("Q8_0", embed, width, seed=14)
        self.gate, self.up = (Matrix("Q4_K", width, embed, experts, seed) for seed in (15, 16))
        self.down = Matrix("Q5_K", embed, width, experts, seed=17)
        self.norm = random_rows(1, embed, seed=5)

    def run(self, x, base):
        rows, blank = len(x), gpu.blank_activation
        slots, recorder = rows * self.used, gpu.backend().recorder(rows)
        words = np.full((1, routing_words(rows, self.used, self.experts)), -7, np.int64)
        routing = Routing(gpu.filled(words), gpu.blank(rows, self.used), self.experts, self.used)
        hidden = blank(slots, self.width, quantised=True)
        buffers = ExpertBuffers(hidden, gpu.blank(slots, self.down.packed.padded_outputs))
        logits = gpu.blank(rows, self.router.packed.padded_outputs)
        common, out = gpu.blank(rows, self.embed), gpu.filled(base)
        shared = blank(rows, self.width, quantised=True)
        normed = blank(rows, self.embed, quantised=True)
        act = gpu.activation(x, quantised=True)
        linear(recorder, act, [self.router.packed], [logits])
        gated_linear(recorder, act, *(matrix.packed for matrix in self.shared), shared)
        route(recorder, logits, routing)
        experts_hidden(recorder, act, self.gate.packed, self.up.packed, routing, buffers)
        experts_out(recorder, self.down.packed, routing, buffers)
        linear(recorder, shared, [self.shared_down.packed], [common])
        experts_combine(recorder, routing, buffers, common, logits, self.experts, out)
        rms_norm(recorder, out, gpu.filled(self.norm), normed, eps=1e-6)
        gpu.run(recorder)
        return [gpu.host(b) for b in (logits, out, normed.f32, normed.q8)]

    def added(self, x, logits):
        """What the specification adds to the stream of some rows, given their logits."""
        ids, weights = route_reference(logits[:, : self.experts], self.used)
        seen = quantised_rows(x)
        hidden = gated_reference(seen, *(matrix.expert(0) for matrix in self.shared))
        common = linear_reference(quantised_rows(hidden), self.shared_down.expert(0))
        out = common / (1 + np.exp(-logits[:, [self.experts]]))
        for r in range(len(x)):
            for expert, weight in zip(ids[r], weights[r], strict=True):
                parts = self.gate.expert(expert), self.up.expert(expert)
                hidden = quantised_rows(gated_reference(seen[r : r + 1], *parts))
                out[r] += weight * linear_reference(hidden, self.down.expert(expert))[0]
        return out


@pytest.fixture(scope="module")
def mixture():
    return Mixture(256, 256, 4, 2) if SMALL else Mixture()


def test_a_mixture(mixture):
    """A row is within 0.1 % of the specification: an int8 code of a hidden row may be the one beside."""
    x, base = random_rows(MOST, mixture.embed), random_rows(MOST, mixture.embed, seed=3)
    logits, out, normed, _ = rows_and_single_rows(
        lambda part: mixture.run(x[part], base[part]), "mixture"
    )
    rows = slice(0, 3)  # unpacking their experts takes seconds
    wanted = mixture.added(x[rows], logits[rows].astype(np.float64))
    error = np.linalg.norm(out[rows] - base[rows] - wanted, axis=1)
    assert (error < 1e-3 * np.linalg.norm(wanted, axis=1)).all()
    wanted = norm_reference(out, mixture.norm[0], 1e-6)
    assert_close(normed, wanted, np.abs(wanted), 2e-6)


@pytest.mark.parametrize("count", [200, 1600] if not SMALL else [20])
def test_a_mixture_of_many_rows(mixture, count):
    """Float16 products, in both forms; the first rows' experts are the same, being chosen by products of floats."""
    x, base = random_rows(count, mixture.embed), random_rows(count, mixture.embed, seed=3)
    many, few = mixture.run(x, base), mixture.run(x[:MOST], base[:MOST])
    again = mixture.run(x, base)
    for one, other in zip(many, again, strict=True):
        same_bits(one, other, "twice")
    difference = np.linalg.norm(many[1][:MOST] - few[1], axis=1)
    errors = difference / np.linalg.norm(few[1] - base[:MOST], axis=1)
    assert np.median(errors) < 0.02 and errors.max() < 0.3, errors


# ---- mixers

HEADS = {"35B": (16, 2, 256, True), "9B": (16, 4, 256, True), "draft": (32, 8, 128, False)}
LENGTHS = (16, 130, 4100, 8200, 32768)
if SMALL:
    HEADS, LENGTHS = {"small": (2, 1, 32, True)}, (16, 130)


@pytest.mark.parametrize("case", HEADS)
def test_attention(case):
    """A window's rows against rows alone, which do not see the keys of later ones."""
    heads, kv_heads, size, gated = HEADS[case]
    shape = attention_test.shape_of(heads, kv_heads, size, gated)
    memory = attention_test.Memory(kv_heads, size, False, context=LENGTHS[-1])
    rng = np.random.default_rng(1)
    for length in LENGTHS:
        start = length - MOST
        q, gate = (2 * rng.standard_normal((2, MOST, heads, size))).astype(np.float32)
        gate = gate if gated else None
        k, v = memory.fill(length)
        single = []
        for row in range(MOST):
            memory.fill(start + row + 1)
            part = slice(row, row + 1)
            gates = None if gate is None else gate[part]
            single.append(attention_test.run(memory, shape, start + row, q[part], gates)[0])
        alone = np.concatenate(single)
        memory.fill(length)
        for width in WIDTHS:
            gates = None if gate is None else gate[:width]
            got, _ = attention_test.run(memory, shape, start, q[:width], gates)
            same_bits(got, alone[:width], f"{width} rows at length {length}")
        assert_close(alone, attention_reference(q, k, v, gate), np.abs(v).max(), 3e-6)


NETS = {"35B, 9B": (16, 32, 128, 4)} if not SMALL else {"small": (1, 2, 32, 4)}


@pytest.mark.parametrize("case", NETS)
def test_the_delta_rule(case):
    """A window's rows, its records as commits read them, and steps that advance, against rows alone."""
    shape = net_test.shape_of(*NETS[case])
    inputs, single = net_test.Inputs(shape, MOST), net_test.State(shape)
    wanted, _, delta_after = net_test.wanted(shape, single, inputs)
    alone = np.concatenate(
        [net_test.run(shape, single, inputs.rows(slice(r, r + 1)), True)[0] for r in range(MOST)]
    )
    assert_close(alone, wanted, np.abs(wanted).max(), 2e-5)
    assert_close(single.host("delta")[1], delta_after, np.abs(delta_after).max(), 2e-5)
    for width in WIDTHS:
        for advance in (True, False):
            state = net_test.State(shape)
            got, _ = net_test.run(shape, state, inputs.rows(slice(0, width)), advance)
            same_bits(got, alone[:width], f"{width} rows, advance {advance}")
            if advance and width == MOST:
                same_bits(state.host("delta"), single.host("delta"))


# ---- norms and the choice


@pytest.mark.parametrize("width", [2048, 4096] if not SMALL else [256])
def test_norms(width):
    x, weight = random_rows(MOST, width), random_rows(1, width, seed=1)

    def run(part):
        out = gpu.blank_activation(len(x[part]), width, quantised=True)
        recorder = gpu.backend().recorder(len(x[part]))
        rms_norm(recorder, gpu.filled(x[part]), gpu.filled(weight), out, eps=1e-6)
        gpu.run(recorder)
        return [gpu.host(out.f32), gpu.host(out.q8)]

    alone, _ = rows_and_single_rows(run, "norm")
    wanted = norm_reference(x, weight[0], 1e-6)
    assert_close(alone, wanted, np.abs(wanted), 1e-6)


def test_the_largest_logit():
    n_vocab = 248320 if not SMALL else 3000
    logits = np.random.default_rng(3).standard_normal((MOST, n_vocab)).astype(np.float32)
    logits[np.arange(MOST), np.arange(MOST) * (n_vocab // MOST)] = 9.0
    logits[:, -1] = 9.0  # a tie: the lower id
    out = gpu.filled(np.full((MOST, 2), -7, np.int64))
    recorder = gpu.backend().recorder(MOST)
    argmax(recorder, gpu.filled(logits), out, n_vocab)
    gpu.run(recorder)
    np.testing.assert_array_equal(gpu.host(out), argmax_reference(logits, n_vocab))
