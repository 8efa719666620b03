"""linear and gated_linear: every format, instruction set and number of rows. Tolerance: 2e-6 of the sum of |terms|."""

import numpy as np
import pytest
from kernel_machine import (
    ISAS,
    assert_close,
    assert_quantised,
    codes_of,
    machine,
    random_blocks,
    random_rows,
    same_bits,
)

from sparkinfer.kernels.gated_linear import gated_linear, pack_pair
from sparkinfer.kernels.gated_linear.reference import gated_linear as gated_reference
from sparkinfer.kernels.linear import linear
from sparkinfer.kernels.linear.reference import linear as reference
from sparkinfer.kernels.linear.reference import quantised_rows
from sparkinfer.quant.tiles import LAYOUTS

TOLERANCE = 2e-6
FORMATS = tuple(LAYOUTS)
ROWS = (1, 3, 8, 11, 17)  # compiles the kernels of 1, 3 and 8 rows
ALL_ROWS = (*range(1, 18), 24, 64)
INPUTS = 512
every_isa = pytest.mark.parametrize("isa", ISAS)
every_format = pytest.mark.parametrize("format_name", FORMATS)


def run_linear(bench, format_name, x, outputs, add):
    """Two products of one activation in one phase, and what numpy says of them with the size of their terms."""
    rows, layout = len(x), LAYOUTS[format_name]
    weights = [bench.weight(format_name, n, x.shape[1], seed=n) for n in outputs]
    act = bench.input(x, not layout.floats)
    out = [bench.blank(rows, packed.padded_outputs) for packed, _ in weights]
    before = [random_rows(rows, buffer.width, seed=9) for buffer in out]
    if add:
        for buffer, values in zip(out, before, strict=True):
            buffer.array[:] = values
    bench.run(rows, lambda r: linear(r, act, [packed for packed, _ in weights], out, add=add))
    seen = x if layout.floats else quantised_rows(x)
    results = []
    for buffer, values, (_, dense) in zip(out, before, weights, strict=True):
        n = len(dense)
        wanted, size = reference(seen, dense), np.abs(seen) @ np.abs(dense).T
        if add:
            wanted, size = wanted + values[:, :n], size + np.abs(values[:, :n])
        results.append((buffer.array, wanted, size))
    return results


def check(isa, format_name, all_rows):
    bench = machine(isa)
    x = random_rows(max(all_rows), INPUTS)
    alone = [run_linear(bench, format_name, x[r : r + 1], (37, 64), False) for r in range(len(x))]
    for rows in all_rows:
        for add in (False, True):
            results = run_linear(bench, format_name, x[:rows], (37, 64), add)
            for index, (got, wanted, size) in enumerate(results):
                assert_close(got[:, : wanted.shape[1]], wanted, size, TOLERANCE)
                if not add:
                    single = np.concatenate([a[index][0] for a in alone[:rows]])
                    same_bits(got, single, f"{rows} rows against single ones")


@every_isa
@every_format
def test_linear_has_the_references_values_and_the_bits_of_single_rows(isa, format_name):
    check(isa, format_name, ROWS)


@pytest.mark.long
@every_isa
@every_format
def test_linear_at_every_number_of_rows(isa, format_name):
    check(isa, format_name, ALL_ROWS)


@pytest.mark.parametrize("format_name", ["Q4_0", "Q4_1", "Q2_K"])
def test_products_written_out_at_every_number_of_rows(format_name):
    """Each has another use of the registers (`cpu_order`); Q2_K's groups take half of a block."""
    check("avx2", format_name, (*range(1, 8), 15))


@every_format
def test_every_instruction_set_has_the_same_bits(format_name):
    x = random_rows(8, INPUTS)
    results = {}
    for isa in ISAS:
        try:
            results[isa] = run_linear(machine(isa), format_name, x, (37, 64), False)
        except pytest.skip.Exception:
            continue
    first, *others = results.values()
    for other in others:
        for (got, wanted, _), (base, _, _) in zip(other, first, strict=True):
            n = wanted.shape[1]
            same_bits(got[:, :n], base[:, :n], f"{list(results)}")


@pytest.mark.parametrize("format_name", ["F32", "F16"])
@pytest.mark.parametrize("inputs", [1, 15, 48, 129])
def test_a_float_weight_takes_any_number_of_inputs(format_name, inputs):
    x = random_rows(3, inputs)
    for got, wanted, size in run_linear(machine(), format_name, x, (5,), False):
        assert_close(got[:, :5], wanted, size, TOLERANCE)


