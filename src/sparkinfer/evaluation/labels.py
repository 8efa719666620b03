"""Labels of the original's evaluation: a tier by gain, REJECT, BASELINE. Ours rest on an interval.

The original compares two single figures. Here a tier is given if the whole interval clears its cut, and REJECT if the
whole interval is under 98 % of the base. Published single figures are labelled by the original's rule and are marked.
"""

import math
from dataclasses import dataclass

PREFIX = "eval-dflash:"
CUTS = ((0.18, "XL"), (0.10, "L"), (0.06, "M"), (0.035, "S"), (0.02, "XS"))
REJECT, NONE, BASELINE = f"{PREFIX}REJECT", f"{PREFIX}none", f"{PREFIX}BASELINE"
REJECT_UNDER = 0.98
UNREPLICATED = "unreplicated: one figure a side, so chance cannot be told from change"


def tier(gain: float) -> str:
    """The label of a gain (0.1: 10 % faster) that is no REJECT."""
    for cut, name in CUTS:
        if gain >= cut:
            return PREFIX + name
    return NONE


def label_of_interval(low: float, high: float, reject: float = REJECT_UNDER) -> str:
    """The label of an interval of ratios: its lower end must clear a cut, its upper end be under `reject`."""
    return REJECT if high < reject else tier(low - 1)


def label_of_point(base: float, candidate: float, reject: float = REJECT_UNDER) -> str:
    """The original's rule on two single figures (tokens a second)."""
    if base <= 0 or candidate < reject * base:
        return REJECT
    return tier((candidate - base) / base)


@dataclass(frozen=True, slots=True)
class Published:
    """Figures that somebody printed: one run a side, no interval. `correct`, `guards_held` as they were reported."""

    base: float
    candidate: float
    correct: bool = True
    guards_held: bool = True
    reject: float = REJECT_UNDER

    @property
    def gain(self) -> float:
        """Relative gain, 0.1 for 10 %; minus infinity if there was no base figure."""
        return self.candidate / self.base - 1 if self.base > 0 else -math.inf

    @property
    def label(self) -> str:
        if not (self.correct and self.guards_held):
            return REJECT
        return label_of_point(self.base, self.candidate, self.reject)

    @property
    def note(self) -> str:
        return UNREPLICATED
