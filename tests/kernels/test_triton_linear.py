"""linear, gated_linear and the packed weights on the GPU's kernels. Tolerance: 2e-6 of the sum of |terms|."""

from dataclasses import replace

import numpy as np
import pytest
from gpu_machine import activation, backend, blank, blank_activation, filled, host, int8_blocks, run
from kernel_machine import assert_close, random_blocks, random_rows, same_bits

from sparkinfer.backend.cuda import q8_views
from sparkinfer.errors import ShapeError
from sparkinfer.kernels.gated_linear import gated_linear
from sparkinfer.kernels.gated_linear.reference import gated_linear as gated_reference
from sparkinfer.kernels.linear import linear, pack_weight, triton_wide
from sparkinfer.kernels.linear.reference import linear as reference
from sparkinfer.kernels.linear.reference import quantised_rows
from sparkinfer.kernels.linear.triton_impl import choose_tile
from sparkinfer.kernels.triton_quant import FORMS
from sparkinfer.quant.formats import QUANT_FORMATS, dequantize

TOLERANCE = 2e-6
every_format = pytest.mark.parametrize("format_name", FORMS)


def weight(format_name, outputs, inputs, seed=1, experts=1):
    """A packed random weight and its values [outputs, inputs] or [experts, outputs, inputs]."""
    blocks = random_blocks(format_name, experts * outputs * inputs, seed)
    packed = pack_weight(backend(), format_name, blocks, outputs, inputs, experts)
    values = np.asarray(dequantize(format_name, blocks), np.float32)
    return packed, values.reshape((experts,) * (experts > 1) + (outputs, inputs))


def products(x, weights, add=None):
    """What `linear` writes for each weight, all columns."""
    rows = len(x)
    act = activation(x, quantised=weights[0].quantised)
    out = [
        blank(rows, w.padded_outputs) if add is None else filled(a)
        for w, a in zip(weights, add or weights, strict=True)
    ]
    recorder = backend().recorder(rows)
    linear(recorder, act, weights, out, add=add is not None)
    run(recorder)
    return [host(buffer) for buffer in out]


def seen_by(packed, x):
    return quantised_rows(x) if packed.quantised else x


def check(format_name, outputs, inputs, rows):
    packed, dense = weight(format_name, outputs, inputs)
    x = random_rows(rows, inputs)
    [got] = products(x, [packed])
    seen = seen_by(packed, x)
    wanted, size = reference(seen, dense), np.abs(seen) @ np.abs(dense).T
    assert_close(got[:, :outputs], wanted, size, TOLERANCE)
    assert not got[:, outputs:].any()
    alone = np.concatenate([products(x[r : r + 1], [packed])[0] for r in range(rows)])
    same_bits(got, alone, f"{rows} rows against single ones")


@every_format
def test_linear_has_the_references_values_and_the_bits_of_single_rows(format_name):
    check(format_name, 20, 512, 3)


@pytest.mark.parametrize(
    ("format_name", "inputs"),
    [("Q4_0", 32), ("Q8_0", 96), ("Q5_1", 576), ("Q4_K", 2304), ("Q6_K", 2560), ("F32", 48), ("F16", 129), ("F32", 1)],
)  # fmt: skip
def test_widths_that_are_no_power_of_two(format_name, inputs):
    check(format_name, 9, inputs, 2)


@pytest.mark.parametrize(
    ("format_name", "inputs"),
    [
        ("Q8_0", 1056),
        ("Q4_0", 1056),
        ("Q4_1", 1088),
        ("Q5_0", 1056),
        ("Q5_1", 1056),
        ("IQ4_NL", 1056),
        ("Q4_K", 1280),
        ("Q5_K", 1280),
        ("Q6_K", 1280),
        ("IQ4_XS", 1280),
        ("Q6_K", 2304),
        ("Q2_K", 1280),
    ],
)
def test_a_window_has_the_bits_of_single_rows(format_name, inputs):
    """Rows too wide for the reader to quantise, widths that are no power of two."""
    packed, dense = weight(format_name, 16, inputs)
    x = random_rows(11, inputs)
    [got] = products(x, [packed])
    seen = quantised_rows(x)
    assert_close(got, reference(seen, dense), np.abs(seen) @ np.abs(dense).T, TOLERANCE)
    same_bits(got[:3], products(x[:3], [packed])[0])
    for row in (0, 7, 10):
        same_bits(got[row : row + 1], products(x[row : row + 1], [packed])[0])


def test_a_window_of_several_weights_and_one_that_adds():
    weights, dense = zip(*(weight("Q8_0", n, 1056, seed=n) for n in (16, 48, 32)), strict=True)
    x = random_rows(3, 1056)
    before = [random_rows(3, w.padded_outputs, seed=9) for w in weights]
    plain, added = products(x, weights), products(x, weights, add=before)
    seen = quantised_rows(x)
    for got, more, base, values in zip(plain, added, before, dense, strict=True):
        assert_close(got, reference(seen, values), np.abs(seen) @ np.abs(values).T, TOLERANCE)
        same_bits(more, base + got)


