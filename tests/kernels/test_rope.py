"""rope: rotation, norms, cache rows. Tolerance: 3e-6 of a head's largest value; 6e-4 where the cache is float16."""

import numpy as np
import pytest
from kernel_machine import assert_close, machine, random_rows, same_bits

from sparkinfer.kernels.copy_rows import copy_rows
from sparkinfer.kernels.rope import rope
from sparkinfer.kernels.rope.reference import angles, factors
from sparkinfer.kernels.rope.reference import rope as reference
from sparkinfer.kernels.shapes import Heads
from sparkinfer.state.kv_cache import KvCache, KvShape

CONTEXT, EPS = 64, 1e-6


def read_cache(cache, shape, layers, wide, layer):
    """Keys and values of a layer, each [positions, kv heads, size]."""
    kind = np.float32 if wide else np.float16
    kv, size = shape.kv_heads, shape.head_size
    keys = cache._keys[: layers * kv * cache.plane_bytes].view(kind)
    keys = keys.reshape(layers, kv, CONTEXT // 16, size, 16)[layer]
    values = cache._values[: layers * kv * cache.plane_bytes].view(kind)
    values = values.reshape(layers, kv, CONTEXT, size)[layer]
    return keys.transpose(1, 3, 0, 2).reshape(CONTEXT, kv, size), values.transpose(1, 0, 2)


def run(shape, wide, position, q, k, v, norms, base=10000.0):
    """The rotated q and the cache after `rows` rows at `position`; the cache starts as NaN."""
    bench, rows = machine(cache_format="f32" if wide else "f16"), len(q)
    cache = KvCache(KvShape(2, shape.kv_heads, shape.head_size, "f32" if wide else "f16"), CONTEXT)
    kind = np.float32 if wide else np.float16
    cache._keys.view(kind)[:] = cache._values.view(kind)[:] = np.nan
    table = bench.filled(factors(angles(CONTEXT, shape.rotated, base), shape.interleaved))
    params = bench.params(
        position=position, keys=cache.keys, values=cache.values, head_bytes=cache.plane_bytes
    )
    width = shape.heads * shape.head_size
    out, copy = bench.blank(rows, width), bench.blank(rows, width)
    inputs = [bench.filled(x.reshape(rows, -1)) for x in (q, k, v)]
    weights = [bench.filled(n) if n is not None else None for n in norms]

    def record(recorder):
        rope(recorder, *inputs, shape, table, params, out, *weights)
        copy_rows(recorder, out, copy)

    bench.run(rows, record)
    same_bits(copy.array, out.array)
    return out.array.reshape(rows, shape.heads, -1), *read_cache(cache, shape, 2, wide, shape.layer)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("size", "rotated", "gated"),
    [(16, 16, False), (32, 8, True), (64, 64, False), (80, 48, False), (256, 64, True), (128, 128, True)],
)  # fmt: skip
def test_rope(wide, interleaved, normed, size, rotated, gated):
    shape = Heads(1, 4, 2, size, rotated, interleaved, gated, EPS)
    rng = np.random.default_rng(size)
    q = rng.standard_normal((17, 4, 2 if gated else 1, size)).astype(np.float32)
    k, v = rng.standard_normal((2, 17, 2, size)).astype(np.float32)
    norms = [random_rows(1, size, seed=s) if normed else None for s in (1, 2)]
    table = angles(CONTEXT, rotated, 10000.0)
    for position, rows in ((0, 1), (15, 2), (13, 5), (16, 16), (31, 17)):
        part = slice(0, rows)
        out, keys, values = run(shape, wide, position, q[part], k[part], v[part], norms)
        angle = table[position : position + rows]
        for got, x, norm, tolerance in (
            (out, q[part, :, 0], norms[0], 3e-6),
            (keys[position : position + rows], k[part], norms[1], 3e-6 if wide else 6e-4),
        ):
            wanted = reference(x, angle, interleaved, None if norm is None else norm[0], EPS)
            assert_close(got, wanted, np.abs(wanted).max(-1, keepdims=True), tolerance)
        same_bits(values[position : position + rows], v[part].astype(values.dtype))
        for cache in (keys, values):
            untouched = np.r_[0:position, position + rows : CONTEXT]
            assert np.isnan(cache[untouched]).all()
        for r in range(rows):
            one = slice(r, r + 1)
            alone = run(shape, wide, position + r, q[one], k[one], v[one], norms)
            same_bits(out[one], alone[0])
            same_bits(keys[position + r], alone[1][position + r])


def test_the_rotation_divisors_stretch_the_angles():
    plain = angles(8, 4, 100.0)
    stretched = angles(8, 4, 100.0, np.array([1, 4], np.float32))
    same_bits(stretched[:, [0, 2]], plain[:, [0, 2]])
    np.testing.assert_allclose(stretched[4, 1], plain[1, 1], rtol=1e-6)
