"""Rows of an embedding table, for backends whose buffers the host cannot fill itself."""

from sparkinfer.backend.base import Buffer, Recorder, Weight
from sparkinfer.kernels.select import select


def embed(
    recorder: Recorder,
    table: Weight,
    run: Buffer,
    first: int,
    out: Buffer,
    *,
    scale: float = 1.0,
    mask: Buffer | None = None,
) -> None:
    """Record out[r] = scale * row run[0, first + r] of the table, for every row r; scale * mask where that is below 0.

    Shapes: run int64 1 x at least first + rows, out rows x table.inputs, mask 1 x table.inputs. Rows do not mix.
    """
    select("embed", recorder.backend)(recorder, table, run, first, out, scale, mask)