def test_narrow_rows_of_a_full_window():
    packed, dense = weight("Q4_K", 16, 256)
    x = random_rows(16, 256)
    [got] = products(x, [packed])
    seen = quantised_rows(x)
    assert_close(got, reference(seen, dense), np.abs(seen) @ np.abs(dense).T, TOLERANCE)
    same_bits(got[7:8], products(x[7:8], [packed])[0])


@every_format
def test_many_rows_are_multiplied_in_half_precision(format_name):
    """Tensor cores read float16: 1e-3 of the result's size. The rows' sizes differ a hundredfold, one block is zero."""
    inputs = 256 if QUANT_FORMATS[format_name].block_size == 256 else 96
    packed, dense = weight(format_name, 40, inputs)
    x = random_rows(19, inputs)
    [got] = products(x, [packed])
    wanted = reference(x, dense)
    error = np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert (error < 1e-3).all()
    before = random_rows(19, 40, seed=5)
    [added] = products(x, [packed], add=[before])
    assert_close(added, before + got, np.abs(before) + np.abs(got), 1e-6)


@pytest.mark.parametrize("format_name", ["Q8_0", "Q4_K", "Q6_K"])
def test_a_weight_may_be_unpacked_once_for_all_rows(monkeypatch, format_name):
    packed, dense = weight(format_name, 40, 512)
    x, before = random_rows(19, 512), random_rows(19, 40, seed=5)
    wanted = reference(x, dense)
    monkeypatch.setattr(triton_wide, "UNPACK_ROWS", 17)
    monkeypatch.setattr(triton_wide, "UNPACK_OUTPUTS", 8)
    [got], [added] = products(x, [packed]), products(x, [packed], add=[before])
    error = np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert (error < 1e-3).all()
    assert_close(added, before + got, np.abs(before) + np.abs(got), 1e-6)
    with monkeypatch.context() as narrow:
        narrow.setattr(triton_wide, "UNPACK_OUTPUTS", 256)
        [small] = products(x, [packed])
    assert_close(small, got, np.abs(got) + np.abs(wanted).max(), 1e-6)
    gate, up = weight(format_name, 64, 512)[0], weight(format_name, 64, 512, seed=2)[0]
    once = host(gated(gate, up, x / 30, 64, quantised=True).f32)
    monkeypatch.setattr(triton_wide, "UNPACK_ROWS", 1000)
    tiles = host(gated(gate, up, x / 30, 64, quantised=True).f32)
    assert np.linalg.norm(once - tiles) < 1e-4 * np.linalg.norm(tiles)


def test_weights_of_one_form_share_a_launch_and_others_have_their_own():
    kinds = (
        ("Q8_0", 24),
        ("Q8_0", 8),
        ("Q4_K", 16),
        ("Q8_0", 5),
        ("Q8_0", 40),
        ("Q8_0", 16),
        ("Q4_K", 8),
    )
    weights, dense = zip(
        *(weight(k, n, 256, seed=i) for i, (k, n) in enumerate(kinds)), strict=True
    )
    x = random_rows(2, 256)
    before = [random_rows(2, w.padded_outputs, seed=9) for w in weights]
    recorder = backend().recorder(2)
    out = [blank(2, w.padded_outputs) for w in weights]
    linear(recorder, activation(x, quantised=True), weights, out)
    assert len(recorder.steps) == 3
    run(recorder)
    seen = quantised_rows(x)
    added = products(x, weights, add=before)
    for buffer, more, base, values in zip(out, added, before, dense, strict=True):
        n = len(values)
        wanted, size = reference(seen, values), np.abs(seen) @ np.abs(values).T
        assert_close(host(buffer)[:, :n], wanted, size, TOLERANCE)
        same_bits(more[:, :n], base[:, :n] + host(buffer)[:, :n])


