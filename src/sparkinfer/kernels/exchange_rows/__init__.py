"""Rows of packed weights and tables that are replaced by others, for weights that lie on a device."""

from collections.abc import Sequence

from sparkinfer.backend.base import Buffer, Recorder, Weight
from sparkinfer.kernels.select import select

Rows = Weight | Buffer  # outputs of a weight, or the numbers of a buffer of one row


def exchange_rows(
    recorder: Recorder, changes: Buffer, most: int, pairs: Sequence[tuple[Rows, Rows]]
) -> None:
    """Record target[place] = source[row] for each change and every (target, source) of `pairs`, which are of one kind.

    `changes` int64 [1, 1 + 2 x `most`]: how many there are, then place and row of each. No place stands there twice.
    """
    select("exchange_rows", recorder.backend)(recorder, changes, most, pairs)
