"""Numpy specification of `screen`: what the coarse product is, and how far it may be off."""

import numpy as np
from numpy.typing import NDArray

from sparkinfer.kernels.screen.coarse import BLOCK, LEAD, Coarse

F64 = NDArray[np.float64]


def parts(coarse: Coarse) -> F64:
    """The part c of every output, in `coarse.order`, float64 [outputs, n]."""
    weight, lanes = coarse.weight, coarse.weight.lanes
    steps = weight.inputs // BLOCK
    tiles = weight.array[: weight.n_bytes].reshape(weight.tiles, -1)
    records = tiles[:, : steps * 18 * lanes].reshape(weight.tiles, steps, 18 * lanes)
    scales = np.ascontiguousarray(records[..., : 2 * lanes]).view(np.float16).astype(np.float64)
    codes = records[..., 2 * lanes :].reshape(weight.tiles, steps, 4, lanes, 4)
    both = np.concatenate([codes & 15, codes >> 4], axis=2).astype(np.float64) - 8
    values = both.transpose(0, 3, 1, 2, 4).reshape(weight.tiles, lanes, steps, BLOCK)
    values *= scales.transpose(0, 2, 1)[..., None]
    rows = values.reshape(weight.tiles * lanes, -1)[: weight.outputs]
    rows[:, :LEAD] += rows[:, len(coarse.order) :]
    return rows[:, : len(coarse.order)]


def product(coarse: Coarse, x: NDArray[np.float32]) -> tuple[F64, F64]:
    """The coarse logits and how far each may be from the exact one, float64 [rows, outputs].

    x [rows, n]: the activations as the exact product reads them.
    """
    turned, outputs = x[:, coarse.order].astype(np.float64), coarse.weight.outputs
    blocks = turned.reshape(len(x), -1, BLOCK)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / 127
    codes = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0))
    taken = codes * scale
    size, off = (np.square(values).sum(axis=2) for values in (blocks, blocks - taken))
    p, r = coarse.shares.astype(np.float64)
    along = turned @ coarse.direction.astype(np.float64)
    logits = np.outer(along, coarse.along[:outputs]) + taken.reshape(x.shape) @ parts(coarse).T
    return logits, np.outer(np.sqrt(size @ p + off @ r), coarse.slack[:outputs])
