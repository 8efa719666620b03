"""What a policy is: it decides how many rows the next step verifies. No policy sees a token or a clock.

It may see how probable the draft's own tokens are to the draft, and cut a window that was drafted: with the rule
`match` no output depends on where windows end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparkinfer.dflash.costs import CostTable, Observed
from sparkinfer.dflash.prior import Prior


class Cutter(Protocol):
    """Ends a window that was drafted where the draft is not sure enough."""

    def more(self, claims: Sequence[float]) -> bool:
        """Whether the draft should choose a token for another slot, after it claimed these probabilities."""

    def cut(self, claims: Sequence[float]) -> "Decision":
        """How much of the window to verify instead of all of it, 1 .. `len(claims) + 1` rows."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`width` rows to verify, on `path` if it serves them; 1 is a plain step ("ar"). `why` is for people.

    A `cutter` wants to know the draft's claims before the target starts, and may shorten the window. `learns`: whoever
    decided wants to know the claims in the end.
    """

    width: int
    path: str
    why: str
    cutter: Cutter | None = field(default=None, compare=False, repr=False)
    learns: bool = field(default=False, compare=False, repr=False)


class Policy(Protocol):
    """Decides one request after another; what it learned stays."""

    name: str

    def begin(self, length: int, *, usual: bool = True) -> None:
        """A request starts after `length` context tokens.

        Not `usual`: penalties or biases change what the target chooses but not what the draft proposes, so what is
        learned about the draft holds for this request only.
        """

    def choose(self, length: int, limit: int) -> Decision:
        """What to do after `length` tokens; more than `limit` (>= 1) rows make no sense now."""

    def observe(self, step: Observed) -> None:
        """The step that was chosen last, after its commit."""

    def expected_speedup(self) -> float:
        """Plain decoding's time over the expected time, 1.0 where nothing is gained."""

    def plain_seconds(self, length: int) -> float:
        """What a plain step costs after `length` tokens."""

    def report(self) -> dict[str, Any]:
        """Ready for JSON."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a policy is built from.

    `costs` of the permitted paths, the most slots of the draft, the most rows of a window, how many tokens to
    propose at every step (0: as many as pay), and what the draft's file tells about it.
    """

    costs: CostTable
    max_depth: int
    max_width: int
    proposals: int = 0
    prior: Prior | None = None

    @property
    def top(self) -> int:
        """The most rows that make sense."""
        return min(self.max_width, self.max_depth + 1)
