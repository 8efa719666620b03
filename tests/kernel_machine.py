"""A CPU backend with filled and NaN-filled buffers, random weights of every format, and bit patterns to compare."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkinfer.backend.base import Activation, Arena, Buffer, CacheFormat
from sparkinfer.backend.compiled import set_cache_root
from sparkinfer.backend.cpu import CpuBackend, CpuRecorder
from sparkinfer.backend.isa import choose_isa
from sparkinfer.errors import OptionError
from sparkinfer.kernels import run_params as P
from sparkinfer.kernels.linear.weights import PackedWeight, pack_weight
from sparkinfer.options import resolve
from sparkinfer.quant.formats import QUANT_FORMATS, dequantize
from sparkinfer.quant.tiles import LAYOUTS

Floats = NDArray[np.float32]
ISAS = ("vnni512", "avx2", "portable")
set_cache_root(resolve({}).path("cache_dir"))


class Machine:
    """One backend. Every buffer that an op writes starts as NaN."""

    def __init__(self, isa: str, threads: int, cache_format: CacheFormat) -> None:
        self.backend = CpuBackend(choose_isa(isa), threads)
        self.cache_format = cache_format
        self.arena = Arena()

    def filled(self, values: Any) -> Buffer:
        values = np.atleast_2d(values)
        buffer = self.backend.buffer(*values.shape, values.dtype)
        buffer.array[:] = values
        return buffer

    def blank(self, rows: int, width: int) -> Buffer:
        return self.filled(np.full((rows, width), np.nan, np.float32))

    def input(self, x: Floats, quantised: bool) -> Activation:
        """The activation an op reads: float32 rows and, written here by numpy, their int8 blocks."""
        act = self.blank_activation(*x.shape, quantised=quantised)
        act.f32.array[:] = x
        if quantised:
            memory(act.q8, x.size // 32 * 48)[:] = int8_blocks(x)
        return act

    def blank_activation(
        self, rows: int, width: int, *, quantised: bool, private: bool = False
    ) -> Activation:
        act = self.backend.activation(rows, width, quantised=quantised, private=private)
        act.f32.array[:] = np.nan
        if act.q8 is not None:
            memory(act.q8, rows * width // 32 * 48)[:] = 255
        return act

    def run(self, rows: int, record: Callable[[CpuRecorder], None], times: int = 1) -> None:
        recorder = self.backend.recorder(rows, self.cache_format)
        record(recorder)
        tape = recorder.finish()
        for _ in range(times):
            tape.replay()

    def params(self, **words: int) -> Buffer:
        """Run parameters by their names in `run_params`, lower case."""
        values = np.zeros((1, P.WORDS), np.int64)
        for name, value in words.items():
            values[0, getattr(P, name.upper()) // 8] = value
        return self.filled(values)

    def weight(
        self, format_name: str, outputs: int, inputs: int, seed: int = 0, experts: int = 1
    ) -> tuple[PackedWeight, Floats]:
        """A random packed weight and its values, [outputs, inputs] or [experts, outputs, inputs]."""
        blocks = random_blocks(format_name, experts * outputs * inputs, seed)
        lanes = self.backend.isa.lanes
        packed = pack_weight(format_name, blocks, outputs, inputs, lanes, self.arena, experts)
        values = np.asarray(dequantize(format_name, blocks), np.float32)
        return packed, values.reshape((experts,) * (experts > 1) + (outputs, inputs))


@functools.cache
def machine(isa: str = "auto", threads: int = 1, cache_format: CacheFormat = "f16") -> Machine:
    """The machine of this kind; skips the test, with the reason, when this CPU cannot be it."""
    try:
        return Machine(isa, threads, cache_format)
    except OptionError as error:
        pytest.skip(str(error))


def random_blocks(format_name: str, count: int, seed: int) -> NDArray[np.uint8]:
    """Blocks of `count` values: any bits where all bits are values, small scales of both signs."""
    spec, rng = QUANT_FORMATS[format_name], np.random.default_rng(seed)
    n_blocks = count // spec.block_size
    if LAYOUTS[format_name].floats:
        values = rng.standard_normal(count).astype(np.float32)
        if format_name == "F32":
            return values.view(np.uint8).reshape(n_blocks, -1)
        if format_name == "F16":
            return values.astype(np.float16).view(np.uint8).reshape(n_blocks, -1)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(n_blocks, -1)
    blocks = rng.integers(0, 256, (n_blocks, spec.block_bytes), np.uint8)
    for offset in spec.halves:
        scale = rng.uniform(-0.02, 0.02, n_blocks).astype(np.float16)
        blocks[:, offset : offset + 2] = scale[:, None].view(np.uint8)
    return blocks


def random_rows(rows: int, width: int, seed: int = 0, scale: float = 1.0) -> Floats:
    """Rows of normal values whose sizes differ a hundredfold, a zero block in the first."""
    rng = np.random.default_rng([seed, width])
    values = (scale * rng.standard_normal((rows, width))).astype(np.float32)
    values *= np.float32(10) ** rng.uniform(-1, 1, (rows, 1)).astype(np.float32)
    if width >= 64:
        values[0, 32:64] = 0
    return values


def memory(buffer: Buffer, n_bytes: int) -> NDArray[np.uint8]:
    """The first bytes of a buffer, whatever its rows: int8 blocks are no rows."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(buffer.address))


