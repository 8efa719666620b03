"""Keeps speculation from ever costing more than a small share of plain decoding, whatever the draft does."""

from typing import Any

START = 2.0  # plain steps that a request may lose before it has gained anything
GROWTH = (
    0.01,
    0.025,
)  # of plain decoding's time that may be lost besides: in the first EARLY tokens, after them
EARLY = 127  # the tokens that a request for 128 decodes; the prompt gives the first
# So a request for 128 tokens costs at most 1 + 0.0135 + 2 / 127 = 1.0293 times plain decoding, a longer one less.


class Ledger:
    """Time spent against the time plain decoding would have taken, in plain steps as they cost where the request began.

    `balance` is what may still be lost. It starts at START or at what earlier requests left, if that is less, so
    that many short requests cannot each lose it; it grows with every token and with every gain. A step is
    allowed if the balance covers it even though all of its drafts are rejected.
    """

    def __init__(self) -> None:
        self.balance = START
        self.spent = self.plain = 0.0  # in this request
        self.tokens = 0
        self.scale = 1.0  # cost of a plain step now, against the request's start
        self._first = 1.0  # growth at the request's start
        self._length: int | None = None  # up to which tokens are counted
        self._open = False  # a step was paid for whose tokens are not counted yet

    def begin(self, length: int, growth: float) -> None:
        """A request starts after `length` tokens. Of the step before it only one token is sure to have been kept.

        `growth`: cost of a plain step at this length against an empty context, as it was measured.
        """
        if self._open:
            self._credit(1)
        self.balance = min(START, self.balance / self.scale)
        self.spent, self.plain, self.tokens = 0.0, 0.0, 0
        self.scale, self._first = 1.0, growth
        self._length, self._open = length, False

    def reach(self, length: int, growth: float) -> None:
        """The sequence now has `length` tokens; what was produced since the last call counts."""
        if self._length is None:
            self.begin(length, growth)
        assert self._length is not None
        self._credit(max(0, length - self._length))
        self._length, self._open = length, False
        self.scale = growth / self._first

    def allows(self, cost: float) -> bool:
        """Whether a step of this cost (in plain steps of now) may be lost all but its one sure token."""
        return self.balance + self.scale * (1.0 + GROWTH[self.tokens >= EARLY] - cost) >= 0.0

    def spend(self, cost: float) -> None:
        """A step at the length of the last decision cost so much, in plain steps of now."""
        self.balance -= cost * self.scale
        self.spent += cost * self.scale
        self._open = True

    def _credit(self, tokens: int) -> None:
        early = min(tokens, max(0, EARLY - self.tokens))
        allowance = early * GROWTH[0] + (tokens - early) * GROWTH[1]
        self.balance += self.scale * (tokens + allowance)
        self.plain += self.scale * tokens
        self.tokens += tokens

    def report(self) -> dict[str, Any]:
        """In plain steps, ready for JSON."""
        return {
            "balance": round(self.balance, 2),
            "spent": round(self.spent, 2),
            "plain": round(self.plain, 2),
            "tokens": self.tokens,
            "start": START,
            "growth": list(GROWTH),
        }
