"""The CPU's cache in q8_0: what rope writes, and attention over it.

Tolerance of attention: 6e-5 of the largest value, on the keys and values as cached: queries and weights have 16 bits.
"""

import itertools

import numpy as np
import pytest
from cpu_kv import read_codes, write_codes
from kernel_machine import assert_close, assert_quantised, machine, random_rows, same_bits

from sparkinfer.kernels.attention import attention, chunks
from sparkinfer.kernels.attention.reference import attention as reference
from sparkinfer.kernels.attention.reference import visible
from sparkinfer.kernels.copy_rows import copy_rows
from sparkinfer.kernels.rope import rope
from sparkinfer.kernels.rope.reference import angles, factors, from_q8_0, q8_0
from sparkinfer.kernels.shapes import Heads
from sparkinfer.state.kv_cache import KvCache, KvShape

CONTEXT, LAYER = 640, 1
TOLERANCE = 6e-5


class Cache:
    """A random cache of two layers; from `length` on keys have no scale, and codes may be anything."""

    def __init__(self, kv_heads, size, seed=0):
        rng, self.kv, self.size = np.random.default_rng(seed), kv_heads, size
        self.shape = KvShape(2, kv_heads, size, "q8_0")
        self.memory = KvCache(self.shape, CONTEXT)
        self.k, self.v = rng.standard_normal((2, kv_heads, CONTEXT, size)).astype(np.float32)

    def fill(self, length, unseen=()):
        """The keys and values [positions, kv heads, size] that the cache stands for."""
        rng = np.random.default_rng(length)
        pairs, read = [], []
        for x in (self.k, self.v):
            codes, scales = q8_0(x)
            read.append(from_q8_0(codes, scales)[:, :length].swapaxes(0, 1))
            codes[:, length:] = rng.integers(-127, 128, codes[:, length:].shape)
            scales[:, length:] = 60000.0
            pairs.append((codes, scales))
        for places in (slice(length, None), list(unseen)):
            pairs[0][1][:, places] = np.nan
        both = [[np.concatenate([np.zeros_like(x), x]) for x in pair] for pair in pairs]
        write_codes(self.memory, self.shape, *both)
        return read

    def words(self):
        return {
            "keys": self.memory.keys, "values": self.memory.values, "head_bytes": self.memory.plane_bytes,
        }  # fmt: skip


def shape_of(heads, kv_heads, size, gated=False, causal=True, window=0):
    return Heads(LAYER, heads, kv_heads, size, size, False, gated, 1e-6, causal, window)


def run(
    cache, shape, position, q, gate=None, *, quantised=False, private=False, threads=1, first=0, isa="auto"
):  # fmt: skip
    """Rows x heads x size, and the activation."""
    bench, rows = machine(isa, cache_format="q8_0", threads=threads), len(q)
    width = shape.heads * shape.head_size
    out = bench.blank_activation(rows, width, quantised=quantised, private=private)
    params = bench.params(
        position=position, first=first, **cache.words(),
        attention_chunks=chunks(position, rows, shape.kv_heads, first=first),
        window_chunks=chunks(position, rows, shape.kv_heads, first=first, window=shape.window),
    )  # fmt: skip
    queries = bench.filled(q.reshape(rows, width))
    gates = None
    if gate is not None:
        pairs = np.stack([np.full_like(gate, np.nan), gate], axis=2)
        gates = bench.filled(pairs.reshape(rows, 2 * width))
    copy = bench.blank(rows, width)

    def record(recorder):
        attention(recorder, queries, shape, params, gates, out, CONTEXT)
        copy_rows(recorder, queries, copy)

    bench.run(rows, record)
    return out.f32.array.reshape(rows, shape.heads, -1), out


LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 255, 256, 257, 288, 511, 512, 513, 640)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "gated"),
    [(2, 2, 32, False), (4, 2, 32, True), (3, 1, 64, False), (8, 2, 64, True), (5, 1, 96, False), (6, 1, 128, False),
     (2, 1, 256, True)],
)  # fmt: skip
def test_attention(heads, kv_heads, size, gated):
    shape, cache = shape_of(heads, kv_heads, size, gated), Cache(kv_heads, size)
    rng = np.random.default_rng(1)
    for length in LENGTHS:
        for rows in (1, 2, 5, 16, 17):
            if rows > length:
                continue
            k, v = cache.fill(length)
            q, gate = (2 * rng.standard_normal((2, rows, heads, size))).astype(np.float32)
            gate = gate if gated else None
            got, _ = run(cache, shape, length - rows, q, gate)
            assert_close(got, reference(q, k, v, gate), np.abs(v).max(), TOLERANCE)
            for r in {0, rows // 2, rows - 1}:
                cache.fill(length - rows + r + 1)
                one = slice(r, r + 1)
                gate_row = None if gate is None else gate[one]
                alone, _ = run(cache, shape, length - rows + r, q[one], gate_row)
                same_bits(got[one], alone, f"row {r} of {rows} at length {length}")


@pytest.mark.parametrize("private", [False, True])
def test_attention_writes_the_int8_form_too(private):
    shape, cache = shape_of(4, 2, 32), Cache(2, 32)
    cache.fill(40)
    q = random_rows(9, 128).reshape(9, 4, 32)
    plain, _ = run(cache, shape, 31, q)
    got, out = run(cache, shape, 31, q, quantised=True, private=private)
    same_bits(got, plain)
    assert_quantised(out, got.reshape(9, 128))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3, 16, 40, 255, 256, 300])
def test_masks_of_a_block(causal, window):
    """Non-causal blocks, sliding windows and missing rows, around tiles (16 and 32) and splits (256)."""
    shapes = itertools.cycle([((2, 2), 32), ((4, 2), 32), ((3, 1), 64)])
    for length, rows in itertools.product((16, 33, 256, 272, 273, 530, 640), (1, 4, 6, 16)):
        for first in {0, 1, 17, 250, 256, 300, length - rows}:
            if first > length - rows:
                continue
            (heads, kv_heads), size = next(shapes)
            cache = Cache(kv_heads, size, seed=length)
            seen = visible(length - rows, rows, causal=causal, window=window, first=first)
            k, v = cache.fill(length, np.flatnonzero(~seen.any(axis=0)))
            rng = np.random.default_rng(rows)
            q = (2 * rng.standard_normal((rows, heads, size))).astype(np.float32)
            shape = shape_of(heads, kv_heads, size, causal=causal, window=window)
            got, _ = run(cache, shape, length - rows, q, first=first)
            wanted = reference(q, k, v, causal=causal, window=window, first=first)
            assert_close(got, wanted, np.abs(v).max(), TOLERANCE)


