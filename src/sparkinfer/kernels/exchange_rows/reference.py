"""Numpy specification of `exchange_rows`."""

from typing import Any

from numpy.typing import NDArray


def exchange_rows(changes: NDArray[Any], planes: list[tuple[NDArray[Any], NDArray[Any]]]) -> None:
    """In place; changes [1 + 2 x most]."""
    for place, row in changes[1 : 1 + 2 * int(changes[0])].reshape(-1, 2):
        for target, source in planes:
            target[place] = source[row]
