"""One sequence kept between requests, so that a shared prefix of tokens is not computed again."""

from collections.abc import Sequence
from typing import Any

from sparkinfer.decoding import SequenceLike, TargetLike
from sparkinfer.errors import SparkError

MAX_SNAPSHOTS = 4


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading tokens that both have."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


class PrefixCache:
    """Hands out the kept sequence, taken back to the longest prefix it shares with a prompt.

    A state that cannot rewind that far (recurrent layers) is restored from the latest snapshot
    before that point; `mark` takes one, and the empty sequence is always one.
    """

    def __init__(self, target: TargetLike) -> None:
        self._target = target
        self._state: SequenceLike | None = None
        self._snapshots: list[tuple[int, Any]] = []

    @property
    def context(self) -> int:
        """Tokens the sequence can hold. Raises: MemoryLimitError if it does not fit."""
        return self._sequence().context

    def acquire(self, prompt: Sequence[int], *, reuse: bool = True) -> tuple[SequenceLike, int]:
        """The sequence and how many tokens of `prompt` it holds; at least one is left to compute.

        Raises: MemoryLimitError if a new state does not fit.
        """
        state = self._sequence()
        shared = min(common_prefix(state.tokens, prompt), len(prompt) - 1) if reuse else 0
        if not (reuse and _rewound(state, state.length - shared)):
            self._restore(state, shared)
        self._snapshots = [mark for mark in self._snapshots if mark[0] <= state.length]
        return state, state.length

    def mark(self) -> None:
        """Remember the sequence as it is, so that a later prompt can go back to here."""
        state = self._state
        if state is None or any(length == state.length for length, _ in self._snapshots):
            return
        self._snapshots.append((state.length, state.snapshot()))
        if len(self._snapshots) > MAX_SNAPSHOTS:
            del self._snapshots[1]  # the empty sequence stays

    def invalidate(self) -> None:
        """Forget the sequence: an error or an interrupt may have left it half written."""
        self._state = None
        self._snapshots = []

    def _sequence(self) -> SequenceLike:
        if self._state is None:
            state: SequenceLike = self._target.new_state()
            self._snapshots = [(0, state.snapshot())]
            self._state = state
        return self._state

    def _restore(self, state: SequenceLike, at_most: int) -> None:
        _, snapshot = max(
            (mark for mark in self._snapshots if mark[0] <= at_most), key=lambda mark: mark[0]
        )
        state.restore(snapshot)


def _rewound(state: SequenceLike, count: int) -> bool:
    if count == 0:
        return True
    try:
        state.rewind(count)
    except SparkError:
        return False
    return True
