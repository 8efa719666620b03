"""Numpy specification of `exchange_rows`."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray


def exchange_rows(
    changes: NDArray[Any], pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]
) -> None:
    """In place; changes [1 + 2 x most], pairs of arrays whose first axis are the rows."""
    for place, row in changes[1 : 1 + 2 * int(changes[0])].reshape(-1, 2):
        for target, source in pairs:
            target[place] = source[row]
