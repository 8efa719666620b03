"""Triton forms of rope, copy_rows, block_conv and argmax.

Tolerance: 3e-6 of a head's largest value; 6e-4 where the cache is float16; 3e-6 of the terms' size (block_conv).
"""

from dataclasses import replace

import gpu_machine as gpu
import gpu_state
import numpy as np
import pytest
from gpu_state import Cache
from kernel_machine import assert_close, random_rows, same_bits

from sparkinfer.kernels import run_params as P
from sparkinfer.kernels.argmax import argmax, argmax_words
from sparkinfer.kernels.argmax.reference import argmax as argmax_reference
from sparkinfer.kernels.block_conv import BlockConv, block_conv, block_conv_add
from sparkinfer.kernels.block_conv.reference import block_conv as block_conv_reference
from sparkinfer.kernels.copy_rows import copy_rows
from sparkinfer.kernels.rope import cache_rows, rope
from sparkinfer.kernels.rope.reference import angles, factors
from sparkinfer.kernels.rope.reference import rope as reference
from sparkinfer.kernels.shapes import Heads

CONTEXT, EPS = 64, 1e-6


def run(shape, wide, position, q, k, v, norms, *, rotation=0, keys_only=False):
    """The rotated q, then keys and values [positions, kv heads, size]; the cache starts as NaN."""
    rows = len(q)
    cache = Cache(2, shape.kv_heads, CONTEXT, shape.head_size, wide=wide)
    table = gpu.filled(factors(angles(CONTEXT, shape.rotated, 10000.0), shape.interleaved))
    params = gpu_state.params(position=position, rotation=rotation, **cache.words())
    out = gpu.blank(rows, shape.heads * shape.head_size)
    inputs = [gpu.filled(x.reshape(rows, -1)) for x in (q, k, v)]
    weights = [gpu.filled(n) if n is not None else None for n in norms]
    recorder = gpu_state.recorder(rows, cache_format="f32" if wide else "f16")
    if keys_only:
        cache_rows(recorder, *inputs[1:], shape, table, params, weights[1])
    else:
        rope(recorder, *inputs, shape, table, params, out, *weights)
    gpu.run(recorder)
    stored = [x[shape.layer].cpu().numpy().transpose(1, 0, 2) for x in (cache.keys, cache.values)]
    return gpu.host(out).reshape(rows, shape.heads, -1), *stored


def random_inputs(size, gated):
    rng = np.random.default_rng(size)
    q = rng.standard_normal((17, 4, 2 if gated else 1, size)).astype(np.float32)
    return q, *rng.standard_normal((2, 17, 2, size)).astype(np.float32)


