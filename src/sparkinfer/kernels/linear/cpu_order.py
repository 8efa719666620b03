"""Sums of 4-bit codes times int8 activations for AVX2, instruction by instruction.

LLVM puts the products of one row after the other, each with the addition that waits for it. The queue of Zen 2's vector
unit then fills with what cannot start, and the multiplier idles for a fifth of the time (docs/LOG.md). Here a group of
weights meets all rows before the next, and a product is added some products later. The sums are of integers: the order
changes no bit.
"""

import llvmlite.binding as llvm
from llvmlite import ir

from sparkinfer.backend.simd import I8, I16, I64, constant_vector, vector

_REGISTERS = 16
_PLANE = 32  # bytes of four codes of 8 outputs, and of those 16 columns later in the high halves
_LEAST_TEMPORARIES, _MOST_TEMPORARIES = 4, 8  # to work at all; more delay gains nothing


def temporaries(rows: int, spare: int) -> int:
    """Registers besides the sums, the rows' chains, the mask and `spare` ones that LLVM needs to keep all chains."""
    left = _REGISTERS - 1 - spare - 2 * rows
    return max(_LEAST_TEMPORARIES, min(_MOST_TEMPORARIES, left))


class _Writer:
    """Writes the instructions; register r holds the sum of row r, the `count` ones from `rows` on are lent."""

    def __init__(self, rows: int, count: int) -> None:
        self.rows = rows
        self.delay = count - 3  # products that wait; two more hold codes, one is being made
        assert self.delay > 0, rows
        self.lines: list[str] = []
        self.free = list(range(rows, rows + count))
        self.waiting: list[tuple[int, int]] = []  # register and row of a product
        self.begun: set[int] = set()
        self.codes, self.record, self.mask = (f"${rows + count + place}" for place in range(3))

    def write(self, text: str) -> None:
        self.lines.append(text)

    def add(self, waiting: int) -> None:
        """Add the oldest products to their rows until `waiting` are left."""
        while len(self.waiting) > waiting:
            register, row = self.waiting.pop(0)
            self.write(f"vpaddw ${register}, ${row}, ${row}")
            self.free.append(register)

    def products(self, weights: int, group: int) -> None:
        """The codes in register `weights`, of columns 4 `group` .. 4 `group` + 3, with every row."""
        for row in range(self.rows):
            first = row not in self.begun
            register = row if first else self.free.pop(0)
            self.write(f"vpbroadcastd {32 * row + 4 * group}({self.record}), ${register}")
            self.write(f"vpmaddubsw ${register}, ${weights}, ${register}")
            if first:
                self.begun.add(row)
            else:
                self.waiting.append((register, row))
                self.add(self.delay)

    def plane(self, index: int, low: bool, high: bool) -> None:
        """The low halves of a plane (columns from 4 `index` on), the high ones (16 columns later), or both."""
        packed = self.free.pop(0)
        self.write(f"vmovdqu {_PLANE * index}({self.codes}), ${packed}")
        if low:
            codes = self.free.pop(0)
            self.write(f"vpand {self.mask}, ${packed}, ${codes}")
        if high:
            self.write(f"vpsrlw $$4, ${packed}, ${packed}")
        if low:
            self.products(codes, index)
            self.free.append(codes)
        if high:
            self.write(f"vpand {self.mask}, ${packed}, ${packed}")
            self.products(packed, index + 4)
        self.free.append(packed)


def pair_sums(
    builder: ir.IRBuilder,
    codes: ir.Value,
    record: ir.Value,
    rows: int,
    first: int,
    last: int,
    spare: int,
) -> list[ir.Value]:
    """Per row 16 int16: sums of pairs of products over the columns 4 `first` .. 4 `last` - 1 of a block of 32.

    `codes`: address of the block's codes for 8 outputs, `record` of the rows' int8 activations, 32 bytes a row.
    """
    llvm.initialize_native_asmparser()
    lent = temporaries(rows, spare)
    writer = _Writer(rows, lent)
    for index in range(4):
        low, high = (first <= group < last for group in (index, index + 4))
        if low or high:
            writer.plane(index, low, high)
    writer.add(0)
    count = rows + lent
    results = ir.LiteralStructType([vector(I16, 16)] * count)
    kind = ir.FunctionType(results, [I64, I64, vector(I8, 32)])
    constraints = ",".join(["=&x"] * count + ["r", "r", "x", "~{memory}"])
    mask = constant_vector(I8, 32, 15)
    found = builder.asm(kind, "\n".join(writer.lines), constraints, [codes, record, mask], True)
    return [builder.extract_value(found, row) for row in range(rows)]
