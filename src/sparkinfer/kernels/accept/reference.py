"""The definition of `accept` in numpy."""

from collections.abc import Sequence


def accept(window: Sequence[int], found: Sequence[int]) -> tuple[int, int]:
    """How many tokens of a window stay, and the id after them."""
    kept = 1
    while kept < len(window) and window[kept] == found[kept - 1]:
        kept += 1
    return kept, found[kept - 1]
