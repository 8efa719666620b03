"""The ops that only drafts use: convolution over a block, int8 form of rows from outside, keys and values alone."""

import numpy as np
import pytest
from kernel_machine import assert_close, assert_quantised, machine, random_rows, same_bits

from sparkinfer.kernels.attention import attention, chunks
from sparkinfer.kernels.block_conv import BlockConv, block_conv, block_conv_add
from sparkinfer.kernels.block_conv.reference import block_conv as conv_reference
from sparkinfer.kernels.copy_rows import copy_rows
from sparkinfer.kernels.quantise import quantise
from sparkinfer.kernels.quantise.reference import quantise as quantise_reference
from sparkinfer.kernels.rope import cache_rows, rope
from sparkinfer.kernels.rope.reference import angles, factors
from sparkinfer.kernels.shapes import Heads
from sparkinfer.state.kv_cache import KvCache, KvShape


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17])
@pytest.mark.parametrize(
    ("channels", "taps", "group"), [(64, 4, 16), (96, 2, 32), (128, 5, 64), (32, 1, 32)]
)
def test_block_conv(rows: int, channels: int, taps: int, group: int) -> None:
    """Both sides, as a prologue and as a phase; every row alone with the rows before it has the same bits."""
    bench, groups = machine(), channels // group
    x, base = random_rows(rows, channels), random_rows(2 * taps, channels, seed=1)
    deltas = random_rows(rows, 2 * taps * groups, seed=2)
    conv = BlockConv(taps, group, bench.filled(base))
    parts = deltas.reshape(rows, 2, taps, groups)
    size = np.abs(x).max() * (np.abs(base).max() + np.abs(deltas).max()) * taps
    before = conv_reference(x, parts[:, 0], base[:taps])
    rows_in, deltas_in = bench.filled(x), bench.filled(deltas)
    for private in (False, True):
        out = bench.blank_activation(rows, channels, quantised=True, private=private)
        copy = bench.blank(rows, channels)

        def record(recorder, out=out, copy=copy):
            block_conv(recorder, rows_in, deltas_in, conv, out)
            copy_rows(recorder, rows_in, copy)

        bench.run(rows, record)
        got = out.f32.array[:rows].copy()
        assert_close(got, before, size, 3e-7)
        assert_quantised(out, got)
    stream = random_rows(rows, channels, seed=3)
    held = bench.filled(stream)
    bench.run(rows, lambda r: block_conv_add(r, rows_in, deltas_in, conv, held))
    after = stream + conv_reference(x, parts[:, 1], base[taps:])
    assert_close(held.array, after, size + np.abs(stream).max(), 3e-7)
    for n in range(1, rows):
        fewer = bench.blank_activation(n, channels, quantised=False)
        x_n, deltas_n = rows_in.part(0, n), deltas_in.part(0, n)
        bench.run(n, lambda r, a=x_n, b=deltas_n, out=fewer: block_conv(r, a, b, conv, out))
        same_bits(fewer.f32.array, np.ascontiguousarray(got[:n]))


@pytest.mark.parametrize("rows", [1, 8, 11])
def test_quantise(rows: int) -> None:
    bench = machine(threads=2)
    x = random_rows(rows, 96)
    act = bench.blank_activation(rows, 96, quantised=True)
    act.f32.array[:] = x
    bench.run(rows, lambda r: quantise(r, act))
    assert_quantised(act, x)
    top = np.abs(x).max()
    assert np.abs(quantise_reference(x) - x).max() <= top / 253


@pytest.mark.parametrize("wide", [False, True])
def test_cache_rows_are_those_of_rope_and_turn_by_their_own_position(wide: bool) -> None:
    """Keys and values alone, at a cache row that is not the position they turn by."""
    shape, bench = (
        Heads(1, 4, 2, 32, 32, False, False, 1e-6),
        machine(cache_format="f32" if wide else "f16"),
    )
    table = bench.filled(factors(angles(600, 32, 1e4), False))
    norm = bench.filled(1 + 0.1 * random_rows(1, 32))
    widths = (128, 64, 64)
    q, k, v = (bench.filled(random_rows(5, width, seed=i)) for i, width in enumerate(widths))

    def cached(position: int, rotation: int, alone: bool) -> tuple[np.ndarray, np.ndarray]:
        cache = KvCache(KvShape(2, 2, 32, "f32" if wide else "f16"), 600)
        params = bench.params(
            position=position, rotation=rotation, keys=cache.keys, values=cache.values,
            head_bytes=cache.plane_bytes,
        )  # fmt: skip
        out, copy = bench.blank(5, 128), bench.blank(5, 128)

        def record(recorder):
            if alone:
                with recorder.together():
                    cache_rows(recorder, k, v, shape, table, params, norm)
            else:
                rope(
                    recorder,
                    q,
                    k,
                    v,
                    shape,
                    table,
                    params,
                    out,
                    norm,
                    norm,
                )
                copy_rows(recorder, q, copy)

        bench.run(5, record)
        return cache._keys.copy(), cache._values.copy()

    for ours, theirs in zip(cached(300, 0, True), cached(300, 0, False), strict=True):
        same_bits(ours, theirs)
    moved, plain = cached(44, 256, True), cached(300, 0, False)
    item = 4 if wide else 2
    kind = np.float32 if wide else np.float16
    plane = 608 * 32
    for index, per_row in ((0, False), (1, True)):
        a, b = (x[index].view(kind)[: 4 * plane].reshape(4, -1) for x in (moved, plain))
        if per_row:
            a, b = a.reshape(4, 608, 32)[:, 44:49], b.reshape(4, 608, 32)[:, 300:305]
        else:  # tiles of 16 positions
            a, b = (
                t.reshape(4, 38, 32, 16).transpose(0, 1, 3, 2).reshape(4, 608, 32) for t in (a, b)
            )
            a, b = a[:, 44:49], b[:, 300:305]
        same_bits(np.ascontiguousarray(a), np.ascontiguousarray(b))
        assert a[2:].any() and item == a.itemsize


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 40])
def test_some_rows_of_a_run_have_the_bits_of_all(causal: bool, window: int) -> None:
    """The last layer of a draft finishes only its slots."""
    rows, position, bench = 16, 500, machine()
    shape = Heads(0, 4, 2, 32, 32, False, False, 1e-6, causal, window)
    cache = KvCache(KvShape(1, 2, 32, "f16"), 640)
    rng = np.random.default_rng(0)
    for array in (cache._keys, cache._values):
        halves = array.view(np.float16)
        halves[:] = rng.standard_normal(halves.shape)
    params = bench.params(
        position=position, keys=cache.keys, values=cache.values, head_bytes=cache.plane_bytes,
        attention_chunks=chunks(position, rows, 2), window_chunks=chunks(position, rows, 2, window=window),
    )  # fmt: skip
    q = random_rows(rows, 128)

    def run(first: int, count: int) -> np.ndarray:
        out = bench.blank_activation(count, 128, quantised=False)
        part = bench.filled(q).part(first, count)

        def record(recorder):
            attention(recorder, part, shape, params, None, out, 640, first_row=first, of_rows=rows)

        bench.run(count, record)
        return out.f32.array.copy()

    whole = run(0, rows)
    for first, count in ((1, 15), (1, 5), (0, 4), (15, 1), (7, 3)):
        same_bits(run(first, count), np.ascontiguousarray(whole[first : first + count]))
