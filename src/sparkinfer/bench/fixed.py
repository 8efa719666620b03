"""A policy for checks: it goes round a list of widths and paths, whatever pays."""

from collections.abc import Sequence
from typing import Any

from sparkinfer.decoding import AR_PATH
from sparkinfer.dflash.planner import Decision, Observed


class Forced:
    """Another (rows, path) pair at every step; the end of a request cuts the rows."""

    def __init__(self, name: str, turns: Sequence[tuple[int, str]]) -> None:
        assert turns, "at least one pair is needed"
        self.name, self._turns, self._step = name, tuple(turns), 0

    def begin(self, length: int, *, usual: bool = True) -> None:
        self._step = 0

    def choose(self, length: int, limit: int) -> Decision:
        width, path = self._turns[self._step % len(self._turns)]
        self._step += 1
        width = min(width, limit)
        return Decision(width, path if width > 1 else AR_PATH, self.name)

    def observe(self, step: Observed) -> None:
        """Nothing is learned."""

    def expected_speedup(self) -> float:
        """Nothing is expected."""
        return 1.0

    def plain_seconds(self, length: int) -> float:
        """No cost is known."""
        return 0.0

    def report(self) -> dict[str, Any]:
        return {"policy": self.name}
