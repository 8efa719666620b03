"""The numpy decoders against the PyPI `gguf` package, and the tables of formats."""

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from sparkinfer.errors import UnsupportedError
from sparkinfer.quant import formats
from sparkinfer.quant.formats import KNOWN_TYPES, QUANT_FORMATS, dequantize, unpack

CODED = [name for name, spec in QUANT_FORMATS.items() if spec.module is not None]
SPECIAL_HALVES = np.array(
    [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00, 0xBC00, 0x2E66],
    np.uint16,
)


def random_blocks(name: str, n_blocks: int, seed: int) -> np.ndarray:
    """Random bits; float16 fields finite, every third one a special value (zeros, subnormals,
    extremes, negatives).
    """
    rng = np.random.default_rng(seed)
    spec = QUANT_FORMATS[name]
    blocks = rng.integers(0, 256, (n_blocks, spec.block_bytes), np.uint8)
    for offset in spec.halves:
        bits = rng.integers(0, 1 << 16, n_blocks, np.uint16)
        bits[(bits & 0x7C00) == 0x7C00] ^= 0x4000
        bits[::3] = rng.choice(SPECIAL_HALVES, len(bits[::3]))
        blocks[:, offset : offset + 2] = bits[:, None].view(np.uint8)
    blocks.flags.writeable = False  # as a mapped file
    return blocks


def oracle(name: str, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return gguf.quants.dequantize(blocks, GGMLQuantizationType[name]).reshape(len(blocks), -1)


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == theirs.dtype == np.float32
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", QUANT_FORMATS)
@pytest.mark.parametrize("n_blocks", [1, 7, 3000])
def test_dequantize_has_the_oracles_bits(name: str, n_blocks: int) -> None:
    blocks = random_blocks(name, n_blocks, seed=n_blocks)
    assert_same_bits(dequantize(name, blocks), oracle(name, blocks))


@pytest.mark.parametrize("name", CODED)
def test_every_byte_value_at_every_place(name: str) -> None:
    spec = QUANT_FORMATS[name]
    blocks = np.zeros((256, spec.block_bytes), np.uint8) + np.arange(256, dtype=np.uint8)[:, None]
    blocks[:, list(spec.halves)] = 0x66
    blocks[:, [offset + 1 for offset in spec.halves]] = 0x2E
    assert_same_bits(dequantize(name, blocks), oracle(name, blocks))
    for place in range(0, spec.block_bytes, 3):
        single = np.full((256, spec.block_bytes), 0x21, np.uint8)
        single[:, place] = np.arange(256)
        finite = np.isfinite(oracle(name, single)).all(axis=1)
        assert_same_bits(dequantize(name, single[finite]), oracle(name, single[finite]))


@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_non_finite_scales_stay_non_finite(name: str) -> None:
    blocks = random_blocks(name, 64, seed=5).copy()
    for offset in QUANT_FORMATS[name].halves:
        blocks[::2, offset : offset + 2] = np.frombuffer(b"\x00\x7c", np.uint8)
    with np.errstate(invalid="ignore"):
        ours, theirs = dequantize(name, blocks), oracle(name, blocks)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", CODED)
def test_codes_rebuild_the_weights(name: str) -> None:
    """The contract a kernel relies on, written out here on its own: exact, not to a tolerance."""
    blocks = random_blocks(name, 500, seed=11)
    codes = unpack(name, blocks)
    groups = QUANT_FORMATS[name].block_size // codes.group_size
    scale = codes.d.astype(np.float32)[:, None]
    if codes.scales is not None:
        assert codes.scales.dtype == np.int8 and codes.scales.shape == (500, groups)
        scale = scale * codes.scales.astype(np.float32)
    scale = np.broadcast_to(scale, (500, groups)).repeat(codes.group_size, axis=1)
    weights = scale * (codes.q.astype(np.int32) - codes.zero).astype(np.float32)
    if codes.mins is not None:
        assert codes.m is not None and codes.mins.dtype == np.uint8
        dmin = codes.m.astype(np.float32)[:, None] * codes.mins.astype(np.float32)
        weights = weights - dmin.repeat(codes.group_size, axis=1)
    elif codes.m is not None:
        weights = weights + codes.m.astype(np.float32)[:, None]
    assert_same_bits(weights, oracle(name, blocks))


@pytest.mark.parametrize("name", CODED)
def test_chunks_equal_one_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(name, 1000, seed=3)
    whole = unpack(name, blocks)
    monkeypatch.setattr(formats, "CHUNK_VALUES", 256 * 7)
    parts = unpack(name, blocks)
    for field in ("q", "d", "m", "scales", "mins"):
        np.testing.assert_array_equal(getattr(parts, field), getattr(whole, field))
    assert (parts.zero, parts.group_size) == (whole.zero, whole.group_size)


@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_no_blocks(name: str) -> None:
    spec = QUANT_FORMATS[name]
    assert dequantize(name, np.empty((0, spec.block_bytes), np.uint8)).shape == (0, spec.block_size)


def test_known_types_agree_with_the_oracle() -> None:
    for kind, (block_size, block_bytes) in GGML_QUANT_SIZES.items():
        assert KNOWN_TYPES[kind.value] == (kind.name, block_size, block_bytes)


@pytest.mark.parametrize("name", ["IQ1_S", "Q9_9", ""])
def test_unknown_format_lists_the_known_ones(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"Q4_K, Q5_K, Q6_K"):
        dequantize(name, np.empty((1, 4), np.uint8))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_floats_have_no_codes(name: str) -> None:
    with pytest.raises(UnsupportedError, match="no integer codes"):
        unpack(name, np.zeros((1, QUANT_FORMATS[name].block_bytes), np.uint8))
