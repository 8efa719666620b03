"""Generated dot products of packed weight tiles with 1 to 8 quantised (or float) rows.

`tile_kernel(format, rows, isa)` compiles `f(weight, panel, blocks, out, stride, tiles, add)`:
  weight   address of the first tile (layout: `sparkinfer.quant.tiles`)
  panel    address of the activations of `rows` rows: one group of an `Activation.q8`, or float32 rows
  blocks   blocks of 32 columns (float formats: columns)
  out      address of the result of row 0 in the first tile; `stride` bytes to the next row
  tiles    how many tiles; add: 1 adds to what stands in `out`, 0 overwrites it

Pinned, hence equal bits for every row count and instruction set: integer sums are exact; each output is one chain of
fused multiply-adds over the blocks in order (scale part, then minimum part); float formats use two chains (even and
odd columns), added at the end. Rows never mix.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from sparkinfer.backend.compiled import Kernel, family
from sparkinfer.backend.instructions import NOTHING, WORD, instruction
from sparkinfer.backend.simd import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    call_llvm,
    constant_vector,
    fma_value,
    load_value,
    loop_over,
    prefetch_value,
    splat_value,
    store_value,
    variable,
    vector,
)
from sparkinfer.kernels.linear.cpu_order import pair_sums
from sparkinfer.quant.tiles import LAYOUTS, TileLayout

ISAS = ("vnni512", "avx2", "portable")
FORMATS = tuple(LAYOUTS)
_RECORD = 48
_PREFETCH = {
    "avx2": ({1: 1024, 2: 1536}, 2048, 0),
    "vnni512": ({}, 4096, 3),
    "portable": ({}, 1024, 3),
}  # bytes ahead by rows and with any others, locality (0: no reuse)


class _Emitter:
    """Emits LLVM for one (layout, rows, isa)."""

    def __init__(
        self,
        builder: ir.IRBuilder,
        layout: TileLayout,
        rows: int,
        isa: str,
        lanes: int,
        reuse: bool,
    ) -> None:
        self.reuse = reuse
        self.b, self.layout, self.rows, self.isa, self.lanes = builder, layout, rows, isa, lanes
        self.part = range(rows)  # the rows of this pass over a tile
        self.floats = vector(F32, lanes)

    # -- small helpers

    def i64(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def at(self, base: ir.Value, offset: int) -> ir.Value:
        return self.b.add(base, self.i64(offset)) if offset else base

    def widen(self, address: ir.Value, element: ir.Type) -> ir.Value:
        """`lanes` values of float16, int8 or uint8 (I8 with a negative flag) as float32."""
        return self.b.fpext(load_value(self.b, address, vector(element, self.lanes)), self.floats)

    def small_ints(self, address: ir.Value, signed: bool) -> ir.Value:
        value = load_value(self.b, address, vector(I8, self.lanes))
        return self.b.sitofp(value, self.floats) if signed else self.b.uitofp(value, self.floats)

    def row_scalar(self, record: ir.Value, offset: int, row: int, kind: ir.Type) -> ir.Value:
        """Field of one row in the activation record, in all lanes."""
        value = load_value(self.b, self.at(record, offset * self.rows + 4 * row), kind, 4)
        return splat_value(self.b, value, self.lanes)

    def codes_of_row(self, record: ir.Value, row: int, column: int) -> ir.Value:
        """4 int8 activations from `column` on, repeated in every lane, as int32 lanes."""
        value = load_value(self.b, self.at(record, 32 * row + column), I32, 4)
        return splat_value(self.b, value, self.lanes)

    # -- weight codes

    def weight_codes(self, codes: ir.Value) -> Callable[[int], ir.Value]:
        """A function of j = 0..7 that gives the unsigned codes 4j..4j+3 of every lane as bytes."""
        kind = vector(I8, 4 * self.lanes)
        plane = 4 * self.lanes

        def bytes_at(index: int) -> ir.Value:
            return load_value(self.b, self.at(codes, index * plane), kind)

        def const(value: int) -> ir.Constant:
            return constant_vector(I8, 4 * self.lanes, value)

        if self.layout.bits == 8:
            return bytes_at
        packed = [bytes_at(j) for j in range(4)]
        extra = [bytes_at(4 + i) for i in range(self.layout.bits - 4)]

        def codes_at(j: int) -> ir.Value:
            value = packed[j % 4]
            value = self.b.and_(value, const(15)) if j < 4 else self.b.lshr(value, const(4))
            if self.layout.bits == 5:
                return self.b.or_(value, self.moved(extra[0], 4 - j, 0x10))
            if self.layout.bits == 6:
                return self.b.or_(value, self.moved(extra[j // 4], 4 - 2 * (j % 4), 0x30))
            return value

        return codes_at

    def moved(self, value: ir.Value, left: int, mask: int) -> ir.Value:
        """Bytes shifted left by `left` (right when negative), then masked."""
        amount = constant_vector(I8, 4 * self.lanes, abs(left))
        shifted = (
            self.b.shl(value, amount)
            if left > 0
            else self.b.lshr(value, amount)
            if left < 0
            else value
        )
        return self.b.and_(shifted, constant_vector(I8, 4 * self.lanes, mask))

    # -- integer dot products of one block

    def group_dots(
        self, record: ir.Value, codes: ir.Value, first: int, last: int
    ) -> list[ir.Value]:
        """Per row: int32 sums over columns 4*first .. 4*last-1 of (code - zero) * activation."""
        if self.ordered:
            sums = self.ordered_dots(record, codes, first, last)
        else:
            sums = self.raw_dots(record, self.weight_codes(codes), first, last)
        if not self.layout.zero or self.exact_signed:
            return sums
        zero = constant_vector(I32, self.lanes, self.layout.zero)
        return [
            self.b.sub(total, self.b.mul(self.activation_sum(record, row, first, last), zero))
            for row, total in zip(self.part, sums, strict=True)
        ]

    @property
    def ordered(self) -> bool:
        """Whether the dot products are written out (`cpu_order`); one or two rows wait for memory, not for them."""
        return self.isa == "avx2" and self.layout.bits == 4 and self.rows > 2

    @property
    def passes(self) -> list[range]:
        """The rows that go over a tile together: with six or more, sums and chains need more than the 16 registers."""
        if not self.ordered or self.rows < 6:
            return [range(self.rows)]
        half = (self.rows + 1) // 2
        return [range(half), range(half, self.rows)]

    @property
    def exact_signed(self) -> bool:
        """The AVX2 form multiplies 8-bit weights as signed numbers, so no zero point is left to subtract."""
        return self.isa == "avx2" and self.layout.bits == 8

    def activation_sum(self, record: ir.Value, row: int, first: int, last: int) -> ir.Value:
        halves = [
            self.row_scalar(record, 36 + 4 * half, row, I32)
            for half in range(first // 4, -(-last // 4))
        ]
        return self.b.add(*halves) if len(halves) == 2 else halves[0]

    def raw_dots(
        self, record: ir.Value, codes_at: Callable[[int], ir.Value], first: int, last: int
    ) -> list[ir.Value]:
        if self.isa == "avx2":
            return (self.signed_dots if self.layout.bits == 8 else self.pair_dots)(
                record, codes_at, first, last
            )
        sums: list[ir.Value] = [constant_vector(I32, self.lanes, 0)] * self.rows
        dot = self.vnni_dot if self.isa == "vnni512" else self.portable_dot
        for j in range(first, last):
            weights = self.b.bitcast(codes_at(j), vector(I32, self.lanes))
            for row in range(self.rows):
                sums[row] = dot(sums[row], weights, self.codes_of_row(record, row, 4 * j))
        return sums

    def vnni_dot(self, total: ir.Value, weights: ir.Value, codes: ir.Value) -> ir.Value:
        return call_llvm(
            self.b, "llvm.x86.avx512.vpdpbusd.512", vector(I32, 16), [total, weights, codes]
        )

    def portable_dot(self, total: ir.Value, weights: ir.Value, codes: ir.Value) -> ir.Value:
        """Sum of four unsigned x signed byte products per lane in plain vector arithmetic."""
        for byte in range(4):
            up = constant_vector(I32, self.lanes, 24 - 8 * byte)
            down = constant_vector(I32, self.lanes, 24)
            weight = self.b.lshr(self.b.shl(weights, up), down)
            code = self.b.ashr(self.b.shl(codes, up), down)
            total = self.b.add(total, self.b.mul(weight, code))
        return total

    def ordered_dots(
        self, record: ir.Value, codes: ir.Value, first: int, last: int
    ) -> list[ir.Value]:
        """AVX2, codes of four bits: all pairs of a block can be summed in int16."""
        start, rows = self.at(record, 32 * self.part.start), len(self.part)
        plain = not self.layout.zero and not self.layout.sub_scales
        pairs = pair_sums(self.b, codes, start, rows, first, last, 1 if plain else 2)
        return [self.sum_of_pairs(pair) for pair in pairs]

    def sum_of_pairs(self, pairs: ir.Value) -> ir.Value:
        ones = constant_vector(I16, 2 * self.lanes, 1)
        return call_llvm(self.b, "llvm.x86.avx2.pmadd.wd", vector(I32, self.lanes), [pairs, ones])

    def pair_dots(
        self, record: ir.Value, codes_at: Callable[[int], ir.Value], first: int, last: int
    ) -> list[ir.Value]:
        """AVX2, codes of at most 6 bits: pairs summed in int16, widened before they could overflow."""
        limit = 32767 // (2 * ((1 << self.layout.bits) - 1) * 127)
        wide = vector(I16, 2 * self.lanes)
        totals: list[ir.Value] = []
        for start in range(first, last, limit):
            narrow: list[ir.Value] = []
            for j in range(start, min(last, start + limit)):
                weights = codes_at(j)
                for row in range(self.rows):
                    codes = self.b.bitcast(
                        self.codes_of_row(record, row, 4 * j), vector(I8, 4 * self.lanes)
                    )
                    pair = call_llvm(self.b, "llvm.x86.avx2.pmadd.ub.sw", wide, [weights, codes])
                    if j == start:
                        narrow.append(pair)
                    else:
                        narrow[row] = self.b.add(narrow[row], pair)
            parts = [self.sum_of_pairs(n) for n in narrow]
            totals = (
                parts
                if not totals
                else [self.b.add(t, p) for t, p in zip(totals, parts, strict=True)]
            )
        return totals

    def signed_dots(
        self, record: ir.Value, codes_at: Callable[[int], ir.Value], first: int, last: int
    ) -> list[ir.Value]:
        """AVX2, 8-bit weights: |w| times the activation with the sign of w; a pair is at most 128 * 127 * 2."""
        bytes_ = vector(I8, 4 * self.lanes)
        flip = constant_vector(I8, 4 * self.lanes, -128)
        totals: list[ir.Value] = [constant_vector(I32, self.lanes, 0)] * self.rows
        for j in range(first, last):
            weights = self.b.xor(codes_at(j), flip)
            size = call_llvm(self.b, "llvm.x86.avx2.psign.b", bytes_, [weights, weights])
            for row in range(self.rows):
                codes = self.b.bitcast(self.codes_of_row(record, row, 4 * j), bytes_)
                signed = call_llvm(self.b, "llvm.x86.avx2.psign.b", bytes_, [codes, weights])
                pair = call_llvm(
                    self.b, "llvm.x86.avx2.pmadd.ub.sw", vector(I16, 2 * self.lanes), [size, signed]
                )
                totals[row] = self.b.add(totals[row], self.sum_of_pairs(pair))
        return totals

    # -- one block of 32 columns

    def block(
        self, header: ir.Value, sub: ir.Value, codes: ir.Value, record: ir.Value, chains: list[Any]
    ) -> None:
        """Add one block to the chains of the pass. `sub`: index of the block in its scale record."""
        layout = self.layout
        if self.part.start == 0:
            self.prefetch(codes)
        per_block = 32 // layout.group
        size = 8 // per_block
        dots = [self.group_dots(record, codes, g * size, (g + 1) * size) for g in range(per_block)]
        # Only after the dot products, which leave no register for them.
        scale = self.widen(header, F16)
        minimum = self.widen(self.at(header, 2 * self.lanes), F16) if layout.minimum else None
        scales, minima = self.group_scales(header, sub, per_block, minimum)
        if len(scales) == 1:
            scale = self.b.fmul(scale, scales[0])
        for place, row in enumerate(self.part):
            chain = chains[row]
            value = self.b.sitofp(dots[0][place], self.floats)
            if len(scales) == 2:
                second = self.b.sitofp(dots[1][place], self.floats)
                value = fma_value(self.b, second, scales[1], self.b.fmul(value, scales[0]))
            step = self.b.fmul(scale, self.row_scalar(record, 32, row, F32))
            total = fma_value(self.b, value, step, self.b.load(chain))
            for index, low in enumerate(minima):
                total = fma_value(
                    self.b, low, self.minimum_factor(record, row, index, len(minima)), total
                )
            self.b.store(total, chain)

    def group_scales(
        self, header: ir.Value, sub: ir.Value, per_block: int, minimum: ir.Value | None
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        """Factors of the block's groups and the (signed) minima to add, as float32 lanes."""
        layout, lanes = self.layout, self.lanes
        if not layout.sub_scales:
            return [], [minimum] if minimum is not None else []
        first = self.b.mul(sub, self.i64(per_block * lanes))
        base = self.at(self.b.add(header, first), (2 + 2 * layout.minimum) * lanes)
        scales = [self.small_ints(self.at(base, g * lanes), signed=True) for g in range(per_block)]
        if minimum is None:
            return scales, []
        lows = self.at(base, layout.groups * lanes)
        negative = self.b.fneg(minimum)
        minima = [
            self.b.fmul(negative, self.small_ints(self.at(lows, g * lanes), signed=False))
            for g in range(per_block)
        ]
        return scales, minima

    def minimum_factor(self, record: ir.Value, row: int, index: int, count: int) -> ir.Value:
        """d * (sum of the activation codes that a minimum covers)."""
        if count == 1:
            return self.row_scalar(record, 44, row, F32)
        total = self.b.sitofp(self.row_scalar(record, 36 + 4 * index, row, I32), self.floats)
        return self.b.fmul(total, self.row_scalar(record, 32, row, F32))

    def prefetch(self, codes: ir.Value) -> None:
        """Ask for the stream ahead: measured gains at every width, with AVX2 and with VNNI (docs/LOG.md)."""
        per_block = self.layout.record_bytes(self.lanes) // self.layout.blocks
        by_rows, others, locality = _PREFETCH[self.isa]
        ahead = by_rows.get(self.rows, others)
        locality = 3 if self.reuse else locality
        for line in range(0, per_block, 64):
            prefetch_value(self.b, self.at(codes, ahead + line), locality)

    # -- whole tiles

    def quantised_tile(
        self, weight: ir.Value, panel: ir.Value, blocks: ir.Value, chains: list[Any]
    ) -> None:
        layout, b = self.layout, self.b
        record_bytes, scale_bytes = layout.record_bytes(self.lanes), layout.scale_bytes(self.lanes)
        with loop_over(b, b.udiv(blocks, self.i64(layout.blocks))) as outer:
            header = b.add(weight, b.mul(outer, self.i64(record_bytes)))
            codes = self.at(header, scale_bytes)
            first = b.mul(outer, self.i64(layout.blocks))
            with loop_over(b, self.i64(layout.blocks)) as inner:
                index = b.add(first, inner)
                record = b.add(panel, b.mul(index, self.i64(_RECORD * self.rows)))
                code = b.add(codes, b.mul(inner, self.i64(layout.code_bytes(self.lanes))))
                self.block(header, inner, code, record, chains)

    def float_tile(
        self, weight: ir.Value, panel: ir.Value, columns: ir.Value, chains: list[Any]
    ) -> None:
        """Two chains a row, even and odd columns; the second half of `chains` holds the odd ones."""
        b, item = self.b, self.layout.bits // 8
        row_bytes = b.and_(b.add(b.mul(columns, self.i64(4)), self.i64(63)), self.i64(-64))
        with loop_over(b, b.lshr(b.add(columns, self.i64(1)), self.i64(1))) as index:
            for odd in range(2):
                column = b.add(b.shl(index, self.i64(1)), self.i64(odd))
                with b.if_then(b.icmp_unsigned("<", column, columns)):
                    value = self.float_lanes(
                        b.add(weight, b.mul(column, self.i64(item * self.lanes)))
                    )
                    for row in range(self.rows):
                        source = b.add(
                            b.add(panel, b.mul(row_bytes, self.i64(row))),
                            b.shl(column, self.i64(2)),
                        )
                        x = splat_value(b, load_value(b, source, F32, 4), self.lanes)
                        chain = chains[row + odd * self.rows]
                        b.store(fma_value(b, value, x, b.load(chain)), chain)
        for row in range(self.rows):
            b.store(b.fadd(b.load(chains[row]), b.load(chains[row + self.rows])), chains[row])

    def float_lanes(self, address: ir.Value) -> ir.Value:
        if self.layout.floats == "f32":
            return load_value(self.b, address, self.floats, 4)
        if self.layout.floats == "f16":
            return self.widen(address, F16)
        bits = self.b.zext(
            load_value(self.b, address, vector(I16, self.lanes), 2), vector(I32, self.lanes)
        )
        return self.b.bitcast(self.b.shl(bits, constant_vector(I32, self.lanes, 16)), self.floats)

    def loop(
        self, weight: ir.Value, panel: ir.Value, blocks: ir.Value, out: ir.Value, stride: ir.Value, tiles: ir.Value,
        add: ir.Value,
    ) -> None:  # fmt: skip
        b, layout = self.b, self.layout
        n_chains = self.rows * (2 if layout.floats else 1)
        chains = [variable(b, self.floats) for _ in range(n_chains)]
        size = self.tile_bytes(blocks)
        with loop_over(b, tiles) as index:
            for chain in chains:
                b.store(constant_vector(F32, self.lanes, 0.0), chain)
            tile = b.add(weight, b.mul(index, size))
            for rows in self.passes:
                self.part = rows
                (self.float_tile if layout.floats else self.quantised_tile)(
                    tile, panel, blocks, chains
                )
            target = b.add(out, b.mul(index, self.i64(4 * self.lanes)))
            with b.if_else(b.icmp_signed("!=", add, self.i64(0))) as (adding, writing):
                with adding:
                    self.write(target, stride, chains, add=True)
                with writing:
                    self.write(target, stride, chains, add=False)

    def write(self, target: ir.Value, stride: ir.Value, chains: list[Any], add: bool) -> None:
        for row in range(self.rows):
            address = self.b.add(target, self.b.mul(stride, self.i64(row)))
            value = self.b.load(chains[row])
            if add:
                value = self.b.fadd(load_value(self.b, address, self.floats, 4), value)
            store_value(self.b, address, value, 4)

    def tile_bytes(self, blocks: ir.Value) -> ir.Value:
        """`TileLayout.tile_bytes` on a run-time number of blocks (columns for float formats)."""
        b, layout = self.b, self.layout
        if layout.floats:
            count, size = blocks, self.lanes * layout.bits // 8
        else:
            count, size = b.udiv(blocks, self.i64(layout.blocks)), layout.record_bytes(self.lanes)
        return b.and_(b.add(b.mul(count, self.i64(size)), self.i64(63)), self.i64(-64))


@instruction(NOTHING, *[WORD] * 7, literals=5)
def _tile_loop(
    builder: Any, layout: int, rows: int, isa: int, lanes: int, reuse: int, *args: Any
) -> None:
    """The loop over tiles; `layout` and `isa` are places in FORMATS and ISAS."""
    emitter = _Emitter(builder, LAYOUTS[FORMATS[layout]], rows, ISAS[isa], lanes, bool(reuse))
    emitter.loop(*args)


@family
def tile_kernel(format_name: str, rows: int, isa: str, lanes: int, reuse: bool = False) -> Kernel:
    """The compiled tile kernel for `rows` (1..8) rows; see the module's text for its arguments.

    `reuse`: the weights are small and read again soon, so they should stay in cache.
    """
    layout_index, isa_index, again = FORMATS.index(format_name), ISAS.index(isa), int(reuse)

    def tiles_of(weight, panel, blocks, out, stride, tiles, add):  # type: ignore[no-untyped-def]
        _tile_loop(
            layout_index, rows, isa_index, lanes, again, weight, panel, blocks, out, stride, tiles, add,
        )  # fmt: skip

    return Kernel(tiles_of, 7)
