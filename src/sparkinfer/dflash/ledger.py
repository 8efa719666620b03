"""Keeps speculation from ever costing more than a small share of plain decoding, whatever the draft does."""

from typing import Any

START = 2.0  # plain steps that a request may lose before it has gained anything
GROWTH = 0.0125  # of plain decoding's time, that may be lost in the long run
# 127 decoded tokens (the prompt gives the first of 128) then cost at most 127 * 1.0125 + 2 = 1.0283 times plain decoding.


class Ledger:
    """Time spent against the time plain decoding would have taken, in plain steps.

    `balance` is what may still be lost. It starts at START or at what earlier requests left, if that is less, so
    that many short requests cannot each lose it; it grows with every token and with every gain.
    """

    def __init__(self) -> None:
        self.balance = START
        self.spent = 0.0  # in this request, plain steps
        self.tokens = 0
        self._length: int | None = None  # up to which tokens are counted
        self._open = False  # a step was paid for whose tokens are not counted yet

    def begin(self, length: int) -> None:
        """A request starts after `length` tokens. Of the last step before it only one token is sure to have been kept."""
        if self._length is not None and self._open:
            self._credit(1)
        self.balance = min(START, self.balance)
        self.spent, self.tokens, self._length, self._open = 0.0, 0, length, False

    def reach(self, length: int) -> None:
        """The sequence now has `length` tokens; what was produced since the last call counts."""
        if self._length is None:
            self.begin(length)
        assert self._length is not None
        self._credit(max(0, length - self._length))
        self._length, self._open = length, False

    def allows(self, cost: float) -> bool:
        """Whether a step of this cost (in plain steps) may be lost all but its one sure token."""
        return self.balance + 1.0 + GROWTH >= cost

    def spend(self, cost: float) -> None:
        """A step cost so much."""
        self.balance -= cost
        self.spent += cost
        self._open = True

    def _credit(self, tokens: int) -> None:
        self.balance += tokens * (1.0 + GROWTH)
        self.tokens += tokens

    def report(self) -> dict[str, Any]:
        """In plain steps, ready for JSON."""
        return {
            "balance": round(self.balance, 2),
            "spent": round(self.spent, 2),
            "plain": self.tokens,
            "growth": GROWTH,
            "start": START,
        }
