"""Triton forms of attention.

Tolerance, on the keys and values as cached: 3e-6 of the largest value (few rows), 2e-3 (many rows, whose queries and
weights are rounded to float16), 1e-5 (many rows on a float32 cache).
"""

import gpu_machine as gpu
import gpu_state
import numpy as np
import pytest
import torch
from gpu_state import Cache
from kernel_machine import assert_close, random_rows, same_bits

from sparkinfer.kernels.attention import attention, triton_impl
from sparkinfer.kernels.attention.reference import attention as reference
from sparkinfer.kernels.attention.reference import visible
from sparkinfer.kernels.shapes import Heads

CONTEXT, LAYER = 640, 1
TOLERANCE = 3e-6


class Memory:
    """A random cache of two layers. From `length` on, keys and values are NaN."""

    def __init__(self, kv_heads, size, wide, seed=0, context=CONTEXT):
        rng = np.random.default_rng(seed)
        self.wide, self.context = wide, context
        kind = np.float32 if wide else np.float16
        self.all_k, self.all_v = rng.standard_normal((2, context, kv_heads, size)).astype(kind)
        self.cache = Cache(2, kv_heads, context, size, wide=wide)

    def fill(self, length):
        k, v = self.all_k.copy(), self.all_v.copy()
        k[length:] = v[length:] = np.nan
        for target, source in ((self.cache.keys, k), (self.cache.values, v)):
            target[LAYER].copy_(torch.from_numpy(np.ascontiguousarray(source.transpose(1, 0, 2))))
        return k[:length].astype(np.float32), v[:length].astype(np.float32)


def run(
    memory, shape, position, q, gate=None, *, quantised=False, first=0, first_row=0, of_rows=None
):
    """Rows x heads x size, and the activation."""
    rows, width = len(q), shape.heads * shape.head_size
    out = gpu.blank_activation(rows, width, quantised=quantised)
    params = gpu_state.params(position=position, first=first, **memory.cache.words())
    queries = gpu.filled(q.reshape(rows, width))
    pairs = np.stack([np.full_like(gate, np.nan), gate], axis=2) if gate is not None else None
    gates = gpu.filled(pairs.reshape(rows, 2 * width)) if gate is not None else None
    recorder = gpu_state.recorder(rows, cache_format="f32" if memory.wide else "f16")
    attention(
        recorder, queries, shape, params, gates, out, memory.context, first_row=first_row, of_rows=of_rows
    )  # fmt: skip
    gpu.run(recorder)
    return gpu.host(out.f32).reshape(rows, shape.heads, -1), out


def shape_of(heads, kv_heads, size, gated=False, causal=True, window=0):
    return Heads(LAYER, heads, kv_heads, size, size, False, gated, 1e-6, causal, window)


@pytest.fixture(params=[1, 7])
def programs(request, monkeypatch):
    """Multiprocessors that the kernels reckon with: units of positions are dealt out among them."""
    monkeypatch.setattr(gpu.backend(), "sms", request.param)


SHAPES = [
    (2, 2, 16, False),
    (4, 2, 32, True),
    (3, 1, 64, False),
    (16, 2, 48, True),
    (2, 1, 256, True),
]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "gated"), SHAPES)
def test_few_rows(wide, heads, kv_heads, size, gated):
    shape, memory = shape_of(heads, kv_heads, size, gated), Memory(kv_heads, size, wide)
    rng = np.random.default_rng(1)
    for length, rows in ((1, 1), (17, 5), (65, 16), (130, 6)):
        k, v = memory.fill(length)
        q, gate = (2 * rng.standard_normal((2, rows, heads, size))).astype(np.float32)
        gate = gate if gated else None
        got, _ = run(memory, shape, length - rows, q, gate)
        assert_close(got, reference(q, k, v, gate), np.abs(v).max(), TOLERANCE)
        for r in {0, rows // 2, rows - 1}:
            memory.fill(length - rows + r + 1)
            one = slice(r, r + 1)
            part = None if gate is None else gate[one]
            alone, _ = run(memory, shape, length - rows + r, q[one], part)
            same_bits(got[one], alone, f"row {r} of {rows} at length {length}")


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "gated"), SHAPES)
def test_many_rows(wide, heads, kv_heads, size, gated):
    shape, memory = shape_of(heads, kv_heads, size, gated), Memory(kv_heads, size, wide)
    rng = np.random.default_rng(1)
    for length, rows in ((17, 17), (200, 33)):
        k, v = memory.fill(length)
        q, gate = rng.standard_normal((2, rows, heads, size)).astype(np.float32)
        gate = gate if gated else None
        got, _ = run(memory, shape, length - rows, q, gate)
        assert_close(got, reference(q, k, v, gate), np.abs(v).max(), 1e-5 if wide else 2e-3)


