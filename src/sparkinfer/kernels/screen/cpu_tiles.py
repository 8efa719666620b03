"""Generated products of a coarse head's tiles with 1 to 8 rows.

`coarse_kernel(rows, isa, lanes)` compiles `f(weight, panel, steps, out, stride, tiles, unused)` with the arguments of
`linear.cpu_tiles`, but for the form of weights and activations. A step is 64 columns:
  weight   `lanes` float16 scales, then the codes 0 .. 15 (8 is zero) of two blocks of 32 columns, as in `quant.tiles`
  panel    of R rows R x 64 int8 codes, R float32 scales d, R words of 32 bits with what a sum begins at: -8 times the
           sum of the codes, of the first and last two of every four columns in 16 bits each where sums are of 16 bits

So the zero costs nothing, and with AVX2 one widening serves 64 columns: products are summed modulo 2^16, and the sum of
32 products of a weight's -8 .. 7 and a code fits. Three rows at most go over a tile together, because more than their
sums, chains and products do not fit in 16 registers; the marks between groups of columns keep LLVM from loading ahead.
"""

from itertools import pairwise
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
from sparkinfer.kernels.linear.cpu_tiles import _PREFETCH, ISAS, _Emitter
from sparkinfer.quant.tiles import LAYOUTS

COLUMNS = 64  # of a step
_TOGETHER = {"avx2": 3, "vnni512": 8, "portable": 2}


