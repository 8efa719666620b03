"""Triton forms of rope and attention on a q8_0 cache.

Tolerance, on the numbers that the kernels read: 3e-6 of the largest value (few rows), 2e-3 (many rows).
"""

import gpu_machine as gpu
import gpu_state
import numpy as np
import pytest
import q8_cache
import torch
from kernel_machine import assert_close, random_rows, same_bits

from sparkinfer.kernels.attention import attention
from sparkinfer.kernels.attention.reference import attention as reference
from sparkinfer.kernels.attention.reference import visible
from sparkinfer.kernels.rope import cache_rows, rope
from sparkinfer.kernels.rope.reference import angles, factors
from sparkinfer.kernels.shapes import Heads
from sparkinfer.state.kv_cache import KvShape

LAYER, LAYERS, EPS = 1, 2, 1e-6


def shape_of(heads, kv_heads, size, *, gated=False, causal=True, window=0):
    return Heads(LAYER, heads, kv_heads, size, size, False, gated, EPS, causal, window)


class Memory:
    """A random cache; what lies beyond a length has keys that are no numbers and large values."""

    def __init__(self, kv_heads, size, context, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.context = -(-context // 32) * 32
        self.k, self.v = torch.randn((2, kv_heads, self.context, size), generator=generator)
        self.hidden_from = None
        (self.k_codes, self.k_scales) = q8_cache.quantise(self.k)
        (self.v_codes, self.v_scales) = q8_cache.quantise(self.v)
        assert KvShape(1, 1, size, "q8_0").plane_bytes(context) == self.context * size // 16 * 17

    def numbers(self):
        """Keys and values [positions, kv heads, size] as the kernels read them."""
        both = (
            q8_cache.read(self.k_codes, self.k_scales),
            q8_cache.read(self.v_codes, self.v_scales),
        )
        return [x.numpy().transpose(1, 0, 2) for x in both]

    def words(self, length):
        k_scales, v_scales = self.k_scales.clone(), self.v_scales.clone()
        k_scales[:, length:] = float("nan")
        v_scales[:, length:] = 500.0
        self.planes = []
        for codes, scales, values in (
            (self.k_codes, k_scales, False),
            (self.v_codes, v_scales, True),
        ):
            plane = q8_cache.planes(codes, scales, values=values)
            whole = torch.full((LAYERS, *plane.shape), 255, dtype=torch.uint8)
            whole[LAYER] = plane
            self.planes.append(whole.to(gpu.backend().device))
        keys, values = self.planes
        return {
            "keys": keys.data_ptr(), "values": values.data_ptr(), "head_bytes": keys.shape[-1],
        }  # fmt: skip


def run(memory, shape, position, q, gate=None, *, first=0, first_row=0, of_rows=None, length=None):
    """Rows x heads x size."""
    rows, width = len(q), shape.heads * shape.head_size
    out = gpu.blank_activation(rows, width, quantised=False)
    words = memory.words(position + (of_rows or rows) if length is None else length)
    params = gpu_state.params(position=position, first=first, **words)
    pairs = None if gate is None else np.stack([np.full_like(gate, np.nan), gate], axis=2)
    gates = None if pairs is None else gpu.filled(pairs.reshape(rows, 2 * width))
    recorder = gpu_state.recorder(rows, cache_format="q8_0")
    attention(
        recorder, gpu.filled(q.reshape(rows, width)), shape, params, gates, out, memory.context,
        first_row=first_row, of_rows=of_rows,
    )  # fmt: skip
    gpu.run(recorder)
    return gpu.host(out.f32).reshape(rows, shape.heads, -1)


@pytest.fixture
def programs(monkeypatch):
    """Few multiprocessors: a program has several units."""
    monkeypatch.setattr(gpu.backend(), "sms", 2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "length", "rows"),
    [
        (4, 2, 128, 70, 3),
        (2, 1, 256, 33, 2),
        (16, 2, 256, 70, 3),
        (16, 4, 256, 33, 2),
        (32, 8, 128, 20, 2),
        (9, 3, 64, 17, 3),
        (9, 3, 64, 40, 16),
        (2, 1, 96, 40, 4),
        (4, 2, 32, 64, 6),
        (4, 1, 128, 1, 1),
        (4, 1, 128, 193, 16),
    ],
)
def test_few_rows(heads, kv_heads, size, length, rows, programs):
    """Right on the numbers as they are read, and row for row what single rows are."""
    gated = heads % 8 == 0
    shape, memory = (
        shape_of(heads, kv_heads, size, gated=gated),
        Memory(kv_heads, size, length + 5),
    )
    rng = np.random.default_rng(1)
    q, gate = (2 * rng.standard_normal((2, rows, heads, size))).astype(np.float32)
    gate = gate if gated else None
    got = run(memory, shape, length - rows, q, gate)
    k, v = (x[:length] for x in memory.numbers())
    assert_close(got, reference(q, k, v, gate), np.abs(v).max(), 3e-6)
    for r in {0, rows - 1}:
        one = slice(r, r + 1)
        part = None if gate is None else gate[one]
        alone = run(memory, shape, length - rows + r, q[one], part)
        same_bits(got[one], alone, f"row {r} of {rows} at length {length}")


def test_rows_on_both_sides_of_a_unit(programs):
    shape, memory = shape_of(2, 1, 128), Memory(1, 128, 300)
    for position in (30, 63):
        q = random_rows(3, 256).reshape(3, 2, 128)
        got = run(memory, shape, position, q)
        for r in range(3):
            same_bits(run(memory, shape, position + r, q[r : r + 1]), got[r : r + 1])


@pytest.mark.parametrize(
    ("size", "causal", "window"), [(128, True, 40), (64, False, 70), (128, False, 0)]
)
def test_masks_of_a_block(size, causal, window, programs):
    """Non-causal blocks, sliding windows and missing rows; what no row sees is no number."""
    shape = shape_of(2, 1, size, causal=causal, window=window)
    for length, rows, first in ((160, 5, 0), (160, 5, 60), (90, 20, 33)):
        memory = Memory(1, size, length, seed=length)
        seen = visible(length - rows, rows, causal=causal, window=window, first=first)
        unseen = torch.from_numpy(~seen.any(axis=0))
        memory.k_scales[:, :length][:, unseen] = float("nan")
        memory.v_scales[:, :length][:, unseen] = 500.0
        k, v = (np.nan_to_num(x[:length]) for x in memory.numbers())
        q = random_rows(rows, 2 * size).reshape(rows, 2, size)
        got = run(memory, shape, length - rows, q, first=first)
        wanted = reference(q, k, v, causal=causal, window=window, first=first)
        assert_close(got, wanted, 4.0, 3e-6 if rows <= 16 else 2e-3)


@pytest.mark.parametrize(("size", "rows"), [(128, 3), (64, 3), (128, 20)])
def test_a_later_key_that_is_no_number_does_not_reach_an_earlier_row(size, rows):
    shape, memory = shape_of(2, 1, size), Memory(1, size, 16 + rows)
    memory.k_scales[:, 17:, 0] = float("nan")
    q = random_rows(rows, 2 * size).reshape(rows, 2, size)
    got = run(memory, shape, 16, q)
    k, v = (x[:17] for x in memory.numbers())
    assert_close(got[:1], reference(q[:1], k, v), 4.0, 3e-6 if rows <= 16 else 2e-3)
    assert np.isnan(got[1:]).all()


def test_some_rows_of_a_run():
    shape, memory = shape_of(2, 1, 128), Memory(1, 128, 80)
    q = random_rows(4, 256).reshape(4, 2, 128)
    whole = run(memory, shape, 62, q)
    part = run(memory, shape, 62, q[2:], first_row=2, of_rows=4)
    same_bits(part, np.ascontiguousarray(whole[2:]))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(2, 1, 128), (1, 1, 256), (3, 1, 64)])