@pytest.mark.parametrize("format_name", ["Q4_0", "Q8_0", "Q6_K", "Q5_K", "Q2_K", "Q3_K"])
@pytest.mark.parametrize("fill", [0xFF, 0x80])
def test_the_largest_codes_do_not_overflow(format_name, fill):
    """Activations at +-127 times the scale, all bits of the weights alike."""
    quant = QUANT_FORMATS[format_name]
    x = np.where(np.arange(512) % 3 == 0, np.float32(-127), np.float32(127))[None].repeat(2, 0)
    blocks = np.full((8 * 512 // quant.block_size, quant.block_bytes), fill, np.uint8)
    rng = np.random.default_rng(0)
    for offset in quant.halves:
        half = rng.uniform(0.01, 0.02, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = half[:, None].view(np.uint8)
    packed = pack_weight(backend(), format_name, blocks, 8, 512)
    dense = np.asarray(dequantize(format_name, blocks), np.float32).reshape(8, 512)
    [got] = products(x, [packed])
    assert_close(got, reference(x, dense), np.abs(x) @ np.abs(dense).T, TOLERANCE)


def test_a_row_that_is_no_whole_number_of_blocks_is_refused():
    with pytest.raises(ShapeError, match="multiple of 256 columns, not 96"):
        pack_weight(backend(), "Q4_K", random_blocks("Q4_K", 8 * 256, 0), 8, 96)


def test_experts_are_packed_one_after_the_other():
    packed, dense = weight("Q5_K", 12, 256, experts=3)
    assert (packed.total, packed.padded_outputs) == (48, 16)
    for expert in range(3):
        blocks = random_blocks("Q5_K", 3 * 12 * 256, 1).reshape(3, 12, -1)[expert]
        one = pack_weight(backend(), "Q5_K", blocks.reshape(12, -1), 12, 256)
        x = random_rows(1, 256)
        [got] = products(x, [one])
        seen = quantised_rows(x)
        wanted = reference(seen, dense[expert])
        assert_close(got[:, :12], wanted, np.abs(seen) @ np.abs(dense[expert]).T, TOLERANCE)


def test_the_tile_of_a_weight_depends_on_nothing_but_its_form_and_width():
    for form in FORMS.values():
        for groups in (1, 2, 3, 16, 18, 64, 128, 384):
            tiles = [choose_tile(form, groups, n, 132) for n in (8, 512, 250_000)]
            assert len({replace(tile, outputs=1) for tile in tiles}) == 1
            for tile in tiles:
                assert tile.groups * tile.chunks >= groups
                assert tile.rows <= 32 and tile.rows & (tile.rows - 1) == 0


# ---- gated_linear


def gated(gate, up, x, outputs, quantised):
    out = blank_activation(len(x), outputs, quantised=quantised)
    recorder = backend().recorder(len(x))
    gated_linear(recorder, activation(x, quantised=gate.quantised), gate, up, out)
    run(recorder)
    return out


@pytest.mark.parametrize(
    ("gate", "up", "inputs", "outputs"),
    [
        ("Q4_K", "Q4_K", 256, 96),
        ("Q8_0", "Q8_0", 96, 32),
        ("Q4_K", "Q6_K", 512, 32),
        ("Q4_0", "Q8_0", 1056, 32),
        ("F32", "F16", 256, 32),
        ("F32", "F32", 64, 32),
    ],
)
def test_gated_linear(gate, up, inputs, outputs):
    a, a_values = weight(gate, outputs, inputs, seed=1)
    b, b_values = weight(up, outputs, inputs, seed=2)
    x = random_rows(3, inputs, scale=0.1)
    out = gated(a, b, x, outputs, True)
    seen = seen_by(a, x)
    wanted = gated_reference(seen, a_values, b_values)
    g, u = np.abs(seen) @ np.abs(a_values).T, np.abs(seen) @ np.abs(b_values).T
    exact_g, exact_u = (np.abs(reference(seen, w)) for w in (a_values, b_values))
    size = 1.1 * g * exact_u + exact_g * u + g * u * TOLERANCE + exact_g * exact_u
    assert_close(host(out.f32), wanted, size, TOLERANCE)
    alone = [gated(a, b, x[r : r + 1], outputs, True) for r in range(3)]
    same_bits(host(out.f32), np.concatenate([host(act.f32) for act in alone]))


@pytest.mark.parametrize(("gate", "up"), [("Q4_K", "Q4_K"), ("Q8_0", "Q6_K")])
def test_gated_linear_of_many_rows(gate, up):
    a, a_values = weight(gate, 96, 256, seed=1)
    b, b_values = weight(up, 96, 256, seed=2)
    x = random_rows(21, 256, scale=0.1)
    out = gated(a, b, x, 96, True)
    wanted, got = gated_reference(x, a_values, b_values), host(out.f32)
    assert np.linalg.norm(got - wanted) < 2e-3 * np.linalg.norm(wanted)


def test_wide_results_get_int8_blocks():
    """Narrow ones have none: the products that read them make them."""
    a, _ = weight("Q8_0", 1056, 64, seed=1)
    x = random_rows(2, 64)
    out = blank_activation(2, 1056, quantised=True)
    recorder = backend().recorder(2)
    gated_linear(recorder, activation(x, quantised=True), a, a, out)
    tape = recorder.finish()
    for _ in range(2):
        out.q8.array.fill_(255)
        tape.replay()
        backend().wait()
        codes, floats = q8_views(out.q8)
        wanted_codes, wanted_floats = int8_blocks(host(out.f32))
        difference = codes.cpu().contiguous().numpy().view(np.int8).astype(int) - wanted_codes
        assert np.abs(difference).max() <= 1 and (difference != 0).mean() < 0.01
        assert_close(floats.cpu().numpy(), wanted_floats, np.abs(wanted_floats).max(), 0.01)


def test_a_gated_product_feeds_a_narrow_product():
    """The int8 blocks that the reader makes are those it would have found."""
    a, _ = weight("Q8_0", 96, 64, seed=1)
    down, down_values = weight("Q4_0", 16, 96, seed=2)
    x = random_rows(3, 64, scale=0.1)
    hidden, out = blank_activation(3, 96, quantised=True), blank(3, 16)
    recorder = backend().recorder(3)
    gated_linear(recorder, activation(x, quantised=True), a, a, hidden)
    linear(recorder, hidden, [down], [out])
    run(recorder)
    h = quantised_rows(host(hidden.f32))
    assert_close(host(out), reference(h, down_values), np.abs(h) @ np.abs(down_values).T, TOLERANCE)