def scale_and_code_bytes(lanes: int) -> int:
    """Bytes of a step of a tile."""
    return lanes * (2 + COLUMNS // 2)


def record_bytes(rows: int) -> int:
    """Bytes of a step of a panel."""
    return rows * (COLUMNS + 8)


def split(rows: int, most: int) -> list[range]:
    """Passes over a tile, as even as can be."""
    count = -(-rows // most)
    edges = [rows * place // count for place in range(count + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


class _CoarseEmitter(_Emitter):
    """Emits LLVM for one (rows, isa)."""

    def pass_over(
        self, tile: ir.Value, panel: ir.Value, steps: ir.Value, chains: list[Any]
    ) -> None:
        b = self.b
        with loop_over(b, steps) as index:
            header = b.add(tile, b.mul(index, self.i64(scale_and_code_bytes(self.lanes))))
            record = b.add(panel, b.mul(index, self.i64(record_bytes(self.rows))))
            if self.part.start == 0:
                self.prefetch(header)
            sums = self.sums(self.at(header, 2 * self.lanes), record)
            scale = self.widen(header, F16)
            for row, chain, total in zip(self.part, chains, sums, strict=True):
                step = b.fmul(scale, self.field(record, COLUMNS, row, F32))
                value = fma_value(b, b.sitofp(total, self.floats), step, b.load(chain))
                b.store(value, chain)

    def prefetch(self, codes: ir.Value) -> None:
        """Ask for the stream ahead, as for other products."""
        by_rows, others, locality = _PREFETCH[self.isa]
        ahead = by_rows.get(self.rows, others)
        for line in range(0, scale_and_code_bytes(self.lanes), 64):
            prefetch_value(self.b, self.at(codes, ahead + line), locality)

    def field(self, record: ir.Value, offset: int, row: int, kind: ir.Type) -> ir.Value:
        """Of one row, in all lanes; `offset`: bytes a row that stand before."""
        value = load_value(self.b, self.at(record, offset * self.rows + 4 * row), kind, 4)
        return splat_value(self.b, value, self.lanes)

    def codes(self, record: ir.Value, row: int, column: int) -> ir.Value:
        value = load_value(self.b, self.at(record, COLUMNS * row + column), I32, 4)
        return splat_value(self.b, value, self.lanes)

    def sums(self, codes: ir.Value, record: ir.Value) -> list[ir.Value]:
        """Per row of the pass int32 sums of (code - 8) * activation."""
        narrow = self.isa == "avx2"
        wide, bytes_ = vector(I16, 2 * self.lanes), vector(I8, 4 * self.lanes)
        totals: list[ir.Value] = [self.field(record, COLUMNS + 4, row, I32) for row in self.part]
        if narrow:
            totals = [self.b.bitcast(total, wide) for total in totals]
        for block in range(COLUMNS // 32):
            for plane in range(4):
                place = (4 * block + plane) * 4 * self.lanes
                packed = load_value(self.b, self.at(codes, place), bytes_)
                for high in range(2):
                    weights = self.half(packed, high)
                    if narrow:
                        self.mark()
                    for index, row in enumerate(self.part):
                        x = self.codes(record, row, 32 * block + 16 * high + 4 * plane)
                        if narrow:
                            both = [weights, self.b.bitcast(x, bytes_)]
                            pair = call_llvm(self.b, "llvm.x86.avx2.pmadd.ub.sw", wide, both)
                            totals[index] = self.b.add(totals[index], pair)
                        else:
                            dot = self.vnni_dot if self.isa == "vnni512" else self.portable_dot
                            words = self.b.bitcast(weights, vector(I32, self.lanes))
                            totals[index] = dot(totals[index], words, x)
        return [self.sum_of_pairs(total) for total in totals] if narrow else totals

    def half(self, packed: ir.Value, high: int) -> ir.Value:
        """The low or high codes of bytes."""
        amount = constant_vector(I8, 4 * self.lanes, 4)
        if high:
            return self.b.lshr(packed, amount)
        return self.b.and_(packed, constant_vector(I8, 4 * self.lanes, 15))

    def mark(self) -> None:
        """No instruction, but loads do not move over it."""
        kind = ir.FunctionType(ir.VoidType(), [])
        self.b.call(ir.InlineAsm(kind, "", "~{memory}", side_effect=True), [])

    def loop(
        self, weight: ir.Value, panel: ir.Value, blocks: ir.Value, out: ir.Value, stride: ir.Value, tiles: ir.Value,
        add: ir.Value,
    ) -> None:  # fmt: skip
        b = self.b
        size = b.mul(blocks, self.i64(scale_and_code_bytes(self.lanes)))
        size = b.and_(b.add(size, self.i64(63)), self.i64(-64))
        passes = split(self.rows, _TOGETHER[self.isa])
        most = max(len(rows) for rows in passes)
        places = [variable(b, self.floats) for _ in range(most)]
        with loop_over(b, tiles) as index:
            tile = b.add(weight, b.mul(index, size))
            target = b.add(out, b.mul(index, self.i64(4 * self.lanes)))
            for rows in passes:
                self.part, chains = rows, places[: len(rows)]
                for chain in chains:
                    b.store(constant_vector(F32, self.lanes, 0.0), chain)
                self.pass_over(tile, panel, blocks, chains)
                for row, chain in zip(rows, chains, strict=True):
                    address = b.add(target, b.mul(stride, self.i64(row)))
                    store_value(b, address, b.load(chain), 4)


@instruction(NOTHING, *[WORD] * 7, literals=3)
def _coarse_loop(builder: Any, rows: int, isa: int, lanes: int, *args: Any) -> None:
    """The loop over tiles; `isa` is a place in ISAS."""
    _CoarseEmitter(builder, LAYOUTS["Q4_0"], rows, ISAS[isa], lanes, False).loop(*args)


@family
def coarse_kernel(rows: int, isa: str, lanes: int) -> Kernel:
    """The compiled kernel for `rows` (1 .. 8) rows; see the module's text for its arguments."""
    isa_index = ISAS.index(isa)

    def coarse_tiles(weight, panel, steps, out, stride, tiles, unused):  # type: ignore[no-untyped-def]
        _coarse_loop(rows, isa_index, lanes, weight, panel, steps, out, stride, tiles, unused)

    return Kernel(coarse_tiles, 7)
