"""Copy rows: a feature tap on the residual stream."""

from sparkinfer.backend.base import Buffer, Recorder
from sparkinfer.kernels.select import select


def copy_rows(recorder: Recorder, source: Buffer, out: Buffer) -> None:
    """Record out[r] = source[r] for every row. Shapes: both rows x n, n a multiple of 16."""
    select("copy_rows", recorder.backend)(recorder, source, out)
