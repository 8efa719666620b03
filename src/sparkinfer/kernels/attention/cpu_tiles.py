"""Generated inner loops of attention for 1 to 4 queries that share the reads of keys and values."""

from typing import Any

from llvmlite import ir

from sparkinfer.backend.instructions import NOTHING, WORD, instruction
from sparkinfer.backend.simd import (
    F16,
    F32,
    I64,
    VEC,
    constant_vector,
    fma_value,
    load_value,
    loop_over,
    offset,
    prefetch_value,
    same_address,
    splat_value,
    store_value,
    variable,
    vector,
)


def _cached(builder: ir.IRBuilder, address: ir.Value, wide: int) -> ir.Value:
    """16 cache entries as float32."""
    if wide:
        return load_value(builder, address, VEC, 4)
    return builder.fpext(load_value(builder, address, vector(F16, 16), 2), VEC)


def _chains(builder: ir.IRBuilder, count: int) -> list[Any]:
    chains = [variable(builder, VEC) for _ in range(count)]
    for chain in chains:
        builder.store(constant_vector(F32, 16, 0.0), chain)
    return chains


def _sources(builder: ir.IRBuilder, address: ir.Value, count: int) -> list[ir.Value]:
    """The address of the factors for each of `count` tiles: with three queries there are no registers to keep them."""
    return [address, *(same_address(builder, address) for _ in range(count - 1))]


@instruction(NOTHING, *[WORD] * 6, literals=3)
def score_tile(
    b: Any, n: int, n_tiles: int, is_wide: int,
    q: Any, keys: Any, values: Any, size: Any, out: Any, stride: Any,
) -> None:  # fmt: skip
    """out[i, 0..15] = q[i] . keys[0..15] for `n` rows of `size` floats, one chain over the dimensions each.

    `n_tiles` (1 or 2) neighbouring tiles at once: with few queries one tile alone waits for its own sums.
    Asks for the next keys and for the `values` of these positions, which take as many bytes.
    """
    item = 64 if is_wide else 32
    chains = [_chains(b, n) for _ in range(n_tiles)]
    sources = _sources(b, q, n_tiles)
    row_bytes = b.mul(size, ir.Constant(I64, 4))
    tile_bytes = b.mul(size, ir.Constant(I64, item))

    def step(d: ir.Value) -> None:
        for t, (source, of_tile) in enumerate(zip(sources, chains, strict=True)):
            key = _cached(b, offset(b, offset(b, keys, t, tile_bytes), d, item), is_wide)
            for i, chain in enumerate(of_tile):
                x = load_value(b, offset(b, offset(b, source, i, row_bytes), d, 4), F32, 4)
                b.store(fma_value(b, splat_value(b, x, 16), key, b.load(chain)), chain)

    with loop_over(b, b.lshr(size, ir.Constant(I64, 1))) as index:
        line = b.mul(index, ir.Constant(I64, 2 * item))
        for t in range(n_tiles):
            for base in (
                offset(b, keys, n_tiles + t, tile_bytes),
                offset(b, values, t, tile_bytes),
            ):
                for half in range(0, 2 * item, 64):
                    prefetch_value(b, offset(b, b.add(base, line), half, 1), 3)
        for odd in range(2):
            step(b.add(b.shl(index, ir.Constant(I64, 1)), ir.Constant(I64, odd)))
    for t, of_tile in enumerate(chains):
        for i, chain in enumerate(of_tile):
            store_value(b, offset(b, offset(b, out, i, stride), t, 64), b.load(chain), 4)


@instruction(NOTHING, *[WORD] * 9, literals=3)
def value_tile(
    b: Any, n: int, n_blocks: int, is_wide: int,
    weights: Any, stride: Any, values: Any, row_bytes: Any, low: Any, common: Any, count: Any, out: Any,
    out_stride: Any,
) -> None:  # fmt: skip
    """out[i, 0..15] = sum over t < count, in order, of weights[i, t] * values[t, 0..15], for `n_blocks` (1 or 2) of 16.

    Below `low` and from `common` on, a weight of zero skips its value: another row sees it, and it may be no number.
    """
    item = 64 if is_wide else 32
    chains = [_chains(b, n) for _ in range(n_blocks)]
    sources = _sources(b, weights, n_blocks)

    def step(t: ir.Value, guarded: bool) -> None:
        row = offset(b, values, t, row_bytes)
        for block, (source, of_block) in enumerate(zip(sources, chains, strict=True)):
            value = _cached(b, offset(b, row, block, item), is_wide)
            for i, chain in enumerate(of_block):
                x = load_value(b, offset(b, offset(b, source, i, stride), t, 4), F32, 4)
                before = b.load(chain)
                after = fma_value(b, splat_value(b, x, 16), value, before)
                if guarded:
                    unseen = b.fcmp_ordered("==", x, ir.Constant(F32, 0.0))
                    after = b.select(unseen, before, after)
                b.store(after, chain)

    with loop_over(b, low) as index:
        step(index, guarded=True)
    with loop_over(b, b.sub(common, low)) as index:
        step(b.add(low, index), guarded=False)
    with loop_over(b, b.sub(count, common)) as index:
        step(b.add(common, index), guarded=True)
    for block, of_block in enumerate(chains):
        for i, chain in enumerate(of_block):
            target = offset(b, offset(b, out, i, out_stride), block, 64)
            store_value(b, target, b.load(chain), 4)
