"""Explicit SIMD for Numba: a 16-lane float32 vector type and the few scalar memory operations the CPU kernels need.

Kernels address memory by integer addresses and work on `f32x16` values. LLVM splits a vector over the registers that
the machine has, so the same source gives the same bits on AVX-512, AVX2 and anything else: lanes, the order of
additions and every fused multiply-add are spelled out, nothing is left to a reassociating optimiser.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from sparkinfer.backend import instructions as kinds
from sparkinfer.backend.instructions import instruction

LANES = 16
I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()
VEC = ir.VectorType(F32, LANES)

# ---- building blocks on LLVM values, shared with the generated tile kernels ----


def vector(element: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def constant_vector(element: ir.Type, lanes: int, value: float) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def splat_value(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    kind = ir.VectorType(value.type, lanes)
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(
        first, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    )


def load_value(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store_value(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, align: int = 1) -> None:
    instruction = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    instruction.align = align


@contextmanager
def loop_over(builder: ir.IRBuilder, count: ir.Value) -> Iterator[ir.Value]:
    """A loop over 0 .. `count`, of which the body is written inside; gives the index."""
    before, kind = builder.basic_block, count.type
    test, body, after = (
        builder.append_basic_block(f"loop.{name}") for name in ("test", "body", "end")
    )
    builder.branch(test)
    with builder.goto_block(test):
        index = builder.phi(kind)
        builder.cbranch(builder.icmp_signed("<", index, count), body, after)
    with builder.goto_block(body):
        yield index
        following = builder.add(index, ir.Constant(kind, 1), flags=["nsw"])
        last = builder.basic_block
        builder.branch(test)
    index.add_incoming(ir.Constant(kind, 0), before)
    index.add_incoming(following, last)
    builder.position_at_end(after)


def variable(builder: ir.IRBuilder, kind: ir.Type) -> ir.Value:
    """A place of the function's own for a value, zero at first."""
    with builder.goto_entry_block():
        place = builder.alloca(kind)
        builder.store(kind(None), place)
    return place


def declared(module: ir.Module, kind: ir.FunctionType, name: str) -> ir.Function:
    """The function of this name, which is somewhere else."""
    found = module.globals.get(name)
    return ir.Function(module, kind, name) if found is None else found


