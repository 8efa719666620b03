"""The encoders of K formats: layout, error, and blocks at the edges of what can be stored."""

import gguf
import numpy as np
import pytest

from sparkinfer.quant.encode import quantize
from sparkinfer.quant.formats import QUANT_FORMATS, dequantize, unpack

KINDS = ("Q4_K", "Q6_K")
# Mean square error over mean square, of the rows below encoded by llama.cpp's ggml_quantize_chunk (0.3.36, no weights).
GGML = {
    ("normal", "Q4_K"): 5.101e-3,
    ("normal", "Q6_K"): 3.143e-4,
    ("heavy", "Q4_K"): 7.461e-3,
    ("heavy", "Q6_K"): 5.244e-4,
    ("positive", "Q4_K"): 2.509e-3,
    ("positive", "Q6_K"): 4.011e-4,
}


def rows_of(name: str) -> np.ndarray:
    random = np.random.default_rng(0)
    shape = (512, 1024)
    normal = random.standard_normal(shape) * random.gamma(1, 1, (512, 1)) * 0.02
    heavy = (random.standard_t(4, shape) * 0.02).astype(np.float32)
    kinds = {"normal": normal, "heavy": heavy, "positive": np.abs(heavy) + np.float32(0.01)}
    return kinds[name].astype(np.float32)


def encoded(kind: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks, and what they decode to in the shape of the rows."""
    blocks = quantize(kind, rows)
    assert blocks.shape == (rows.size // 256, QUANT_FORMATS[kind].block_bytes)
    return blocks, dequantize(kind, blocks).reshape(rows.shape)


@pytest.mark.parametrize(("name", "kind"), GGML)
def test_the_error_is_below_that_of_llama_cpp(name: str, kind: str) -> None:
    rows = rows_of(name)
    _, back = encoded(kind, rows)
    assert np.square(back - rows).mean() / np.square(rows).mean() < GGML[name, kind]


@pytest.mark.parametrize("kind", KINDS)
def test_another_decoder_reads_the_same(kind: str) -> None:
    rows = rows_of("heavy")[:64]
    blocks, back = encoded(kind, rows)
    other = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(rows.shape)
    assert np.array_equal(back, other)


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_is_near(kind: str) -> None:
    """No code lands in another value's place: each error is a small share of the largest value of its group."""
    rows = rows_of("normal")
    rows = rows[
        np.abs(rows).max(1) > 2e-3
    ]  # smaller ones have a float16 scale without all its bits
    _, back = encoded(kind, rows)
    size = 32 if kind == "Q4_K" else 16
    peak = np.abs(rows.reshape(-1, size)).max(1, keepdims=True)
    share = {"Q4_K": 0.2, "Q6_K": 0.2}[kind]  # half a step, and what cutting the range costs
    errors = np.abs(back - rows).reshape(-1, size)
    block_peak = np.abs(rows.reshape(-1, 256)).max(1).repeat(256 // size)[:, None]
    # A group far below the largest of its block has a coarse scale, which adds to that.
    assert (errors <= share * peak + block_peak / 120).all()


def test_exact_where_the_format_is_exact() -> None:
    random = np.random.default_rng(1)
    scales, lows = random.integers(1, 64, (40, 8, 1)), random.integers(0, 64, (40, 8, 1))
    scales[:, 0], lows[:, 1] = 63, 63  # the largest of a block fix its two float16 scales
    codes = random.integers(0, 16, (40, 8, 32))
    codes[..., 0], codes[..., 1] = 0, 15
    rows = (2.0**-9 * scales * codes - 2.0**-7 * lows).astype(np.float32).reshape(40, 256)
    _, back = encoded("Q4_K", rows)
    assert np.array_equal(back, rows)
    sixes = random.integers(-32, 32, (40, 16, 16))
    sixes[..., 0] = -32
    steps = random.integers(1, 128, (40, 16, 1))
    steps[:, 3] = -128
    rows = (2.0**-9 * steps * sixes).astype(np.float32).reshape(40, 256)
    _, back = encoded("Q6_K", rows)
    assert np.array_equal(back, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_constant_zero_and_one_sided_rows(kind: str) -> None:
    rows = np.zeros((4, 256), np.float32)
    rows[1], rows[2] = 0.5, -0.25
    rows[3, 100] = 3.0
    blocks, back = encoded(kind, rows)
    assert not back[0].any()
    assert np.abs(back[1:] - rows[1:]).max() < 0.02
    assert unpack(kind, blocks).q.max() < (16 if kind == "Q4_K" else 64)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_many_blocks_are_encoded_one_by_one(kind: str) -> None:
    """The order and the number of blocks encoded at a time do not matter."""
    rows = rows_of("normal").reshape(-1, 256)
    rows = np.concatenate([rows, rows])[:2500]
    whole = quantize(kind, rows)
    assert np.array_equal(quantize(kind, rows[2040:2060]), whole[2040:2060])