@pytest.mark.parametrize(("wide", "normed"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("size", "rotated", "gated"), [(16, 16, False), (32, 8, True), (80, 48, False), (256, 64, True)]
)
def test_rope(wide, interleaved, normed, size, rotated, gated):
    shape = Heads(1, 4, 2, size, rotated, interleaved, gated, EPS)
    q, k, v = random_inputs(size, gated)
    norms = [random_rows(1, size, seed=s) if normed else None for s in (1, 2)]
    table = angles(CONTEXT, rotated, 10000.0)
    for position, rows in ((0, 1), (13, 5), (31, 17)):
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
        r = rows - 1
        one = slice(r, r + 1)
        alone = run(shape, wide, position + r, q[one], k[one], v[one], norms)
        same_bits(out[one], alone[0])
        same_bits(keys[position + r], alone[1][position + r])


def test_cache_rows_does_what_rope_does_and_rotation_moves_the_angle_alone():
    shape = Heads(1, 4, 2, 32, 32, False, False, EPS)
    q, k, v = (x[:5] for x in random_inputs(32, False))
    norms = [random_rows(1, 32, seed=s) for s in (1, 2)]
    out, keys, values = run(shape, False, 10, q, k, v, norms, rotation=20)
    for left, right in zip((keys, values), run(shape, False, 10, q, k, v, norms, rotation=20, keys_only=True)[1:],
                           strict=True):  # fmt: skip
        same_bits(left, right)
    moved, moved_keys, _ = run(shape, False, 30, q, k, v, norms)
    same_bits(out, moved)
    same_bits(keys[10:15], moved_keys[30:35])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_values_that_are_no_numbers_poison_their_key_and_nothing_else(bad):
    """Attention multiplies by zero what a row does not see: values of the cache are always numbers."""
    shape = Heads(1, 4, 2, 32, 32, False, False, EPS)
    q, k, v = (x[:4] for x in random_inputs(32, False))
    v[2, 1, 7] = bad
    _, keys, values = run(shape, False, 10, q, k, v, [None, None])
    assert np.isnan(keys[12, 1]).all()
    assert (values[12, 1] == 0).all()
    assert np.isfinite(keys[10:14, 0]).all() and np.isfinite(keys[[10, 11, 13], 1]).all()
    same_bits(values[13], v[3].astype(np.float16))


@pytest.mark.parametrize("width", [16, 48, 2064])
def test_copy_rows_into_columns(width):
    x = random_rows(5, width)
    source, features = gpu.filled(x), gpu.blank(5, 3 * width)
    middle = replace(features, array=features.array[:, width : 2 * width], width=width)
    recorder = gpu_state.recorder(4)
    copy_rows(recorder, source, middle)
    gpu.run(recorder)
    got = gpu.host(features)
    same_bits(got[:4, width : 2 * width], x[:4])
    assert (
        np.isnan(got[4]).all()
        and np.isnan(got[:, :width]).all()
        and np.isnan(got[:, 2 * width :]).all()
    )


@pytest.mark.parametrize(("channels", "group", "taps"), [(32, 16, 4), (320, 64, 3), (96, 96, 2)])
@pytest.mark.parametrize("quantised", [False, True])
def test_block_conv(channels, group, taps, quantised):
    rows, rng = 5, np.random.default_rng(channels)
    x, before = rng.standard_normal((2, rows, channels)).astype(np.float32)
    deltas = rng.standard_normal((rows, 2, taps, channels // group)).astype(np.float32)
    base = rng.standard_normal((2, taps, channels)).astype(np.float32)
    conv = BlockConv(taps, group, gpu.filled(base.reshape(2 * taps, channels)))
    weights = gpu.filled(deltas.reshape(rows, -1))
    out, added = gpu.blank_activation(rows, channels, quantised=quantised), gpu.filled(before)
    recorder = gpu_state.recorder(rows)
    block_conv(recorder, gpu.filled(x), weights, conv, out)
    block_conv_add(recorder, gpu.filled(x), weights, conv, added)
    gpu.run(recorder)
    size = taps * np.abs(x).max() * (np.abs(base).max() + np.abs(deltas).max())
    assert_close(gpu.host(out.f32), block_conv_reference(x, deltas[:, 0], base[0]), size, 3e-6)
    assert_close(
        gpu.host(added), before + block_conv_reference(x, deltas[:, 1], base[1]), size, 3e-6
    )
    if quantised:
        gpu_state.assert_quantised(out, gpu.host(out.f32))


def test_argmax():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 70000)).astype(np.float32)
    logits[0, [5, 66000]] = 9.0  # a tie
    logits[1, 69999] = 9.0  # beyond the vocabulary
    logits[2, 40000] = np.nan
    logits[3, 123] = np.inf
    logits[4] = -np.inf
    for n_vocab in (69990, 1000):
        out = gpu.filled(np.full((6, 2), -7, np.int64))
        recorder = gpu_state.recorder(5)
        argmax(recorder, gpu.filled(logits), out, n_vocab)
        gpu.run(recorder)
        got = gpu.host(out)
        np.testing.assert_array_equal(got[:5], argmax_reference(logits[:5], n_vocab))
        assert (got[5] == -7).all()


def test_argmax_writes_tokens_for_another_run():
    """From a column of its one row on; what is no number leaves an id of the vocabulary."""
    n_vocab, column = 300, 5
    logits = np.random.default_rng(3).standard_normal((4, 304), np.float32)
    logits[2] = np.nan
    out, tokens = (
        gpu.filled(np.full((4, 2), -1, np.int64)),
        gpu.filled(np.full((1, 12), -7, np.int64)),
    )
    recorder = gpu.backend().recorder(4)
    argmax(recorder, gpu.filled(logits), out, n_vocab, tokens=(tokens, column))
    gpu.run(recorder)
    wanted = np.minimum(gpu.host(out)[:, 0], n_vocab - 1)
    assert wanted[[0, 1, 3]].tolist() == argmax_reference(logits[[0, 1, 3]], n_vocab)[:, 0].tolist()
    np.testing.assert_array_equal(gpu.host(tokens)[0], [-7] * 5 + wanted.tolist() + [-7] * 3)
    assert gpu.host(out)[:, 1].tolist() == [1, 1, 0, 1]


def words_of(logits, n_vocab, serial):
    found = argmax_reference(logits, n_vocab)
    return [serial << 33 | int(finite) << 32 | int(best) for best, finite in found]


def test_argmax_words():
    """A word a row, with the replay's serial."""
    n_vocab, serial = 300, 2**30 - 1
    logits = np.random.default_rng(5).standard_normal((4, 304), np.float32)
    logits[1, 7] = np.inf
    out = gpu.filled(np.full((4, 1), -7, np.int64))
    recorder = gpu.backend().recorder(3)
    argmax_words(recorder, gpu.filled(logits), out, n_vocab, gpu_state.params(serial=serial))
    gpu.run(recorder)
    assert gpu.host(out)[:, 0].tolist() == [*words_of(logits[:3], n_vocab, serial), -7]


def test_argmax_of_one_row_makes_the_parameters_of_the_next():
    n_vocab, column = 300, P.WORDS + 1
    logits = np.random.default_rng(6).standard_normal((1, 304), np.float32)
    before = np.zeros((1, P.WORDS + 3), np.int64)
    names = ("position", "conv", "conv_next", "recurrent", "recurrent_next", "serial", "keys")
    at = [getattr(P, name.upper()) // 8 for name in names]
    before[0, at] = 9, 100, 200, 300, 400, 2**30 - 1, 77
    params, out = gpu.filled(before), gpu.filled(np.zeros((1, 1), np.int64))
    recorder = gpu.backend().recorder(1)
    argmax_words(recorder, gpu.filled(logits), out, n_vocab, params, first=column)
    gpu.run(recorder)
    best = int(argmax_reference(logits, n_vocab)[0, 0])
    assert gpu.host(out)[0, 0] == words_of(logits, n_vocab, 2**30 - 1)[0]
    after = gpu.host(params)[0]
    assert after[at].tolist() == [10, 200, 100, 400, 300, 0, 77]
    assert after[P.WORDS :].tolist() == [0, best, 0]