def int8_blocks(x: Floats) -> NDArray[np.uint8]:
    """The bytes of `Activation.q8` as `backend.base` describes them."""
    rows, width = x.shape
    y = x.reshape(rows, width // 32, 32)
    top = np.abs(y).max(-1)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    codes = np.rint(y * inverse[..., None]).astype(np.int8)
    scale = top / np.float32(127)
    sums = codes.astype(np.int32).reshape(rows, -1, 2, 16).sum(-1, dtype=np.int32)
    total = scale * sums.sum(-1).astype(np.float32)
    parts = []
    for first in range(0, rows, 8):
        group = slice(first, first + 8)
        for block in range(width // 32):
            parts.append(codes[group, block].tobytes())
            for item in (scale, sums[..., 0], sums[..., 1], total):
                parts.append(np.ascontiguousarray(item[group, block]).tobytes())
    return np.frombuffer(b"".join(parts), np.uint8)


def assert_quantised(act: Activation, x: Floats) -> None:
    """The int8 blocks an op wrote are those of the float32 rows `x`, bit for bit."""
    wanted = int8_blocks(x)
    np.testing.assert_array_equal(memory(act.q8, len(wanted)), wanted)


def codes_of(act: Activation, rows: int, width: int) -> tuple[Floats, Floats]:
    """Codes times scales, and the scale of every value, read back from an activation's int8 blocks."""
    raw = memory(act.q8, rows * width // 32 * 48).tobytes()
    values, scales = np.empty((2, rows, width // 32, 32), np.float32)
    at = 0
    for first in range(0, rows, 8):
        n = min(8, rows - first)
        for block in range(width // 32):
            codes = np.frombuffer(raw, np.int8, 32 * n, at).reshape(n, 32)
            d = np.frombuffer(raw, np.float32, n, at + 32 * n)[:, None]
            values[first : first + n, block], scales[first : first + n, block] = codes * d, d
            at += 48 * n
    return values.reshape(rows, width), scales.reshape(rows, width)


def assert_close(got: Floats, wanted: Floats, size: Floats | float, tolerance: float) -> None:
    """|got - wanted| is at most `tolerance` times `size`, the magnitude of the terms that were added."""
    error = np.abs(got.astype(np.float64) - wanted)
    allowed = tolerance * np.broadcast_to(size, wanted.shape) + 1e-30
    bad = ~(error <= allowed)
    if bad.any():
        worst = np.nanmax(np.where(bad, error / allowed, 0)) if np.isfinite(error).all() else np.nan
        raise AssertionError(
            f"{bad.sum()} of {bad.size} values are off, at most {worst:.2f} times the tolerance"
        )


def same_bits(got: NDArray[Any], wanted: NDArray[Any], what: str = "") -> None:
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, (what, got.shape, wanted.shape)
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(wanted).tobytes(), what