def test_rows_of_a_longer_context(programs):
    """Programs take several units each; rows stand on both sides of a unit's end."""
    shape, memory = shape_of(2, 1, 16), Memory(1, 16, False, context=1024)
    for length, rows in ((962, 4), (1000, 3)):
        k, v = memory.fill(length)
        q = random_rows(rows, 32).reshape(rows, 2, 16)
        got, _ = run(memory, shape, length - rows, q)
        assert_close(got, reference(q, k, v), np.abs(v).max(), TOLERANCE)
        memory.fill(length - rows + 1)
        same_bits(run(memory, shape, length - rows, q[:1])[0], got[:1])


@pytest.mark.parametrize("few", [1, 2, 4])
def test_more_partial_results_than_a_merge_takes_at_once(few, monkeypatch):
    """Four programs, of whose results a merge takes two at a time; windows that begin in another program's unit."""
    monkeypatch.setattr(gpu.backend(), "sms", 4)
    monkeypatch.setattr(triton_impl, "MERGE_PARTS", 2)
    monkeypatch.setattr(triton_impl, "MERGE_FEW", few)
    for window, length in ((0, 600), (200, 600), (0, 150)):
        shape = shape_of(2, 1, 32, window=window)
        memory = Memory(1, 32, False)
        k, v = memory.fill(length)
        q = random_rows(3, 64).reshape(3, 2, 32)
        got, _ = run(memory, shape, length - 3, q)
        wanted = reference(q, k, v, causal=True, window=window)
        assert_close(got, wanted, np.abs(v).max(), TOLERANCE)
        for r in range(3):
            memory.fill(length - 2 + r)
            same_bits(run(memory, shape, length - 3 + r, q[r : r + 1])[0], got[r : r + 1])


@pytest.mark.parametrize("size", [16, 32, 48])
def test_the_int8_form(size):
    shape, memory = shape_of(4, 2, size), Memory(2, size, False)
    memory.fill(40)
    q = random_rows(9, 4 * size).reshape(9, 4, size)
    plain, _ = run(memory, shape, 31, q)
    got, out = run(memory, shape, 31, q, quantised=True)
    same_bits(got, plain)
    gpu_state.assert_quantised(out, got.reshape(9, 4 * size))


def test_large_scores_do_not_overflow():
    shape, memory = shape_of(2, 1, 64), Memory(1, 64, True)
    k, v = memory.fill(300)
    q = 100 * random_rows(3, 128).reshape(3, 2, 64)
    assert_close(run(memory, shape, 297, q)[0], reference(q, k, v), np.abs(v).max(), 1e-4)


@pytest.mark.parametrize("rows", [4, 20])
def test_a_later_key_that_is_no_number_does_not_reach_an_earlier_row(rows):
    """A drafted token may overflow where the right one does not. `rope` keeps the values beside such keys finite."""
    shape, memory = shape_of(4, 2, 32), Memory(2, 32, False)
    q = random_rows(rows, 128).reshape(rows, 4, 32)
    k, v = memory.fill(16 + rows)
    memory.all_k[17:] = np.nan
    memory.fill(16 + rows)
    got, _ = run(memory, shape, 16, q)
    tolerance = TOLERANCE if rows <= 16 else 2e-3
    assert_close(got[:1], reference(q[:1], k[:17], v[:17]), np.abs(v).max(), tolerance)
    assert np.isnan(got[1:]).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 40, 64])
def test_masks_of_a_block(causal, window, programs):
    """Non-causal blocks, sliding windows and missing rows, around units."""
    size, kv_heads, heads = 16, 2, 4
    shape = shape_of(heads, kv_heads, size, causal=causal, window=window)
    for length, rows in ((64, 16), (273, 6), (90, 24)):
        for first in {0, 17, 250, length - rows}:
            if first > length - rows:
                continue
            memory = Memory(kv_heads, size, rows > 16, seed=length)
            seen = visible(length - rows, rows, causal=causal, window=window, first=first)
            memory.all_k[:length][~seen.any(axis=0)] = np.nan
            memory.all_v[:length][~seen.any(axis=0)] = np.nan
            k, v = (np.nan_to_num(x) for x in memory.fill(length))
            q = (2 * np.random.default_rng(rows).standard_normal((rows, heads, size))).astype(
                np.float32
            )
            got, _ = run(memory, shape, length - rows, q, first=first)
            wanted = reference(q, k, v, causal=causal, window=window, first=first)
            assert_close(got, wanted, np.abs(v).max(), TOLERANCE if rows <= 16 else 1e-5)


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (False, 40)])
def test_some_rows_of_a_run(causal, window, programs):
    """The last layer of a draft finishes only its slots."""
    rows, position = 16, 200
    shape, memory = shape_of(4, 2, 32, causal=causal, window=window), Memory(2, 32, False)
    memory.fill(position + rows)
    q = random_rows(rows, 128).reshape(rows, 4, 32)
    whole, _ = run(memory, shape, position, q)
    for first, count in ((1, 15), (7, 3)):
        part, _ = run(
            memory, shape, position, q[first : first + count], first_row=first, of_rows=rows
        )
        same_bits(part, np.ascontiguousarray(whole[first : first + count]))
