"""Generated inner loops of attention for 1 to 4 queries that share the reads of keys and values."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparkinfer.backend.simd import (
    F16,
    F32,
    I64,
    VEC,
    constant_vector,
    fma_value,
    load_value,
    splat_value,
    store_value,
    vector,
)


def _cached(builder: ir.IRBuilder, address: ir.Value, wide: int) -> ir.Value:
    """16 cache entries as float32."""
    if wide:
        return load_value(builder, address, VEC, 4)
    return builder.fpext(load_value(builder, address, vector(F16, 16), 2), VEC)


def _chains(builder: ir.IRBuilder, count: int) -> list[Any]:
    chains = [cgutils.alloca_once(builder, VEC) for _ in range(count)]
    for chain in chains:
        builder.store(constant_vector(F32, 16, 0.0), chain)
    return chains


def _offset(
    builder: ir.IRBuilder, base: ir.Value, index: ir.Value | int, size: ir.Value | int
) -> ir.Value:
    index = ir.Constant(I64, index) if isinstance(index, int) else index
    size = ir.Constant(I64, size) if isinstance(size, int) else size
    return builder.add(base, builder.mul(index, size))


@intrinsic(prefer_literal=True)  # type: ignore[misc]
def score_tile(typingctx, queries, wide, q, keys, size, out, stride):  # type: ignore[no-untyped-def]
    """out[i, 0..15] = q[i] . keys[0..15] for `queries` rows of `size` floats; two chains, even and odd dimensions."""
    n, is_wide = queries.literal_value, wide.literal_value
    signature = types.void(queries, wide, *[types.int64] * 5)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        q, keys, size, out, stride = args[2:]
        chains = _chains(b, 2 * n)
        row_bytes = b.mul(size, ir.Constant(I64, 4))
        with cgutils.for_range(b, b.lshr(size, ir.Constant(I64, 1))) as loop:
            for odd in range(2):
                d = b.add(b.shl(loop.index, ir.Constant(I64, 1)), ir.Constant(I64, odd))
                key = _cached(b, _offset(b, keys, d, 64 if is_wide else 32), is_wide)
                for i in range(n):
                    x = load_value(b, _offset(b, _offset(b, q, i, row_bytes), d, 4), F32, 4)
                    chain = chains[2 * i + odd]
                    b.store(fma_value(b, splat_value(b, x, 16), key, b.load(chain)), chain)
        for i in range(n):
            total = b.fadd(b.load(chains[2 * i]), b.load(chains[2 * i + 1]))
            store_value(b, _offset(b, out, i, stride), total, 4)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)  # type: ignore[misc]
def value_tile(
    typingctx, queries, wide, weights, stride, values, row_bytes, common, count, out, out_stride
):  # type: ignore[no-untyped-def]
    """out[i, 0..15] = sum over t < count, in order, of weights[i, t] * values[t, 0..15].

    From `common` on, a weight of zero skips its value: it belongs to a later row and may be no number.
    """
    n, is_wide = queries.literal_value, wide.literal_value
    signature = types.void(queries, wide, *[types.int64] * 8)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        weights, stride, values, row_bytes, common, count, out, out_stride = args[2:]
        chains = _chains(b, n)

        def step(t: ir.Value, guarded: bool) -> None:
            value = _cached(b, _offset(b, values, t, row_bytes), is_wide)
            for i in range(n):
                x = load_value(b, _offset(b, _offset(b, weights, i, stride), t, 4), F32, 4)
                before = b.load(chains[i])
                after = fma_value(b, splat_value(b, x, 16), value, before)
                if guarded:
                    after = b.select(b.fcmp_ordered("==", x, ir.Constant(F32, 0.0)), before, after)
                b.store(after, chains[i])

        with cgutils.for_range(b, common) as loop:
            step(loop.index, guarded=False)
        with cgutils.for_range(b, b.sub(count, common)) as loop:
            step(b.add(common, loop.index), guarded=True)
        for i in range(n):
            store_value(b, _offset(b, out, i, out_stride), b.load(chains[i]), 4)
        return context.get_dummy_value()

    return signature, codegen
