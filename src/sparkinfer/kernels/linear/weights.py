"""A packed weight matrix of the CPU backend."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend.base import Arena
from sparkinfer.quant.tiles import LAYOUTS, pack

JOINED = 32  # outputs of one matrix before those of the other


@dataclass(frozen=True)
class PackedWeight:
    """`outputs` x `inputs` weights as tiles; `experts` matrices one after the other (1 for an ordinary weight)."""

    format_name: str
    outputs: int
    inputs: int
    lanes: int
    tiles: int
    tile_bytes: int
    address: int
    array: NDArray[np.uint8]
    experts: int = 1
    joined: bool = False  # one of `pack_pair`, which lie in turn: only `gated_linear` reads them

    @property
    def quantised(self) -> bool:
        return not LAYOUTS[self.format_name].floats

    @property
    def blocks(self) -> int:
        """What the tile kernels count: blocks of 32 columns, or columns for float formats."""
        return self.inputs // 32 if self.quantised else self.inputs

    @property
    def expert_bytes(self) -> int:
        return self.tiles * self.tile_bytes

    @property
    def n_bytes(self) -> int:
        return self.experts * self.expert_bytes

    @property
    def padded_outputs(self) -> int:
        """Columns the result buffer must have."""
        return self.tiles * self.lanes

    def put(self, tile: int, blocks: NDArray[np.uint8], rows: int) -> None:
        """Replace a tile by `rows` (up to `lanes`) rows of GGUF blocks; nothing may read it meanwhile."""
        assert self.experts == 1 and not self.joined, self
        packed = pack(self.format_name, blocks, rows, self.inputs, self.lanes)
        self.array.reshape(self.tiles, self.tile_bytes)[tile] = packed[0]


def pack_weight(
    format_name: str,
    blocks: Any,
    outputs: int,
    inputs: int,
    lanes: int,
    arena: Arena,
    experts: int = 1,
) -> PackedWeight:
    """Pack GGUF blocks (uint8, experts x outputs x inputs values). Raises ShapeError for a bad row length."""
    tiles = -(-outputs // lanes)
    tile_bytes = LAYOUTS[format_name].tile_bytes(inputs, lanes)
    array = arena.take(experts * tiles * tile_bytes)
    per_expert = blocks.reshape(experts, -1, blocks.shape[-1])
    target = array.reshape(experts, tiles, tile_bytes)
    for index in range(experts):
        target[index] = pack(format_name, per_expert[index], outputs, inputs, lanes)
    return PackedWeight(
        format_name, outputs, inputs, lanes, tiles, tile_bytes, int(array.ctypes.data), array, experts,
    )  # fmt: skip


def pack_pair(
    format_name: str, pair: tuple[Any, Any], outputs: int, inputs: int, lanes: int, arena: Arena
) -> tuple[PackedWeight, PackedWeight]:
    """Pack two matrices in turn, JOINED outputs of each: what reads both has one stream of weights, not two.

    Arguments as for `pack_weight`; outputs are a multiple of JOINED.
    """
    assert outputs % JOINED == 0, outputs
    tiles, step = outputs // lanes, JOINED // lanes
    tile_bytes = LAYOUTS[format_name].tile_bytes(inputs, lanes)
    array = arena.take(2 * tiles * tile_bytes)
    places = array.reshape(-1, 2, step, tile_bytes)
    packed = []
    for side, blocks in enumerate(pair):
        places[:, side] = pack(format_name, blocks, outputs, inputs, lanes).reshape(
            -1, step, tile_bytes
        )
        address = int(array.ctypes.data) + side * step * tile_bytes
        packed.append(
            PackedWeight(
                format_name, outputs, inputs, lanes, tiles, tile_bytes, address, array, joined=True
            )
        )
    return packed[0], packed[1]