def call_llvm(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(declared(builder.module, kind, name), args)


def prefetch_value(builder: ir.IRBuilder, address: ir.Value, locality: int) -> None:
    """Ask for the line at `address`, which may lie anywhere. `locality`: 3 keeps it, 0 expects no second use."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = declared(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, *(ir.Constant(I32, v) for v in (0, locality, 1))])


def offset(
    builder: ir.IRBuilder, base: ir.Value, index: ir.Value | int, size: ir.Value | int
) -> ir.Value:
    """The address of an item of `size` bytes."""
    index = ir.Constant(I64, index) if isinstance(index, int) else index
    size = ir.Constant(I64, size) if isinstance(size, int) else size
    return builder.add(base, builder.mul(index, size))


def same_address(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """`address`, which LLVM takes for another one: what was loaded there is loaded again, not kept in a register."""
    return builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [address], False)


def fma_value(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    lanes = a.type.count if isinstance(a.type, ir.VectorType) else 0
    return call_llvm(
        builder, f"llvm.fma.v{lanes}f32" if lanes else "llvm.fma.f32", a.type, [a, b, c]
    )


def _part(builder: ir.IRBuilder, value: ir.Value, first: int, count: int) -> ir.Value:
    """`count` lanes from `first` on."""
    mask = ir.Constant(ir.VectorType(I32, count), list(range(first, first + count)))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)


def _fold(
    builder: ir.IRBuilder, value: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Reduce the lanes by halving, always in the same tree: lanes 8, 4, 2 and 1 apart."""
    for half in (8, 4, 2, 1):
        value = combine(_part(builder, value, 0, half), _part(builder, value, half, half))
    return builder.extract_element(value, ir.Constant(I32, 0))


def _maximum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _magnitudes(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Absolute values as integers, which are in the same order; what is no number is above infinity."""
    kind = ir.VectorType(I32, LANES)
    return builder.and_(builder.bitcast(value, kind), constant_vector(I32, LANES, 0x7FFFFFFF))


def _round_to_int(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    rounded = call_llvm(builder, f"llvm.rint.v{LANES}f32", VEC, [value])
    return builder.fptosi(rounded, ir.VectorType(I32, LANES))


_EXP_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def _exp_value(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Cephes expf on 16 lanes: exp(x) = 2^n * P(r), r = x - n ln 2; x below -87 gives exp(-87), above 88 exp(88)."""

    def const(value: float) -> ir.Constant:
        return constant_vector(F32, LANES, value)

    x = _maximum(builder, x, const(-87.0))
    x = builder.select(builder.fcmp_ordered("<", x, const(88.0)), x, const(88.0))
    n = call_llvm(builder, f"llvm.rint.v{LANES}f32", VEC, [builder.fmul(x, const(1.44269504))])
    r = fma_value(builder, n, const(-0.693359375), x)
    r = fma_value(builder, n, const(2.12194440e-4), r)
    poly: ir.Value = const(_EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        poly = fma_value(builder, poly, r, const(coefficient))
    poly = builder.fadd(fma_value(builder, builder.fmul(r, r), poly, r), const(1.0))
    exponent = builder.shl(
        builder.fptosi(n, ir.VectorType(I32, LANES)), constant_vector(I32, LANES, 23)
    )
    bits = builder.add(builder.bitcast(poly, ir.VectorType(I32, LANES)), exponent)
    return builder.bitcast(bits, VEC)


# ---- instructions of kernels; + - * / on vectors are the frontend's ----

_i64, _i32, _f32, _void = kinds.WORD, kinds.INT, kinds.FLOAT, kinds.NOTHING
f32x16 = kinds.VECTOR


@instruction(f32x16, _f32)
def splat(builder: Any, value: Any) -> Any:
    """All lanes set to `value`."""
    return splat_value(builder, value, LANES)


@instruction(f32x16, _i64)
def load(builder: Any, address: Any) -> Any:
    """16 float32 at `address`."""
    return load_value(builder, address, VEC, 4)


@instruction(_void, _i64, f32x16)
def store(builder: Any, address: Any, value: Any) -> None:
    """Write 16 float32 to `address`."""
    store_value(builder, address, value, 4)


@instruction(_void, _i64, f32x16)
def store_half(builder: Any, address: Any, value: Any) -> None:
    """Round 16 float32 to float16 and write them to `address`."""
    store_value(builder, address, builder.fptrunc(value, ir.VectorType(F16, LANES)), 2)


@instruction(_void, _i64)
def prefetch(builder: Any, address: Any) -> None:
    """Ask for the line at `address`, to be read soon."""
    prefetch_value(builder, address, 3)


@instruction(f32x16, f32x16, f32x16, f32x16)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding."""
    return fma_value(builder, a, b, c)


@instruction(f32x16, f32x16, f32x16)
def maximum(builder: Any, a: Any, b: Any) -> Any:
    return _maximum(builder, a, b)


@instruction(_f32, f32x16, f32x16)
def largest_magnitude(builder: Any, a: Any, b: Any) -> Any:
    """The largest absolute value of 32; NaN when one of them is NaN."""

    def larger(x: Any, y: Any) -> Any:
        return builder.select(builder.icmp_signed(">", x, y), x, y)

    both = larger(_magnitudes(builder, a), _magnitudes(builder, b))
    return builder.bitcast(_fold(builder, both, larger), F32)


@instruction(f32x16, f32x16)
def exp(builder: Any, x: Any) -> Any:
    """exp(x) to about 1 ulp; clamped to [-87, 88]."""
    return _exp_value(builder, x)


@instruction(f32x16, f32x16)
def swap_pairs(builder: Any, value: Any) -> Any:
    """Lanes 1, 0, 3, 2, ..."""
    mask = ir.Constant(ir.VectorType(I32, LANES), [lane ^ 1 for lane in range(LANES)])
    return builder.shuffle_vector(value, ir.Constant(VEC, ir.Undefined), mask)


@instruction(_f32, f32x16)
def sum_lanes(builder: Any, value: Any) -> Any:
    return _fold(builder, value, builder.fadd)


@instruction(_f32, f32x16)
def max_lanes(builder: Any, value: Any) -> Any:
    return _fold(builder, value, lambda a, b: _maximum(builder, a, b))


@instruction(f32x16, _i64, f32x16, f32x16)
def keep_below(builder: Any, count: Any, value: Any, other: Any) -> Any:
    """Lanes with index < count from `value`, the others from `other`."""
    kind = ir.VectorType(I64, LANES)
    lanes = ir.Constant(kind, list(range(LANES)))
    return builder.select(
        builder.icmp_signed("<", lanes, splat_value(builder, count, LANES)), value, other
    )


@instruction(_void, _i64, f32x16)
def store_int8(builder: Any, address: Any, value: Any) -> None:
    """Round 16 lanes to the nearest even integer and write them as int8; |value| must be below 128."""
    store_value(
        builder, address, builder.trunc(_round_to_int(builder, value), ir.VectorType(I8, LANES))
    )


@instruction(f32x16, f32x16, f32x16, f32x16, f32x16)
def where_above(builder: Any, a: Any, b: Any, value: Any, other: Any) -> Any:
    """Lanes where a > b from `value`, the others from `other`."""
    return builder.select(builder.fcmp_ordered(">", a, b), value, other)


@instruction(f32x16, _i64)
def load_int8(builder: Any, address: Any) -> Any:
    """16 int8 at `address`."""
    return builder.sitofp(load_value(builder, address, ir.VectorType(I8, LANES)), VEC)


@instruction(f32x16, _i64)
def load_half(builder: Any, address: Any) -> Any:
    """16 float16 at `address`."""
    return builder.fpext(load_value(builder, address, ir.VectorType(F16, LANES), 2), VEC)


@instruction(_void, _i64, _i64, f32x16, f32x16, f32x16, f32x16)
def store_bytes(
    builder: Any, low: Any, high: Any, first: Any, second: Any, third: Any, fourth: Any
) -> None:
    """Four whole numbers 0 .. 255 a lane as bytes side by side: lanes 0-7 to `low`, lanes 8-15 to `high`."""
    kind = ir.VectorType(I32, LANES)
    word: Any = builder.fptosi(first, kind)
    for place, value in enumerate((second, third, fourth), 1):
        byte = builder.shl(builder.fptosi(value, kind), constant_vector(I32, LANES, 8 * place))
        word = builder.or_(word, byte)
    store_value(builder, low, _part(builder, word, 0, 8), 1)
    store_value(builder, high, _part(builder, word, 8, 8), 1)


@instruction(_i64, f32x16, f32x16)
def lanes_not_below(builder: Any, value: Any, bar: Any) -> Any:
    """A bit for each lane of `value` that is not below `bar`: larger, equal, or one of them is no number."""
    found = builder.fcmp_unordered(">=", value, bar)
    return builder.zext(builder.bitcast(found, ir.IntType(LANES)), I64)


@instruction(_i32, f32x16)
def sum_rounded(builder: Any, value: Any) -> Any:
    """Sum of the lanes after rounding each to the nearest even integer (exact)."""
    return _fold(builder, _round_to_int(builder, value), builder.add)


@instruction(_f32, _f32, _f32, _f32)
def fma_scalar(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return fma_value(builder, a, b, c)


@instruction(_f32, _f32)
def sqrt_scalar(builder: Any, value: Any) -> Any:
    return call_llvm(builder, "llvm.sqrt.f32", F32, [value])


@instruction(_i64, _i64)
def load_i64(builder: Any, address: Any) -> Any:
    return load_value(builder, address, I64, 8)


@instruction(_void, _i64, _i64)
def store_i64(builder: Any, address: Any, value: Any) -> None:
    store_value(builder, address, value, 8)


@instruction(_f32, _i64)
def load_f32(builder: Any, address: Any) -> Any:
    return load_value(builder, address, F32, 4)


@instruction(_void, _i64, _f32)
def store_f32(builder: Any, address: Any, value: Any) -> None:
    store_value(builder, address, value, 4)


@instruction(_void, _i64, _i32)
def store_i32(builder: Any, address: Any, value: Any) -> None:
    store_value(builder, address, value, 4)


@instruction(_void, _i64, _f32)
def store_f16(builder: Any, address: Any, value: Any) -> None:
    store_value(builder, address, builder.fptrunc(value, F16), 2)


@instruction(_void, _i64, _i64, _i64, _i64)
def call_job(builder: Any, function: Any, args: Any, chunk: Any, thread: Any) -> None:
    """Call the compiled job at address `function` with (args, chunk, thread)."""
    _call_pointer(builder, function, [args, chunk, thread])


@instruction(_void, _i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64)
def call_tiles(
    builder: Any,
    function: Any,
    weight: Any,
    panel: Any,
    blocks: Any,
    out: Any,
    stride: Any,
    tiles: Any,
    add: Any,
) -> None:
    """Call the compiled tile kernel at address `function`; its contract is in `kernels/linear/cpu_tiles.py`."""
    _call_pointer(builder, function, [weight, panel, blocks, out, stride, tiles, add])


def _call_pointer(builder: Any, function: Any, args: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(args))
    builder.call(builder.inttoptr(function, kind.as_pointer()), args)


# ---- atomics and waiting ----


def _i64_pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@instruction(_i64, _i64)
def atomic_load(builder: Any, address: Any) -> Any:
    return builder.load_atomic(_i64_pointer(builder, address), "acquire", 8)


@instruction(_void, _i64, _i64)
def atomic_store(builder: Any, address: Any, value: Any) -> None:
    builder.store_atomic(value, _i64_pointer(builder, address), "seq_cst", 8)


@instruction(_i64, _i64, _i64)
def atomic_add(builder: Any, address: Any, value: Any) -> Any:
    """Add and return the value before."""
    return builder.atomic_rmw("add", _i64_pointer(builder, address), value, "seq_cst")


@instruction(_i64, _i64, _i64, _i64)
def atomic_swap_if(builder: Any, address: Any, expected: Any, value: Any) -> Any:
    """Compare and swap; return the value found (equal to `expected` when it was swapped)."""
    result = builder.cmpxchg(_i64_pointer(builder, address), expected, value, "seq_cst", "seq_cst")
    return builder.extract_value(result, 0)


@instruction(_void, _i64)
def spin_hint(builder: Any, unused: Any) -> None:
    """Tell the core that this is a spin-wait, where the architecture has a hint."""
    triple = builder.module.triple
    if triple.startswith(("x86_64", "i386", "i686")):
        call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
    elif triple.startswith(("aarch64", "arm64")):
        call_llvm(builder, "llvm.aarch64.hint", ir.VoidType(), [ir.Constant(I32, 1)])


@instruction(_i64, *[_i64] * 7)
def system_call(builder: Any, *args: Any) -> Any:
    """The system call of a number and its six arguments."""
    return call_llvm(builder, "syscall", I64, list(args))


@instruction(_void)
def give_way(builder: Any) -> None:
    """Let another thread have this core."""
    call_llvm(builder, "sched_yield", I32, [])