def test_many_rows(heads, kv_heads, size):
    shape, rng = shape_of(heads, kv_heads, size), np.random.default_rng(1)
    for length, rows in ((17, 17), (90, 33)):
        memory = Memory(kv_heads, size, length)
        q = rng.standard_normal((rows, heads, size)).astype(np.float32)
        got = run(memory, shape, length - rows, q)
        k, v = (x[:length] for x in memory.numbers())
        assert_close(got, reference(q, k, v), np.abs(v).max(), 2e-3)


def stored(shape, position, k, v, *, cache_format, context=96):
    """The cache's keys and values after `rope` wrote these rows, all layers; bytes that were 255 before, or float32."""
    rows, size = len(k), shape.head_size
    cache = KvShape(LAYERS, shape.kv_heads, size, cache_format)
    keys, values = (
        torch.full((LAYERS, shape.kv_heads, cache.plane_bytes(context)), 255, dtype=torch.uint8,
                   device=gpu.backend().device)
        for _ in range(2)
    )  # fmt: skip
    table = gpu.filled(factors(angles(context, shape.rotated, 10000.0), shape.interleaved))
    params = gpu_state.params(
        position=position, keys=keys.data_ptr(), values=values.data_ptr(), head_bytes=keys.shape[-1]
    )
    recorder = gpu_state.recorder(rows, cache_format=cache_format)
    inputs = [gpu.filled(x.reshape(rows, -1)) for x in (k, v)]
    norm = gpu.filled(random_rows(1, size, seed=5))
    if rows == 1:
        cache_rows(recorder, *inputs, shape, table, params, norm)
    else:
        q = gpu.filled(np.zeros((rows, shape.heads * size), np.float32))
        rope(recorder, q, *inputs, shape, table, params, gpu.blank(*q.array.shape), norm, norm)
    gpu.run(recorder)
    return keys.cpu(), values.cpu()


