"""One sequence kept between requests, so that a shared prefix of tokens is not computed again."""

from collections.abc import Sequence
from typing import Any

from sparkinfer.decoding import SequenceLike, TargetLike

MAX_SNAPSHOTS = 3  # the latest; each holds a copy of the recurrent layers' state
TURN_TOKENS = 16  # the end of a chat prompt that a template may write differently in the next turn


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading tokens that both have."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


class PrefixCache:
    """Hands out the kept sequence, taken back to the longest prefix it shares with a prompt.

    Attention layers go back to any length. Recurrent layers go back to a snapshot: `passed` takes
    one at the last chunk that is clear of the prompt's final turn, and one at the prompt's end.
    What lies between is left to the next prefill, which can be watched and cancelled.
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
        if shared < state.length:
            self._go_back(state, shared)
        self._snapshots = [item for item in self._snapshots if item[0] <= state.length]
        return state, state.length

    def passed(self, chunk: int, left: int) -> None:
        """Note that a prefill has just done `chunk` tokens and `left` are to come."""
        if left == 0 or TURN_TOKENS <= left < TURN_TOKENS + chunk:
            self._mark(self._sequence())

    def _mark(self, state: SequenceLike) -> None:
        known = any(length == state.length for length, _ in self._snapshots)
        if state.recurrent is not None and not known:
            self._snapshots = self._snapshots[1 - MAX_SNAPSHOTS :]
            self._snapshots.append((state.length, state.snapshot()))

    def invalidate(self) -> None:
        """Forget the sequence: an error or an interrupt may have left it half written."""
        self._state = None
        self._snapshots = []

    def _sequence(self) -> SequenceLike:
        if self._state is None:
            state: SequenceLike = self._target.new_state()
            self._state = state
        return self._state

    def _go_back(self, state: SequenceLike, shared: int) -> None:
        usable = [item for item in self._snapshots if item[0] <= shared]
        if state.recurrent is None:
            state.rewind(state.length - shared)
        elif usable:
            state.restore(usable[-1][1])
        else:
            state.rewind(state.length)
