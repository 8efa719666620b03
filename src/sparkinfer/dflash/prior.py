"""What a draft's own file may tell about it: how often its slots are right, and what its claims are worth.

A planner that starts with it drafts and cuts from the first step as if it had seen a few steps of such text. It is
forgotten like anything else that was seen, so a wrong one costs little.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sparkinfer.errors import ShapeError

ACCEPTANCE, CLAIMS = "prior.acceptance", "prior.claims"  # ends of the keys in GGUF metadata
DEPTHS = 3  # the first slot, the second, all further ones
_SLACK = 1e-3  # of means that were rounded to float32


@dataclass(frozen=True, slots=True)
class Claims:
    """Of the slots of one depth that were reached: means of the claim, of what was kept (0 or 1), of the claim's square
    and of claim times kept.
    """

    claim: float
    kept: float
    square: float
    product: float


@dataclass(frozen=True, slots=True)
class Prior:
    """`acceptance` by slot, given that the slots before were kept; `claims` by depth."""

    acceptance: tuple[float, ...]
    claims: tuple[Claims, ...] = ()


def checked_prior(acceptance: Sequence[float], claims: Sequence[float]) -> Prior:
    """From a file's numbers: one for each slot, and none or four for each depth.

    Raises: ShapeError for numbers that cannot be means of probabilities.
    """
    rates, means = [float(rate) for rate in acceptance], [float(mean) for mean in claims]
    for number in (*rates, *means):
        if not 0.0 <= number <= 1.0:
            raise ShapeError(f"a draft's prior has {number}, which is outside 0 .. 1")
    if not rates or len(means) not in (0, 4 * DEPTHS):
        raise ShapeError(
            f"a draft's prior has {len(rates)} slots and {len(means)} means of claims; expected at least one slot and"
            f" 0 or {4 * DEPTHS} means"
        )
    depths = tuple(Claims(*means[at : at + 4]) for at in range(0, len(means), 4))
    for depth, of in enumerate(depths, 1):
        possible = of.claim**2 - _SLACK <= of.square <= of.claim + _SLACK
        if not possible or of.product > min(of.claim, of.kept) + _SLACK:
            raise ShapeError(f"a draft's prior has means of claims at depth {depth} that cannot be")
    return Prior(tuple(rates), depths)


class Tally:
    """Counts what becomes of drafted slots, for a prior."""

    def __init__(self, slots: int) -> None:
        self.reached, self.kept = [0] * slots, [0] * slots
        self._sums = [[0.0] * 5 for _ in range(DEPTHS)]  # count, claim, kept, square, product

    def add(self, claims: Sequence[float], accepted: int, judged: int) -> None:
        """A block's first `judged` slots were judged and `accepted` of them kept."""
        for slot in range(judged):
            claim, kept = float(claims[slot]), float(slot < accepted)
            self.reached[slot] += 1
            self.kept[slot] += slot < accepted
            for place, value in enumerate((1.0, claim, kept, claim * claim, claim * kept)):
                self._sums[min(slot, DEPTHS - 1)][place] += value

    @property
    def numbers(self) -> tuple[list[float], list[float]]:
        """Acceptance and claims as a file holds them; no slots where not even the first was judged."""
        pairs = zip(self.kept, self.reached, strict=True)
        rates = [kept / reached for kept, reached in pairs if reached]
        means: list[float] = []
        for count, *sums in self._sums:
            if not count:
                return rates, []
            means += [value / count for value in sums]
        return rates, means
