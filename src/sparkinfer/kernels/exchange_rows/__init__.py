"""Rows of packed weights and tables that are replaced by others, for weights that lie on a device."""

from collections.abc import Sequence
from typing import Any

from sparkinfer.backend.base import Buffer, Recorder
from sparkinfer.kernels.select import select


def exchange_rows(
    recorder: Recorder, changes: Buffer, most: int, planes: Sequence[tuple[Any, Any]]
) -> None:
    """Record target[place] = source[row] for each change and every (target, source) of `planes`.

    `changes` int64 [1, 1 + 2 x `most`]: how many there are, then place and row of each. Targets and sources are arrays
    [rows, row bytes] of the backend's memory with rows of the same even number of bytes. No place stands there twice.
    """
    select("exchange_rows", recorder.backend)(recorder, changes, most, planes)
