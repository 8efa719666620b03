"""Numpy specification of `screen`: what the coarse product is, and how far it may be off."""

import numpy as np
from numpy.typing import NDArray

from sparkinfer.kernels.screen.coarse import BLOCK, LEAD, Coarse
from sparkinfer.kernels.screen.cpu_tiles import scale_and_code_bytes

F64 = NDArray[np.float64]


def parts(coarse: Coarse) -> F64:
    """The part c of every output, in `coarse.order`, float64 [outputs, n]."""
    steps, lanes, count = coarse.steps, coarse.lanes, len(coarse.tiles)
    size = scale_and_code_bytes(lanes)
    records = coarse.tiles[:, : steps * size].reshape(count, steps, size)
    scales = np.ascontiguousarray(records[..., : 2 * lanes]).view(np.float16).astype(np.float64)
    codes = records[..., 2 * lanes :].reshape(count, steps, 2, 4, lanes, 4)
    both = np.concatenate([codes & 15, codes >> 4], axis=3).astype(np.float64) - 8
    values = both.transpose(0, 4, 1, 2, 3, 5).reshape(count, lanes, steps, BLOCK)
    values *= scales.transpose(0, 2, 1)[..., None]
    rows = values.reshape(count * lanes, steps * BLOCK)[: coarse.outputs]
    rows[:, :LEAD] += rows[:, -LEAD:]
    return rows[:, : len(coarse.order)]


def product(coarse: Coarse, x: NDArray[np.float32]) -> tuple[F64, F64]:
    """The coarse logits and how far each may be from the exact one, float64 [rows, outputs].

    x [rows, n]: the activations as the exact product reads them.
    """
    n, outputs = len(coarse.order), coarse.outputs
    turned = np.zeros((len(x), len(coarse.direction)))
    turned[:, :n] = x[:, coarse.order]
    blocks = turned.reshape(len(x), -1, BLOCK)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / 127
    codes = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0))
    taken = codes * scale
    size, off = (np.square(values).sum(axis=2) for values in (blocks, blocks - taken))
    p, r = coarse.shares.astype(np.float64)
    along = turned @ coarse.direction.astype(np.float64)
    logits = (
        np.outer(along, coarse.along[:outputs])
        + taken.reshape(turned.shape)[:, :n] @ parts(coarse).T
    )
    return logits, np.outer(np.sqrt(size @ p + off @ r), coarse.slack[:outputs])
