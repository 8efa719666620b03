"""attention around every internal boundary. Tolerance: 3e-6 of the largest value, on the keys and values as cached."""

import itertools

import numpy as np
import pytest
from kernel_machine import assert_close, assert_quantised, machine, random_rows, same_bits

from sparkinfer.kernels.attention import attention, chunks
from sparkinfer.kernels.attention.reference import attention as reference
from sparkinfer.kernels.attention.reference import visible
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
        self.memory = KvCache(KvShape(2, kv_heads, size, "f32" if wide else "f16"), CONTEXT)
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


def run(
    cache, shape, wide, position, q, gate, quantised=False, private=False, threads=1, first=0, isa="auto"
):  # fmt: skip
    """Rows x heads x size, and the activation."""
    bench, rows = machine(isa, cache_format="f32" if wide else "f16", threads=threads), len(q)
    width = shape.heads * shape.head_size
    out = bench.blank_activation(rows, width, quantised=quantised, private=private)
    params = bench.params(
        position=position, keys=cache.memory.keys, values=cache.memory.values,
        head_bytes=cache.memory.plane_bytes,
        attention_chunks=chunks(position, rows, shape.kv_heads, first=first), first=first,
        window_chunks=chunks(position, rows, shape.kv_heads, first=first, window=shape.window),
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


def shape_of(heads, kv_heads, size, gated=False, causal=True, window=0):
    return Heads(LAYER, heads, kv_heads, size, size, False, gated, 1e-6, causal, window)


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


def masked_run(wide, heads, size, causal, window, length, rows, first):
    """Our rows and the reference's; every cache row that no row of the block sees holds NaN."""
    kv_heads = heads[1]
    shape = shape_of(heads[0], kv_heads, size, causal=causal, window=window)
    cache = Cache(kv_heads, size, wide, seed=length)
    seen = visible(length - rows, rows, causal=causal, window=window, first=first)
    cache.all_k[:length][~seen.any(axis=0)] = np.nan
    cache.all_v[:length][~seen.any(axis=0)] = np.nan
    k, v = cache.fill(length)
    rng = np.random.default_rng(rows)
    q = (2 * rng.standard_normal((rows, heads[0], size))).astype(np.float32)
    got, _ = run(cache, shape, wide, length - rows, q, None, first=first)
    k, v = np.nan_to_num(k), np.nan_to_num(v)
    return got, reference(q, k, v, causal=causal, window=window, first=first), np.abs(v).max()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3, 16, 40, 255, 256, 300])
def test_masks_of_a_block(wide, causal, window):
    """Non-causal blocks, sliding windows and missing rows, around tiles (16) and splits (256)."""
    shapes = itertools.cycle([((2, 2), 16), ((4, 2), 32), ((3, 1), 64)])
    for length, rows in itertools.product((16, 33, 256, 272, 273, 530, 640), (1, 4, 6, 16)):
        for first in {0, 1, 17, 250, 256, 300, length - rows}:
            if first > length - rows:
                continue
            heads, size = next(shapes)
            got, wanted, top = masked_run(wide, heads, size, causal, window, length, rows, first)
            assert_close(got, wanted, top, TOLERANCE)


def test_a_key_that_only_another_row_sees_may_be_no_number():
    """Rows of one group share the reads; a window's oldest key belongs to the first row alone."""
    window, length, rows = 20, 60, 4
    shape, cache = shape_of(4, 2, 32, window=window), Cache(2, 32, False)
    oldest = length - rows - window + 1
    cache.all_k[oldest] = cache.all_v[oldest] = np.nan
    k, v = cache.fill(length)
    q = random_rows(rows, 128).reshape(rows, 4, 32)
    got, _ = run(cache, shape, False, length - rows, q, None)
    wanted = reference(q, np.nan_to_num(k), np.nan_to_num(v), window=window)
    assert_close(got[1:], wanted[1:], np.nanmax(np.abs(v)), TOLERANCE)
    assert np.isnan(got[0]).all()


def test_an_unseen_first_row_changes_no_bits_of_a_causal_run():
    """Rows below FIRST that a window hides anyway make no difference."""
    shape, cache = shape_of(4, 2, 32, window=40), Cache(2, 32, False)
    cache.fill(600)
    q = random_rows(5, 128).reshape(5, 4, 32)
    same_bits(
        run(cache, shape, False, 595, q, None, first=500)[0],
        run(cache, shape, False, 595, q, None)[0],
    )


def test_chunks_do_not_grow_with_what_a_window_hides():
    """The work of a windowed layer at 32k positions is that of 1k; rows that are missing cost nothing either."""
    assert chunks(32768, 16, 8, window=512) == chunks(1024, 16, 8, window=512)
    assert chunks(32768, 16, 8, first=32700) == chunks(0, 16, 8, first=0) * 2
    assert chunks(1024, 16, 8) == 5 * 4 * 8


@pytest.mark.parametrize("causal", [False, True])
def test_masked_rows_have_the_same_bits_on_every_machine(causal):
    shape, cache = shape_of(8, 2, 64, causal=causal, window=300), Cache(2, 64, False)
    cache.fill(600)
    q = random_rows(16, 512).reshape(16, 8, 64)
    one = run(cache, shape, False, 584, q, None, first=290)[0]
    for isa, threads in (("avx2", 1), ("portable", 1), ("auto", 2)):
        same_bits(
            run(cache, shape, False, 584, q, None, first=290, isa=isa, threads=threads)[0], one, isa
        )
