"""Keeps speculation from ever costing more than a small share of plain decoding, whatever the draft does.

All in plain steps as they cost where the request began. A request may lose what it starts with, a share of its
plain time, and what it gained itself. In its first 127 tokens (a request for 128; the prompt gives the first) the
first two come to at most LIMIT, later tokens add GROWTH[1] each: so 128 tokens take at most 1 + 3.72 / 127 = 1.0293
times plain decoding, and more tokens less.
"""

from typing import Any

START = 2.0  # what may be lost while nothing is known
MOST = 3.7  # what a request may start with when earlier ones gained enough
GROWTH = (
    0.0135,
    0.025,
)  # of plain time, that may be lost besides: in the first EARLY tokens, after them
EARLY = 127
LIMIT = 3.72
SAVED = 100.0  # what earlier gains are worth at most


class Ledger:
    """Time spent against the time plain decoding would have taken.

    `balance` is what the request may still lose, `saved` what all of them together may: START, a share of all plain
    time, and all gains. A request starts with no more than what is saved, so many short ones cannot each lose
    something. A step is allowed if the balance covers it even though all of its drafts are rejected.
    """

    def __init__(self) -> None:
        self.balance = self.saved = START
        self.spent = self.plain = 0.0  # in this request
        self.tokens = 0
        self.scale = 1.0  # cost of a plain step now, against the request's start
        self._first = 1.0  # growth at the request's start
        self._early = GROWTH[0]  # what each of the first tokens adds to the balance
        self._length: int | None = None  # up to which tokens are counted
        self._open = False  # a step was paid for whose tokens are not counted yet

    def begin(self, length: int, growth: float) -> None:
        """A request starts after `length` tokens. Of the step before it only one token is sure to have been kept.

        `growth`: cost of a plain step at this length against an empty context, as it was measured.
        """
        if self._open:
            self._credit(1)
        self.saved = min(self.saved, SAVED)
        self.balance = min(self.saved, MOST)
        self._early = min(GROWTH[0], (LIMIT - self.balance) / EARLY)
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
        growth = self._early if self.tokens < EARLY else GROWTH[1]
        return self.balance + self.scale * (1.0 + growth - cost) >= 0.0

    def spend(self, cost: float) -> None:
        """A step at the length of the last decision cost so much, in plain steps of now."""
        cost *= self.scale
        self.balance -= cost
        self.saved -= cost
        self.spent += cost
        self._open = True

    def _credit(self, tokens: int) -> None:
        early = tokens
        if self.tokens + tokens > EARLY:
            early = max(0, EARLY - self.tokens)
        late = tokens + (tokens - early) * GROWTH[1]
        self.balance += self.scale * (late + early * self._early)
        self.saved += self.scale * (late + early * GROWTH[0])
        self.plain += self.scale * tokens
        self.tokens += tokens

    def report(self) -> dict[str, Any]:
        """In plain steps, ready for JSON."""
        return {
            "balance": round(self.balance, 2),
            "saved": round(self.saved, 2),
            "spent": round(self.spent, 2),
            "plain": round(self.plain, 2),
            "tokens": self.tokens,
            "start": START,
            "growth": list(GROWTH),
        }
