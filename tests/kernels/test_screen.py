"""The largest logit by a coarse product and bounds: always that of the whole product, and the bounds hold."""

from functools import partial

import numpy as np
import pytest
from kernel_machine import ISAS, Floats, machine

from sparkinfer.backend.cpu import CpuBackend
from sparkinfer.kernels.argmax import argmax
from sparkinfer.kernels.linear import linear, pack_weight
from sparkinfer.kernels.linear.reference import quantised_rows
from sparkinfer.kernels.quantise import quantise
from sparkinfer.kernels.screen import TOTALS, pack_screen, screen, why_not
from sparkinfer.kernels.screen.reference import parts, product
from sparkinfer.quant.encode import quantize
from sparkinfer.quant.formats import dequantize

INPUTS = 256
SIZES = {"Q8_0": 34, "Q6_K": 210, "F16": 2, "F32": 4}


class Head:
    """A head in a backend, screened and whole."""

    def __init__(self, backend: CpuBackend, rows: Floats, norm: Floats, kind: str = "Q8_0") -> None:
        self.backend, self.outputs, inputs = backend, *rows.shape
        blocks = quantize(kind, rows).reshape(-1, SIZES[kind])
        self.exact = dequantize(kind, blocks).reshape(rows.shape)
        self.floats = kind.startswith("F")
        self.weight = pack_weight(backend, kind, blocks, self.outputs, inputs)
        take = lambda first, count: self.exact[first : first + count]  # noqa: E731
        self.coarse = pack_screen(backend, take, self.outputs, inputs, norm)
        self.totals = backend.buffer(1, TOTALS, np.int64)

    def seen(self, x: Floats) -> Floats:
        """What the exact product reads."""
        return x if self.floats else quantised_rows(x)

    def both(self, x: Floats) -> tuple[np.ndarray, np.ndarray]:
        """Picks of the whole product and of the screened one, int64 [rows, 2]."""
        count, backend, found = len(x), self.backend, []
        act = backend.activation(count, x.shape[1], quantised=not self.floats)
        act.f32.array[:] = x
        logits = backend.buffer(count, self.weight.padded_outputs)
        for whole in (True, False):
            out, recorder = backend.buffer(count, 2, np.int64), backend.recorder(count)
            out.array[:] = -1
            if not self.floats:
                quantise(recorder, act)
            if whole:
                linear(recorder, act, [self.weight], [logits])
                argmax(recorder, logits, out, self.outputs)
            else:
                logits.array[:] = np.nan
                screen(
                    recorder, act, self.weight, self.coarse, logits, out, self.totals, self.outputs
                )
            recorder.finish().replay()
            found.append(out.array.copy())
        return found[0], found[1]

    def same(self, x: Floats) -> None:
        whole, screened = self.both(x)
        finite = whole[:, 1] == 1
        assert (screened[:, 1] == whole[:, 1]).all()
        assert (screened[finite] == whole[finite]).all()


def natural(rng: np.random.Generator, outputs: int, inputs: int = INPUTS) -> tuple[Floats, Floats]:
    """Rows like an embedding's (a common direction, uneven dimensions) and norm weights."""
    size = rng.lognormal(0, 0.5, inputs)
    common = np.outer(rng.normal(1, 0.3, outputs), rng.normal(0, 1, inputs))
    rows = (common + rng.normal(0, 1, (outputs, inputs))) * size * 0.1
    return rows.astype(np.float32), rng.lognormal(0.5, 0.3, inputs).astype(np.float32)


def activations(rng: np.random.Generator, rows: int, norm: Floats) -> Floats:
    return (rng.standard_t(4, (rows, len(norm))) * norm).astype(np.float32)


@pytest.fixture(scope="module", params=[1, 2])
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    machine()  # sets the folder for compiled code
    return machine(threads=request.param).backend


@pytest.mark.parametrize("rows", range(1, 17))
def test_every_number_of_rows(backend: CpuBackend, rows: int) -> None:
    rng = np.random.default_rng(rows)
    head = Head(backend, *(pair := natural(rng, 4096 + 8 * rows + rows)))
    for _ in range(4):
        head.same(activations(rng, rows, pair[1]))
    runs, seen, found = head.totals.array[0]
    assert (runs, seen) == (4, 4 * rows)
    assert 0 < found < 0.5 * 4 * rows * head.outputs  # outputs that were computed: it does screen


@pytest.mark.parametrize("kind", SIZES)
def test_formats(backend: CpuBackend, kind: str) -> None:
    rng = np.random.default_rng(3)
    head = Head(backend, *(pair := natural(rng, 1003)), kind)
    for rows in (1, 3, 9):
        head.same(activations(rng, rows, pair[1]))


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets(isa: str) -> None:
    rng = np.random.default_rng(4)
    head = Head(machine(isa).backend, *(pair := natural(rng, 1003)))
    for rows in (1, 4):
        head.same(activations(rng, rows, pair[1]))


@pytest.mark.parametrize("outputs", [1, 7, 8, 9, 15, 16, 17, 24, 1000])
@pytest.mark.parametrize("inputs", [64, 96, 288, 320])
def test_odd_shapes(backend: CpuBackend, outputs: int, inputs: int) -> None:
    rng = np.random.default_rng(outputs)
    head = Head(backend, *(pair := natural(rng, outputs, inputs)))
    for rows in (1, 2, 11):
        head.same(activations(rng, rows, pair[1]))


