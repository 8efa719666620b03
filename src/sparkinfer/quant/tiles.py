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
    if layout.floats:
        return _pack_floats(layout, blocks, rows, columns, lanes)
    codes = unpack(format_name, blocks)
    tiles = -(-rows // lanes)
    records = columns // (32 * layout.blocks)
    out = np.zeros((tiles, layout.tile_bytes(columns, lanes)), np.uint8)
    parts = (
        _scales(layout, codes, rows, records, lanes),
        _codes(layout, codes.q, rows, columns, lanes).reshape(tiles, records, -1),
    )
    packed = np.concatenate(parts, axis=2).reshape(tiles, -1)
    out[:, : packed.shape[1]] = packed
    return out


def _by_tile(values: NDArray[Any], rows: int, lanes: int) -> NDArray[Any]:
    """[rows, ...] -> [tiles, lanes, ...], zero-filled."""
    tiles = -(-rows // lanes)
    if tiles * lanes != rows:
        fill = np.zeros((tiles * lanes - rows, *values.shape[1:]), values.dtype)
        values = np.concatenate([values, fill])
    return values.reshape(tiles, lanes, *values.shape[1:])


def _pack_floats(
    layout: TileLayout, blocks: NDArray[np.uint8], rows: int, columns: int, lanes: int
) -> NDArray[np.uint8]:
    kind = np.float32 if layout.bits == 32 else np.uint16
    values = _by_tile(np.ascontiguousarray(blocks).view(kind).reshape(rows, columns), rows, lanes)
    packed = np.ascontiguousarray(values.transpose(0, 2, 1)).view(np.uint8).reshape(len(values), -1)
    out = np.zeros((len(values), layout.tile_bytes(columns, lanes)), np.uint8)
    out[:, : packed.shape[1]] = packed
    return out


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
    blocks = columns // 32
    tiled = _by_tile(q.reshape(rows, blocks, 8, 4), rows, lanes).transpose(0, 2, 3, 1, 4)
    tiled = np.ascontiguousarray(tiled)  # [tiles, blocks, 8, lanes, 4]
    tiles = tiled.shape[0]
    if layout.bits == 8:
        return tiled.reshape(tiles, -1)
    planes = [(tiled[:, :, :4] & 15) | (tiled[:, :, 4:] << 4)]
    high = tiled >> 4
    if layout.bits == 5:
        shifts = np.arange(8, dtype=np.uint8)[:, None, None]
        planes.append(np.bitwise_or.reduce(high << shifts, axis=2, keepdims=True))
    elif layout.bits == 6:
        shifts = np.array([0, 2, 4, 6], np.uint8)[:, None, None]
        halves = [
            np.bitwise_or.reduce(high[:, :, h : h + 4] << shifts, axis=2, keepdims=True)
            for h in (0, 4)
        ]
        planes += halves
    return np.concatenate(planes, axis=2).reshape(tiles, -1)
