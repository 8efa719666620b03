"""The largest logit of every row, found by the product that writes them, and in a row that the host reads."""

import numpy as np
import pytest

from sparkinfer.backend.cpu import CpuBackend
from sparkinfer.backend.isa import choose_isa
from sparkinfer.kernels.argmax import argmax
from sparkinfer.kernels.argmax.cpu_impl import largest
from sparkinfer.kernels.argmax.reference import argmax as expected
from sparkinfer.kernels.linear import linear, pack_weight

STRANGE = (np.nan, np.inf, -np.inf)


def spoiled(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """With ties, and something that is no number in every third row."""
    values = np.round(values)
    for row in values[::3]:
        row[rng.integers(len(row))] = rng.choice(STRANGE)
    return values


@pytest.mark.parametrize("n_vocab", [1, 15, 16, 40, 1024, 1030, 5003])
def test_rows_of_a_buffer(n_vocab: int) -> None:
    backend, rng = CpuBackend(choose_isa("auto"), 2), np.random.default_rng(n_vocab)
    rows = 7
    logits = backend.buffer(rows, n_vocab + 9)  # padding that would win
    logits.array[:] = 1e6
    logits.array[:, :n_vocab] = spoiled(rng.normal(0, 2, (rows, n_vocab)), rng)
    out = backend.buffer(rows, 2, np.int64)
    recorder = backend.recorder(rows)
    argmax(recorder, logits, out, n_vocab)
    recorder.finish().replay()
    wanted = expected(logits.array, n_vocab)
    finite = wanted[:, 1] == 1
    assert (out.array[:, 1] == wanted[:, 1]).all()
    assert (out.array[finite, 0] == wanted[finite, 0]).all()
    assert ((out.array[:, 0] >= 0) & (out.array[:, 0] < n_vocab)).all()
    backend.close()


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("outputs", [24, 3000])
def test_joined_with_the_product(rows: int, outputs: int) -> None:
    backend, rng = CpuBackend(choose_isa("auto"), 2), np.random.default_rng(rows)
    matrix = rng.normal(0, 1, (outputs, 64)).astype(np.float32)
    weight = pack_weight(backend, "F32", matrix.view(np.uint8).reshape(-1, 4), outputs, 64)
    x = backend.activation(rows, 64, quantised=False)
    x.f32.array[:] = rng.normal(0, 1, (rows, 64))
    logits = backend.buffer(rows, weight.padded_outputs)
    out = backend.buffer(rows, 2, np.int64)
    recorder = backend.recorder(rows)
    linear(recorder, x, [weight], [logits])
    argmax(recorder, logits, out, outputs)
    assert len(recorder.phases) == 2
    recorder.finish().replay()
    np.testing.assert_allclose(logits.array[:, :outputs], x.f32.array @ matrix.T, atol=1e-4)
    assert (out.array == expected(logits.array, outputs)).all()
    backend.close()


@pytest.mark.parametrize("size", [1, 15, 16, 1023, 1024, 1041, 50000])
def test_one_row(size: int) -> None:
    rng = np.random.default_rng(size)
    row = np.round(rng.normal(0, 2, size)).astype(np.float32)
    assert largest(row) == (int(row.argmax()), True)
    for strange in STRANGE:
        row[rng.integers(size)] = strange
        assert largest(row)[1] is False
