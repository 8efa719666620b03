"""The largest logit of every row without the whole product of the head.

A product with a coarse copy of the head bounds every logit; only those that may be the largest are computed exactly.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend.base import Activation, Backend, Buffer, Recorder, Weight
from sparkinfer.kernels.select import select
from sparkinfer.quant.tiles import LAYOUTS

MOST_ROWS = 16  # wider runs take the whole product
TOTALS = (
    3  # numbers that runs add up: runs, rows, outputs whose exact logit was computed for some row
)
_LEAST_BITS, _LEAST_OUTPUTS, _LEAST_INPUTS = 6, 4096, 128


def why_not(backend_name: str, format_name: str, outputs: int, inputs: int) -> str | None:
    """Why a head of this kind is not screened; None if it is."""
    layout = LAYOUTS[format_name]
    if backend_name != "cpu":
        return f"not on {backend_name}"
    if layout.bits < _LEAST_BITS:
        return f"{format_name} has {layout.bits} bits a weight, the coarse copy 4"
    assert not layout.minimum, f"bounds do not cover the minima of {format_name}"
    if inputs % 32 or inputs < _LEAST_INPUTS or outputs < _LEAST_OUTPUTS:
        return f"{outputs} x {inputs} is too small"
    return None


def coarse_bytes(outputs: int, inputs: int) -> int:
    """About what `pack_screen` takes: 34 bytes for each 64 weights, 64 of them more an output, and two numbers."""
    return outputs * ((inputs + 127) // 64 * 34 + 8)


def pack_screen(
    backend: Backend,
    rows: Callable[[int, int], NDArray[np.float32]],
    outputs: int,
    inputs: int,
    norm: NDArray[np.float32],
) -> Any | None:
    """What screening needs beside the packed head: see `coarse`. None where a weight is not finite or far too large.

    `rows(first, count)` gives exact weights, float32 [count, inputs]; `norm` [inputs] the weights of the norm before.
    """
    return select("screen", backend.name, "pack")(backend, rows, outputs, inputs, norm)


def screen(
    recorder: Recorder,
    x: Activation,
    head: Weight,
    coarse: Any,
    bounds: Buffer,
    out: Buffer,
    totals: Buffer,
    n_vocab: int,
) -> None:
    """Record what `linear` of x and `head` followed by `argmax` gives, the same bits: out int64 rows x 2.

    Shapes: at most `MOST_ROWS` rows; `bounds` rows x head.padded_outputs is overwritten, not with logits; `totals` is
    int64 1 x `TOTALS`. `x` may be private: its prologue is repeated for a second phase. Rows in which something is no
    number, or none of ordinary size, are computed whole; many candidates only cost time.
    """
    select("screen", recorder.backend)(recorder, x, head, coarse, bounds, out, totals, n_vocab)
