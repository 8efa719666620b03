"""Ratios of runs that were taken in turns, and how far they spread."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of repeated figures, with the least and the greatest."""

    median: float
    least: float
    greatest: float
    count: int

    @classmethod
    def of(cls, figures: Sequence[float]) -> "Spread":
        """Summarise at least one figure."""
        return cls(statistics.median(figures), min(figures), max(figures), len(figures))

    def text(self, digits: int = 2) -> str:
        """Return "1.62 (1.55 to 1.70)", or the figure alone if there is only one."""
        if self.count == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.least:.{digits}f} to {self.greatest:.{digits}f})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "median": round(self.median, 4),
            "least": round(self.least, 4),
            "greatest": round(self.greatest, 4),
            "count": self.count,
        }


def in_turns(count: int, round_number: int) -> range:
    """Return the order of `count` sides in a round: forwards, then backwards (A B, B A).

    A machine that grows slower or faster over two rounds then favours neither side.
    """
    return range(count) if round_number % 2 == 0 else range(count - 1, -1, -1)
