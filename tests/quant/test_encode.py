"""Encoders against the gguf package's own, bit for bit."""

import gguf
import numpy as np
import pytest

from sparkinfer.errors import UnsupportedError
from sparkinfer.quant.encode import ENCODERS, quantize
from sparkinfer.quant.formats import QUANT_FORMATS, dequantize

# Largest error of a value, as a share of its block's largest magnitude.
PLAIN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")  # what the gguf package can encode
WORST = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 1 / 240, "Q4_0": 1 / 7, "Q4_1": 1 / 14}


def values() -> np.ndarray:
    random = np.random.default_rng(0)
    rows = (random.standard_normal((200, 96)) * random.gamma(1, 1, (200, 1))).astype(np.float32)
    rows[3] = 0
    rows[4] = 1
    rows[5, :6] = [-8, 8, 0.5, 1.5, -0.5, -1.5]
    rows[6, :32] = np.linspace(0, 1, 32)
    rows[7] *= 1e-6
    return rows


@pytest.mark.parametrize("kind", PLAIN)
def test_bits_of_the_reference(kind: str) -> None:
    rows = values()
    reference = gguf.quantize(rows, gguf.GGMLQuantizationType[kind])
    wanted = np.ascontiguousarray(reference).view(np.uint8).reshape(-1)
    assert np.array_equal(quantize(kind, rows).reshape(-1), wanted)


@pytest.mark.parametrize("kind", PLAIN)
def test_errors_are_bounded(kind: str) -> None:
    rows = values()[:7]
    blocks = quantize(kind, rows)
    assert blocks.shape[1] == QUANT_FORMATS[kind].block_bytes
    back = dequantize(kind, blocks).reshape(-1, 32)
    peak = np.abs(rows.reshape(-1, 32)).max(1, keepdims=True)
    assert (np.abs(back - rows.reshape(-1, 32)) <= peak * WORST[kind] * 1.01).all()


def test_a_fitted_block_is_closer() -> None:
    rows = values()
    plain, fitted = (
        np.square(dequantize("Q4_1", quantize("Q4_1", rows, fit=fit)).reshape(rows.shape) - rows)
        for fit in (False, True)
    )
    by_block = [error.reshape(-1, 32).sum(1) for error in (plain, fitted)]
    assert (by_block[1] <= by_block[0] * 1.001 + 1e-12).all()
    assert fitted.sum() < 0.9 * plain.sum()


def test_what_cannot_be_written() -> None:
    assert set(PLAIN) < set(ENCODERS)
    with pytest.raises(UnsupportedError, match=r"Q5_K.*accepted: F32"):
        quantize("Q5_K", values())
    with pytest.raises(UnsupportedError, match="multiple of 256"):
        quantize("Q4_K", np.zeros((2, 128), np.float32))
    with pytest.raises(UnsupportedError, match="multiple of 32"):
        quantize("Q8_0", np.zeros((2, 40), np.float32))