def test_a_key_without_a_scale_reaches_the_rows_that_see_it_only():
    window, length, rows = 20, 60, 4
    shape, cache = shape_of(4, 2, 32, window=window), Cache(2, 32)
    k, v = cache.fill(length, [length - rows - window + 1])
    q = random_rows(rows, 128).reshape(rows, 4, 32)
    got, _ = run(cache, shape, length - rows, q)
    wanted = reference(q, k, v, window=window)
    assert_close(got[1:], wanted[1:], np.abs(v).max(), TOLERANCE)
    assert np.isnan(got[0]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_query_that_is_no_number_spoils_its_own_head_alone(bad):
    shape, cache = shape_of(4, 2, 32), Cache(2, 32)
    cache.fill(300)
    q = random_rows(3, 128).reshape(3, 4, 32)
    clean, _ = run(cache, shape, 297, q)
    q[1, 2, 7] = bad
    got, _ = run(cache, shape, 297, q)
    if bad == 3e38:
        assert np.isfinite(got).all()
    else:
        assert np.isnan(got[1, 2]).all()
    got[1, 2] = clean[1, 2]
    same_bits(got, clean)


def test_large_scores_do_not_overflow():
    shape, cache = shape_of(2, 1, 64), Cache(1, 64)
    k, v = cache.fill(300)
    q = 100 * random_rows(3, 128).reshape(3, 2, 64)
    got, _ = run(cache, shape, 297, q)
    assert_close(got, reference(q, k, v), np.abs(v).max(), 6e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_have_the_same_bits_on_every_machine(causal):
    shape, cache = shape_of(8, 2, 64, causal=causal, window=300), Cache(2, 64)
    cache.fill(600)
    q = random_rows(16, 512).reshape(16, 8, 64)
    one = run(cache, shape, 584, q, first=290)[0]
    for isa, threads in (("avx2", 1), ("portable", 1), ("auto", 2), ("auto", 3)):
        same_bits(run(cache, shape, 584, q, first=290, isa=isa, threads=threads)[0], one, isa)


# ---- rope


def roped(shape, position, q, k, v, joined=False):
    """Codes and scales [planes, positions, ...] of keys and values after rope; the cache begins with ones.

    `joined`: attention follows and does rope's work.
    """
    bench, rows = machine(cache_format="q8_0"), len(q)
    kv_shape = KvShape(2, shape.kv_heads, shape.head_size, "q8_0")
    cache = KvCache(kv_shape, 96)
    cache._keys[:] = cache._values[:] = 1
    table = bench.filled(factors(angles(96, shape.rotated, 10000.0), shape.interleaved))
    params = bench.params(
        position=position, keys=cache.keys, values=cache.values, head_bytes=cache.plane_bytes,
        attention_chunks=chunks(position, rows, shape.kv_heads),
    )  # fmt: skip
    width = shape.heads * shape.head_size
    out, copy = bench.blank(rows, width), bench.blank(rows, width)
    mixed = bench.blank_activation(rows, width, quantised=False)
    inputs = [bench.filled(x.reshape(rows, -1)) for x in (q, k, v)]

    def record(recorder):
        rope(recorder, *inputs, shape, table, params, out, None, None)
        if joined:
            attention(recorder, out, shape, params, None, mixed, 96)
        copy_rows(recorder, out, copy)

    bench.run(rows, record)
    return read_codes(cache, kv_shape), mixed.f32.array.reshape(rows, shape.heads, -1)


def unturned(size, kv_heads=2):
    return Heads(LAYER, 4, kv_heads, size, 0, False, False, 1e-6)


@pytest.mark.parametrize("size", [32, 64, 96, 256])
def test_rope_writes_codes_and_scales(size):
    """Without a rotation the codes are the reference's to the bit; what is not written stays."""
    shape, rng = unturned(size), np.random.default_rng(size)
    q = rng.standard_normal((17, 4, size)).astype(np.float32)
    k, v = (random_rows(34, size, seed=s).reshape(17, 2, size) for s in (1, 2))
    k[3, 0, :32], v[3, 1, 32:] = 0, 1e-9
    for position, rows in ((0, 1), (15, 2), (30, 5), (16, 16), (31, 17), (79, 17)):
        part, places = slice(0, rows), slice(position, position + rows)
        found, _ = roped(shape, position, q[part], k[part], v[part])
        wanted = [x.swapaxes(0, 1) for kind in (k, v) for x in q8_0(kind[part])]
        for got, right in zip(found, wanted, strict=True):
            same_bits(got[2:, places], np.ascontiguousarray(right))
            before = np.ones(got.itemsize, np.uint8).view(got.dtype)[0]
            assert (np.delete(got, np.r_[places], axis=1) == before).all()
            assert (got[:2] == before).all()


def test_rope_turns_before_it_rounds():
    shape = Heads(LAYER, 4, 2, 64, 64, False, False, 1e-6)
    q, k, v = np.random.default_rng(3).standard_normal((3, 5, 4, 64)).astype(np.float32)
    k, v = k[:, :2], v[:, :2]
    (codes, scales, *_), _ = roped(shape, 20, q, k, v)
    from sparkinfer.kernels.rope.reference import rope as turned

    wanted = turned(k, angles(96, 64, 10000.0)[20:25], False, None, 1e-6).swapaxes(0, 1)
    step = scales[2:, 20:25].astype(np.float32).repeat(32, -1)
    got = from_q8_0(codes[2:, 20:25], scales[2:, 20:25])
    assert (np.abs(got - wanted) <= 0.51 * step).all()


@pytest.mark.parametrize("bad", [np.nan, -np.inf, 1e7])
@pytest.mark.parametrize("of_value", [False, True])
def test_what_does_not_fit_has_a_key_without_a_scale(bad, of_value):
    """Whoever sees the position gets NaN; a value is a number everywhere, for weights of zero."""
    shape, rng = unturned(64), np.random.default_rng(5)
    q = rng.standard_normal((6, 4, 64)).astype(np.float32)
    k, v = rng.standard_normal((2, 6, 2, 64)).astype(np.float32)
    (v if of_value else k)[4, 1, 40] = bad
    (key_codes, key_scales, value_codes, value_scales), mixed = roped(
        shape, 30, q, k, v, joined=True
    )
    lost = np.isnan(key_scales).any(-1)
    assert lost[3, 34] and lost.sum() == 1
    assert np.isfinite(value_scales).all()
    if of_value:
        assert (value_codes[3, 34, 32:] == 0).all() and value_scales[3, 34, 1] == 0
    else:
        assert (key_codes[3, 34, 32:] == 0).all()
    assert np.isfinite(mixed[:4]).all() and np.isfinite(mixed[4:, :2]).all()
    assert np.isnan(mixed[4:, 2:]).all()
