"""attention around every internal boundary. Tolerance: 3e-6 of the largest value, on the keys and values as cached."""

import numpy as np
import pytest
from kernel_machine import assert_close, assert_quantised, machine, random_rows, same_bits

from sparkinfer.kernels.attention import attention, chunks
from sparkinfer.kernels.attention.reference import attention as reference
from sparkinfer.kernels.copy_rows import copy_rows
from sparkinfer.kernels.shapes import Heads
from sparkinfer.state.kv_cache import KvCache, KvShape

CONTEXT, LAYER = 640, 1
TOLERANCE = 3e-6


class Cache:
    """A random cache of two layers; positions from `length` on hold NaN."""

    def __init__(self, kv_heads, size, wide, seed=0):
        rng, self.kv, self.size = np.random.default_rng(seed), kv_heads, size
        self.kind = np.float32 if wide else np.float16
        self.memory = KvCache(KvShape(2, kv_heads, size, 4 if wide else 2), CONTEXT)
        self.all_k, self.all_v = rng.standard_normal((2, CONTEXT, kv_heads, size)).astype(self.kind)

    def fill(self, length):
        k, v = self.all_k.copy(), self.all_v.copy()
        k[length:] = v[length:] = np.nan
        n = 2 * self.kv * self.memory.plane_bytes
        keys = (
            self.memory._keys[:n].view(self.kind).reshape(2, self.kv, CONTEXT // 16, self.size, 16)
        )
        values = self.memory._values[:n].view(self.kind).reshape(2, self.kv, CONTEXT, self.size)
        keys[:], values[:] = np.nan, np.nan
        keys[LAYER] = k.reshape(CONTEXT // 16, 16, self.kv, self.size).transpose(2, 0, 3, 1)
        values[LAYER] = v.transpose(1, 0, 2)
        return k[:length].astype(np.float32), v[:length].astype(np.float32)


def run(cache, shape, wide, position, q, gate, quantised=False, private=False, threads=1):
    """Rows x heads x size, and the activation."""
    bench, rows = machine(wide=wide, threads=threads), len(q)
    width = shape.heads * shape.head_size
    out = bench.blank_activation(rows, width, quantised=quantised, private=private)
    params = bench.params(
        position=position, keys=cache.memory.keys, values=cache.memory.values,
        head_bytes=cache.memory.plane_bytes,
        attention_chunks=chunks(position, rows, shape.kv_heads),
    )  # fmt: skip
    queries = bench.filled(q.reshape(rows, width))
    pairs = np.stack([np.full_like(gate, np.nan), gate], axis=2) if gate is not None else None
    gates = bench.filled(pairs.reshape(rows, 2 * width)) if gate is not None else None
    copy = bench.blank(rows, width)

    def record(recorder):
        attention(recorder, queries, shape, params, gates, out, CONTEXT)
        copy_rows(recorder, queries, copy)

    bench.run(rows, record)
    return out.f32.array.reshape(rows, shape.heads, -1), out


def shape_of(heads, kv_heads, size, gated=False):
    return Heads(LAYER, heads, kv_heads, size, size, False, gated, 1e-6)


LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 511, 512, 513, 640)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "gated"),
    [(2, 2, 16, False), (4, 2, 32, True), (3, 1, 64, False), (8, 2, 64, True), (8, 1, 128, False), (2, 1, 256, True)],
)  # fmt: skip
def test_attention(wide, heads, kv_heads, size, gated):
    shape, cache = shape_of(heads, kv_heads, size, gated), Cache(kv_heads, size, wide)
    rng = np.random.default_rng(1)
    for length in LENGTHS:
        for rows in (1, 2, 5, 16, 17):
            if rows > length:
                continue
            k, v = cache.fill(length)
            q, gate = (2 * rng.standard_normal((2, rows, heads, size))).astype(np.float32)
            gate = gate if gated else None
            got, _ = run(cache, shape, wide, length - rows, q, gate)
            wanted = reference(q, k, v, gate)
            assert_close(got, wanted, np.abs(v).max(), TOLERANCE)
            for r in {0, rows // 2, rows - 1}:
                cache.fill(length - rows + r + 1)
                one = slice(r, r + 1)
                alone, _ = run(
                    cache,
                    shape,
                    wide,
                    length - rows + r,
                    q[one],
                    None if gate is None else gate[one],
                )
                same_bits(got[one], alone, f"row {r} of {rows} at length {length}")


@pytest.mark.parametrize("private", [False, True])
def test_attention_writes_the_int8_form_too(private):
    shape, cache = shape_of(4, 2, 32), Cache(2, 32, False)
    cache.fill(40)
    q = random_rows(9, 128).reshape(9, 4, 32)
    plain, _ = run(cache, shape, False, 31, q, None)
    got, out = run(cache, shape, False, 31, q, None, quantised=True, private=private)
    same_bits(got, plain)
    assert_quantised(out, got.reshape(9, 128))


def test_large_scores_do_not_overflow():
    shape, cache = shape_of(2, 1, 64), Cache(1, 64, True)
    k, v = cache.fill(300)
    q = 100 * random_rows(3, 128).reshape(3, 2, 64)
    got, _ = run(cache, shape, True, 297, q, None)
    assert_close(got, reference(q, k, v), np.abs(v).max(), 1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_later_row_that_is_no_number_does_not_reach_an_earlier_one(bad):
    """A drafted token may overflow where the right one does not: rows of a window see only what came before them."""
    shape, cache = shape_of(4, 2, 32), Cache(2, 32, False)
    q = random_rows(4, 128).reshape(4, 4, 32)
    k, v = cache.fill(20)
    cache.all_v[17:20] = bad
    cache.all_k[17:20] = bad
    cache.fill(20)
    got, _ = run(cache, shape, False, 16, q, None)
    wanted = reference(q[:1], k[:17], v[:17])
    assert_close(got[:1], wanted, np.abs(v).max(), TOLERANCE)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_change_the_bits(threads):
    shape, cache = shape_of(8, 2, 64), Cache(2, 64, False)
    cache.fill(600)
    q = random_rows(16, 512).reshape(16, 8, 64)
    same_bits(
        run(cache, shape, False, 584, q, None, threads=threads)[0],
        run(cache, shape, False, 584, q, None)[0],
    )