@pytest.mark.parametrize("format_name", ["Q4_0", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_codes_do_not_overflow(isa, format_name):
    """All activations at +-127 times the scale, all weights at the ends of their range."""
    bench, spec = machine(isa), LAYOUTS[format_name]
    x = np.where(np.arange(INPUTS) % 3 == 0, np.float32(-127), np.float32(127))[None].repeat(3, 0)
    rng = np.random.default_rng(0)
    for fill in (0x00, 0xFF, 0x80, 0x7F):
        packed, _ = bench.weight(format_name, 32, INPUTS)
        from sparkinfer.kernels.linear.weights import pack_weight
        from sparkinfer.quant.formats import QUANT_FORMATS, dequantize

        quant = QUANT_FORMATS[format_name]
        blocks = np.full((32 * INPUTS // quant.block_size, quant.block_bytes), fill, np.uint8)
        for offset in quant.halves:
            half = rng.uniform(0.01, 0.02, len(blocks)).astype(np.float16)
            blocks[:, offset : offset + 2] = half[:, None].view(np.uint8)
        packed = pack_weight(format_name, blocks, 32, INPUTS, bench.backend.isa.lanes, bench.arena)
        dense = np.asarray(dequantize(format_name, blocks), np.float32).reshape(32, INPUTS)
        out = bench.blank(3, packed.padded_outputs)
        act = bench.input(x, not spec.floats)
        bench.run(3, lambda r, p=packed, o=out, a=act: linear(r, a, [p], [o]))
        wanted = reference(quantised_rows(x), dense)
        assert_close(out.array[:, :32], wanted, np.abs(x) @ np.abs(dense).T, TOLERANCE)


def run_gated(bench, gate_format, up_format, x, outputs, quantised):
    rows = len(x)
    gate, gate_values = bench.weight(gate_format, outputs, x.shape[1], seed=1)
    up, up_values = bench.weight(up_format, outputs, x.shape[1], seed=2)
    out = bench.blank_activation(rows, outputs, quantised=quantised)
    act = bench.input(x, gate.quantised)
    bench.run(rows, lambda r: gated_linear(r, act, gate, up, out))
    seen = quantised_rows(x) if gate.quantised else x
    g = np.abs(seen) @ np.abs(gate_values).T
    u = np.abs(seen) @ np.abs(up_values).T
    exact_g, exact_u = (np.abs(reference(seen, w)) for w in (gate_values, up_values))
    size = 1.1 * g * exact_u + exact_g * u + g * u * TOLERANCE + exact_g * exact_u
    return out, gated_reference(seen, gate_values, up_values), size


@every_isa
@every_format
def test_gated_linear(isa, format_name):
    bench, x = machine(isa), random_rows(17, 256, scale=0.1)
    alone = [run_gated(bench, format_name, format_name, x[r : r + 1], 96, False) for r in range(17)]
    for rows in ROWS:
        out, wanted, size = run_gated(bench, format_name, format_name, x[:rows], 96, False)
        assert_close(out.f32.array, wanted, size, TOLERANCE)
        single = np.concatenate([a[0].f32.array for a in alone[:rows]])
        same_bits(out.f32.array, single, f"{rows} rows against single ones")
        coded, _, _ = run_gated(bench, format_name, format_name, x[:rows], 96, True)
        assert_quantised(coded, single)


@every_isa
@every_format
def test_a_pair_packed_in_turn_has_the_bits_of_two_matrices(isa, format_name):
    bench, x, shape = machine(isa), random_rows(17, 256, scale=0.1), (96, 256)
    quantised = not LAYOUTS[format_name].floats
    blocks = tuple(random_blocks(format_name, shape[0] * shape[1], seed) for seed in (1, 2))
    for rows in ROWS:
        apart, _, _ = run_gated(bench, format_name, format_name, x[:rows], shape[0], False)
        pair = pack_pair(bench.backend, format_name, blocks, *shape)
        out = bench.blank_activation(rows, shape[0], quantised=False)
        act = bench.input(x[:rows], quantised)
        bench.run(rows, lambda r, p=pair, o=out, a=act: gated_linear(r, a, *p, o))
        same_bits(out.f32.array, apart.f32.array, f"{rows} rows")


def test_nothing_else_reads_a_pair():
    bench = machine()
    blocks = (random_blocks("Q8_0", 32 * 64, 0),) * 2
    gate, up = pack_pair(bench.backend, "Q8_0", blocks, 32, 64)
    act, out = bench.input(random_rows(1, 64), True), bench.blank_activation(1, 32, quantised=False)
    with pytest.raises(AssertionError):
        bench.run(1, lambda r: linear(r, act, [gate], [out.f32]))
    with pytest.raises(AssertionError, match="different pairs"):
        bench.run(1, lambda r: gated_linear(r, act, up, gate, out))


@pytest.mark.parametrize(("gate", "up"), [("Q4_K", "Q6_K"), ("Q4_0", "Q8_0"), ("F32", "F16")])
def test_gate_and_up_may_have_different_formats(gate, up):
    out, wanted, size = run_gated(machine(), gate, up, random_rows(3, 256, scale=0.1), 32, False)
    assert_close(out.f32.array, wanted, size, TOLERANCE)


def test_codes_are_read_back_as_they_were_written():
    """The helper of these tests against `quantised_rows`, the specification."""
    x = random_rows(11, 96)
    values, scales = codes_of(machine().input(x, True), 11, 96)
    assert_close(values, quantised_rows(x), scales, 1e-5)


@pytest.mark.parametrize("format_name", ["Q4_K", "Q8_0", "F16"])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_a_large_matrix_is_cut_into_chunks_that_any_thread_may_take(format_name, rows):
    """1000 x 2048: tens of chunks, several batches of tiles each when there are several groups of rows."""
    x = random_rows(rows, 2048)
    results = []
    for threads in (1, 2, 3):
        bench = machine(threads=threads)
        [(got, wanted, size)] = run_linear(bench, format_name, x, (1000,), False)
        assert_close(got[:, :1000], wanted, size, TOLERANCE)
        results.append(got[:, :1000])
    same_bits(results[1], results[0], "2 threads")
    same_bits(results[2], results[0], "3 threads")


@pytest.mark.parametrize("rows", [1, 17])
def test_a_large_gated_product_is_cut_into_chunks(rows):
    x, results = random_rows(rows, 1024, scale=0.1), []
    for threads in (1, 3):
        bench = machine(threads=threads)
        out, wanted, size = run_gated(bench, "Q4_K", "Q6_K", x, 1056, False)
        assert_close(out.f32.array, wanted, size, TOLERANCE)
        coded, _, _ = run_gated(bench, "Q4_K", "Q6_K", x, 1056, True)
        assert_quantised(coded, out.f32.array)
        results.append(out.f32.array)
    same_bits(results[1], results[0])
