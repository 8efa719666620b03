"""Attention over the key/value cache: causal or over a whole block, with an optional sliding window."""

from sparkinfer.backend.base import Activation, Buffer, Recorder
from sparkinfer.kernels.select import select
from sparkinfer.kernels.shapes import Heads

SPLIT = 256  # positions of one partial result; boundaries are absolute, so they never depend on the length or the width


def row_block(rows: int) -> int:
    """Rows that share the reads of keys and values: few, where they would be too few chunks for two threads."""
    return 2 if rows <= 4 else 4


def attention(
    recorder: Recorder,
    q: Buffer,
    shape: Heads,
    params: Buffer,
    gate: Buffer | None,
    out: Activation,
    context: int,
    *,
    first_row: int = 0,
    of_rows: int | None = None,
) -> None:
    """Record out[r] = softmax(q[r] k^T / sqrt(head_size)) v over the positions that row r sees.

    Shapes: q rows x heads x head_size (rotated), out rows x heads x head_size; `gate` is the q projection of a gated
    layer (query, gate inside each head): the result is multiplied by sigmoid(gate).
    Query head h reads kv head h // (heads / kv_heads). `context` bounds position + rows.
    Row r stands at p = position + r and sees FIRST .. p when `shape.causal`, else FIRST .. position + rows - 1; with
    `shape.window` W only keys k with p - k < W and k - p < W. FIRST (a run parameter) is at most `position`. What a row
    does not see may be no number.
    q and out may hold only some rows of a run of `of_rows` (default: the recorder's): those from `first_row` on.
    Pinned: softmax inside splits of SPLIT positions at absolute boundaries, merged in order with the overall maximum.
    """
    total = recorder.rows if of_rows is None else of_rows
    select("attention", recorder.backend)(
        recorder, q, shape, params, gate, out, context, first_row, total
    )


def chunks(position: int, rows: int, kv_heads: int, *, first: int = 0, window: int = 0) -> int:
    """Chunks of the attention phase for `rows` rows after `position` tokens: splits x row blocks x kv heads.

    Splits that no row can see (`first`: the run parameter FIRST, `window` of the layer) are not counted. A layer that
    computes only some of the rows needs fewer: chunks too many do nothing.
    """
    begin = max(first, position - window + 1 if window else 0, 0) // SPLIT
    splits = -(-(position + rows) // SPLIT) - begin
    return splits * -(-rows // row_block(rows)) * kv_heads