@pytest.mark.parametrize("size", [32, 64, 96, 128, 256])
def test_rope_writes_blocks(size):
    """The blocks of what a float32 cache would hold, where the layout says, and nothing else."""
    shape, context = shape_of(2, 2, size), 96
    for position, rows in ((0, 1), (29, 18)):
        k, v = np.random.default_rng(size).standard_normal((2, rows, 2, size)).astype(np.float32)
        v[0, 0] *= 1e-3
        v[0, 1, :32] = 0
        wide = stored(shape, position, k, v, cache_format="f32")
        got = stored(shape, position, k, v, cache_format="q8_0")
        for plane, exact, values in zip(got, wide, (False, True), strict=True):
            here = slice(position, position + rows)
            numbers = exact[LAYER].view(torch.float32).reshape(2, context, size)[:, here]
            wanted_codes, wanted_scales = q8_cache.quantise(numbers)
            codes, scales = q8_cache.parts(plane[LAYER], size, values=values)
            assert torch.equal(codes[:, here].int() - 128, wanted_codes)
            assert torch.equal(scales[:, here], wanted_scales)
            others = [i for i in range(context) if not position <= i < position + rows]
            assert (codes[:, others] == 255).all()
            assert (scales.view(torch.int16)[:, others] == -1).all()
            assert (plane[0] == 255).all()


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_values_that_are_no_numbers_poison_their_key_and_nothing_else(size, bad):
    shape, context = shape_of(2, 2, size), 32
    k, v = np.random.default_rng(1).standard_normal((2, 4, 2, size)).astype(np.float32)
    v[2, 1, 7] = bad
    k[3, 0, 40] = bad
    keys, values = stored(shape, 10, k, v, cache_format="q8_0", context=context)
    codes, scales = {}, {}
    for name, plane in (("keys", keys[LAYER]), ("values", values[LAYER])):
        found, scales[name] = q8_cache.parts(plane, size, values=name == "values")
        codes[name] = found.int() - 128
    assert scales["keys"][1, 12].isnan().all() and (codes["keys"][1, 12] == 0).all()
    assert (scales["values"][1, 12] == 0).all() and (codes["values"][1, 12] == 0).all()
    # The norm brings a large key back to numbers that fit.
    assert scales["keys"][0, 13].isnan().any() == (not np.isfinite(bad))
    assert scales["keys"][0, 10:13].isfinite().all() and scales["values"][:, 10:14].isfinite().all()
    assert scales["keys"][1, [10, 11, 13]].isfinite().all()
