"""What a verified window leaves for the block after it, on a device whose host has not looked at it yet."""

from sparkinfer.backend.base import Buffer, Recorder
from sparkinfer.kernels.select import select


def accept(
    recorder: Recorder, window: tuple[Buffer, int], found: Buffer, params: Buffer, column: int
) -> None:
    """Record: of a window's tokens the first one and those that stay, which are `found` for the row before each.

    `window`: a buffer of one row of int64 and the column of its first token; `found` int64 1 x 16: each row's best id.
    The width stands in `params` at COMMIT_ROWS. The position there grows by the number that stay, and `column` gets the
    id found after the last of them.
    """
    select("accept", recorder.backend)(recorder, window, found, params, column)