def equal(rows: Floats, rng: np.random.Generator) -> None:
    rows[:] = rows[0]


def twins(rows: Floats, rng: np.random.Generator) -> None:
    rows[rng.permutation(len(rows))[: len(rows) // 2]] = rows[rng.integers(len(rows))]


def whole_numbers(rows: Floats, rng: np.random.Generator) -> None:
    rows[:] = rng.integers(-1, 2, rows.shape)


def huge_norms(rows: Floats, rng: np.random.Generator) -> None:
    rows[::97] *= 1e4


def tiny_norms(rows: Floats, rng: np.random.Generator) -> None:
    rows[::2] *= 1e-4


def nothing(rows: Floats, rng: np.random.Generator) -> None:
    rows[:] = 0


def spikes(rows: Floats, rng: np.random.Generator) -> None:
    rows[np.arange(len(rows)), rng.integers(0, rows.shape[1], len(rows))] = 40


@pytest.mark.parametrize(
    "change", [equal, twins, whole_numbers, huge_norms, tiny_norms, nothing, spikes]
)
def test_unkind_heads(backend: CpuBackend, change) -> None:
    """Ties go to the lowest id, and rows that the coarse form fits badly are found too."""
    rng = np.random.default_rng(5)
    rows, norm = natural(rng, 1100)
    change(rows, rng)
    head = Head(backend, rows, norm)
    for scale in (1.0, 1e-3, 1e4):
        head.same((activations(rng, 4, norm) * scale).astype(np.float32))
    signs = np.sign(activations(rng, 4, norm))
    head.same(signs)


@pytest.mark.parametrize(
    "value", [0.0, np.nan, np.inf, -np.inf, 1e30, 1e16, 1e-20, 1e-38, 3e38], ids=str
)
def test_unkind_activations(backend: CpuBackend, value: float) -> None:
    """One such number or a whole row of them: what is no number is reported as by the whole product."""
    rng = np.random.default_rng(6)
    head = Head(backend, *(pair := natural(rng, 1100)))
    x = activations(rng, 6, pair[1])
    x[1, 7] = value
    x[3] = value
    x[4] = value * np.sign(x[4])
    head.same(x)


def test_a_head_that_cannot_be_bounded(backend: CpuBackend) -> None:
    rng = np.random.default_rng(7)
    for value in (np.nan, np.inf, 1e20, 1e38):
        rows, norm = natural(rng, 600)
        rows[411, 33] = value
        assert Head(backend, rows, norm, "F32").coarse is None


def test_bounds_hold_and_are_reached() -> None:
    """Of activations at random, and of those that the bound of one output is made of."""
    rng = np.random.default_rng(8)
    rows, norm = natural(rng, 700)
    head = Head(machine().backend, rows, norm, "F32")
    coarse, order = head.coarse, head.coarse.order
    exact = head.exact.astype(np.float64)
    straight = np.outer(coarse.along[:700].astype(np.float64), coarse.direction)
    left = exact[:, order] - straight - parts(coarse)
    shares = np.repeat(coarse.shares[0].astype(np.float64), 64)
    nearest = 0.0
    for output in (0, 99, 350, 699):
        worst = np.zeros(INPUTS)
        worst[order] = left[output] / shares
        x = np.stack([worst, -worst, *(worst * s for s in (1e-6, 1e6))]).astype(np.float32)
        x = np.concatenate([x, activations(rng, 40, norm)])
        logits, bound = product(coarse, x)
        off = np.abs(logits - x.astype(np.float64) @ exact.T)
        assert (off <= bound).all()
        nearest = max(nearest, (off / bound)[0, output])
    assert nearest > 0.8


def test_the_kernel_has_the_coarse_product(backend: CpuBackend) -> None:
    rng = np.random.default_rng(9)
    head = Head(backend, *(pair := natural(rng, 777)))
    x = activations(rng, 5, pair[1])
    act = backend.activation(5, INPUTS, quantised=True)
    act.f32.array[:] = x
    logits, out = (
        backend.buffer(5, head.weight.padded_outputs),
        backend.buffer(5, 2, np.int64),
    )
    recorder = backend.recorder(5)
    quantise(recorder, act)
    screen(recorder, act, head.weight, head.coarse, logits, out, head.totals, head.outputs)
    recorder.finish().replay()
    wanted, bound = product(head.coarse, head.seen(x))
    off = np.abs(logits.array[:, :777] - wanted)
    assert (off <= 0.01 * bound).all()


def test_what_is_not_screened() -> None:
    reason = partial(why_not, outputs=49152, inputs=576)
    assert reason("cpu", "Q8_0") is None and reason("cpu", "Q6_K") is None
    assert reason("cpu", "BF16") is None
    assert "4 bits" in str(reason("cpu", "Q4_0")) and "5 bits" in str(reason("cpu", "Q5_K"))
    assert "cuda" in str(reason("cuda", "Q8_0"))
    assert "small" in str(why_not("cpu", "Q8_0", 256, 64))
