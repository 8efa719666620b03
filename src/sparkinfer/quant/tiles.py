"""Repack GGUF blocks into tiles: `lanes` output rows side by side, so that a dot product needs no sum across lanes.

A packed matrix is a list of tiles, each `lanes` rows high (missing rows are zero), all columns wide and padded to 64
bytes. A tile is one stream of records (one block of 32 columns, or 8 of them for formats with sub-block scales): scales
first, then the codes of each block. One stream, because two would defeat the hardware's prefetcher.

Scales, each item for all lanes: float16 d | float16 m if the format has minima | int8 scale per group | uint8 minimum
per group.
Codes of a block of 32 columns (k = column in the block, b = k % 4):
  4 bits: 4 x lanes x 4 bytes; byte (j, lane, b) holds code k = 4j + b in its low and k = 16 + 4j + b in its high nibble
  +1 bit: lanes x 4 bytes; bit g of byte (lane, b) is bit 4 of code k = 4g + b
  +2 bits: 2 x lanes x 4 bytes; bits 2g, 2g+1 of byte (half, lane, b) are bits 4, 5 of code k = 16 half + 4g + b
  8 bits: 8 x lanes x 4 bytes; byte (j, lane, b) is code k = 4j + b
Float formats have no scales; a tile is columns x lanes values.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.errors import ShapeError
from sparkinfer.quant.formats import QUANT_FORMATS, Codes, unpack


@dataclass(frozen=True)
class TileLayout:
    """How a family of formats is packed. `zero` is subtracted from every code; `group` columns share a sub-scale."""

    name: str
    bits: int
    zero: int = 0
    blocks: int = 1
    group: int = 32
    sub_scales: bool = False
    minimum: bool = False
    floats: str = ""

    @property
    def groups(self) -> int:
        """Groups with a scale of their own in a record."""
        return self.blocks * 32 // self.group if self.sub_scales else 0

    def scale_bytes(self, lanes: int) -> int:
        """Bytes of a record's scales."""
        per_lane = 2 + 2 * self.minimum + self.groups * (1 + self.minimum)
        return per_lane * lanes

    def code_bytes(self, lanes: int) -> int:
        """Bytes of one block of 32 columns."""
        return 32 * lanes * self.bits // 8

    def record_bytes(self, lanes: int) -> int:
        return self.scale_bytes(lanes) + self.blocks * self.code_bytes(lanes)

    def tile_bytes(self, columns: int, lanes: int) -> int:
        if self.floats:
            return _pad(columns * lanes * self.bits // 8)
        return _pad(columns // (32 * self.blocks) * self.record_bytes(lanes))


_NIBBLES = np.uint32(0x0F0F0F0F)
_SLAB_VALUES = 2**18  # values packed at a time


def _pad(size: int) -> int:
    return -(-size // 64) * 64


LAYOUTS = {
    "F32": TileLayout("F32", 32, floats="f32"),
    "F16": TileLayout("F16", 16, floats="f16"),
    "BF16": TileLayout("BF16", 16, floats="bf16"),
    "Q4_0": TileLayout("Q4_0", 4, zero=8),
    "Q4_1": TileLayout("Q4_1", 4, minimum=True),
    "Q5_0": TileLayout("Q5_0", 5, zero=16),
    "Q5_1": TileLayout("Q5_1", 5, minimum=True),
    "Q8_0": TileLayout("Q8_0", 8, zero=128),
    "Q2_K": TileLayout("Q2_K", 4, blocks=8, group=16, sub_scales=True, minimum=True),
    "Q3_K": TileLayout("Q3_K", 4, zero=4, blocks=8, group=16, sub_scales=True),
    "Q4_K": TileLayout("Q4_K", 4, blocks=8, sub_scales=True, minimum=True),
    "Q5_K": TileLayout("Q5_K", 5, blocks=8, sub_scales=True, minimum=True),
    "Q6_K": TileLayout("Q6_K", 6, zero=32, blocks=8, group=16, sub_scales=True),
    "IQ4_NL": TileLayout("IQ4_NL", 8, zero=128),
    "IQ4_XS": TileLayout("IQ4_XS", 8, zero=128, blocks=8, sub_scales=True),
}


def pack(
    format_name: str, blocks: NDArray[np.uint8], rows: int, columns: int, lanes: int
) -> NDArray[np.uint8]:
    """Repack `rows` x `columns` weights given as GGUF blocks [n, block_bytes]; returns [tiles, tile_bytes].

    Raises ShapeError when the columns are no whole number of blocks.
    """
    layout = LAYOUTS[format_name]
    block_size = QUANT_FORMATS[format_name].block_size
    if columns % block_size:
        raise ShapeError(
            f"{format_name} rows have a multiple of {block_size} columns, not {columns}"
        )
    per_row = columns // block_size
    slab = max(1, _SLAB_VALUES // (columns * lanes)) * lanes
    out = np.zeros((-(-rows // lanes), layout.tile_bytes(columns, lanes)), np.uint8)
    for first in range(0, rows, slab):
        count = min(slab, rows - first)
        part = blocks[first * per_row : (first + count) * per_row]
        packed = _pack_slab(layout, part, count, columns, lanes)
        at = first // lanes
        out[at : at + len(packed), : packed.shape[1]] = packed
    return out


def _pack_slab(
    layout: TileLayout, blocks: NDArray[np.uint8], rows: int, columns: int, lanes: int
) -> NDArray[np.uint8]:
    """Some rows as tiles without their padding; few enough that every step stays in the cache."""
    if layout.floats:
        kind = np.float32 if layout.bits == 32 else np.uint16
        values = np.ascontiguousarray(blocks).view(kind).reshape(rows, columns)
        tiled = np.ascontiguousarray(_by_tile(values, rows, lanes).transpose(0, 2, 1))
        return tiled.view(np.uint8).reshape(len(tiled), -1)
    codes = unpack(layout.name, blocks)
    tiles, records = -(-rows // lanes), columns // (32 * layout.blocks)
    parts = (
        _scales(layout, codes, rows, records, lanes),
        _codes(layout, codes.q, rows, columns, lanes).reshape(tiles, records, -1),
    )
    return np.concatenate(parts, axis=2).reshape(tiles, -1)


def _by_tile(values: NDArray[Any], rows: int, lanes: int) -> NDArray[Any]:
    """[rows, ...] -> [tiles, lanes, ...], zero-filled."""
    tiles = -(-rows // lanes)
    if tiles * lanes != rows:
        fill = np.zeros((tiles * lanes - rows, *values.shape[1:]), values.dtype)
        values = np.concatenate([values, fill])
    return values.reshape(tiles, lanes, *values.shape[1:])


def _scales(
    layout: TileLayout, codes: Codes, rows: int, records: int, lanes: int
) -> NDArray[np.uint8]:
    parts = [codes.d.reshape(rows, records, 1).view(np.uint8)]
    if layout.minimum:
        assert codes.m is not None
        parts.append(codes.m.reshape(rows, records, 1).view(np.uint8))
    columns = [_lane_items(p.reshape(rows, records, 1, 2), rows, lanes) for p in parts]
    if layout.sub_scales:
        assert codes.scales is not None
        subs = [codes.scales] + ([codes.mins] if codes.mins is not None else [])
        columns += [
            _lane_items(s.view(np.uint8).reshape(rows, records, -1, 1), rows, lanes) for s in subs
        ]
    return np.concatenate(columns, axis=2)


def _lane_items(values: NDArray[np.uint8], rows: int, lanes: int) -> NDArray[np.uint8]:
    """[rows, records, items, bytes] -> [tiles, records, items x lanes x bytes], lane inside item."""
    tiled = _by_tile(values, rows, lanes).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(tiled).reshape(tiled.shape[0], tiled.shape[1], -1)


def _codes(
    layout: TileLayout, q: NDArray[np.uint8], rows: int, columns: int, lanes: int
) -> NDArray[np.uint8]:
    """The codes of all blocks. Four codes travel as one 32-bit word: no shift below crosses a byte."""
    blocks = columns // 32
    words = np.ascontiguousarray(q).view(np.uint32).reshape(rows, blocks, 8)
    tiled = np.ascontiguousarray(_by_tile(words, rows, lanes).transpose(0, 2, 3, 1))
    tiles = tiled.shape[0]  # [tiles, blocks, 8, lanes]
    if layout.bits == 8:
        return tiled.view(np.uint8).reshape(tiles, -1)
    low, high = tiled & _NIBBLES, (tiled >> np.uint32(4)) & _NIBBLES
    extra = layout.bits - 4
    out = np.empty((tiles, blocks, 4 + extra, lanes), np.uint32)
    np.bitwise_or(low[:, :, :4], low[:, :, 4:] << np.uint32(4), out=out[:, :, :4])
    for plane in range(extra):
        out[:, :, 4 + plane] = _plane(high, extra, plane)
    return out.view(np.uint8).reshape(tiles, -1)


def _plane(high: NDArray[np.uint32], extra: int, plane: int) -> NDArray[np.uint32]:
    """The upper bits of the groups that share an extra plane: 8 groups of 1 bit, or 4 of 2 bits."""
    groups = 8 // extra
    merged = high[:, :, plane * groups].copy()
    for g in range(1, groups):
        merged |= high[:, :, plane * groups + g] << np.uint32(g * extra)
    return merged
