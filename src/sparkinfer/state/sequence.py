"""One sequence: its tokens and the target's memory of them, with rewind, snapshot, restore and commit.

Keys and values above the length are not part of the state, so attention layers go back by forgetting. Recurrent layers
cannot: they go back to a kept copy and run forward again: the same bits, because rows are exact at any width.
"""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any

from sparkinfer.backend.base import Memory
from sparkinfer.errors import MemoryLimitError, RequestError
from sparkinfer.kernels.shapes import RecurrentShape
from sparkinfer.state.kv_cache import KvCache, KvShape
from sparkinfer.state.recurrent import RecurrentState

_SERIAL = itertools.count()
MARKS = 3  # copies of the recurrent state kept for rewinds


@dataclass(frozen=True)
class StateShape:
    """Everything that fixes a sequence's memory."""

    kv: KvShape
    recurrent: RecurrentShape | None

    def n_bytes(self, context: int) -> int:
        extra = self.recurrent.state_bytes + self.recurrent.record_bytes if self.recurrent else 0
        return self.kv.n_bytes(context) + extra


@dataclass(frozen=True)
class Snapshot:
    """The state after `length` tokens; `stamp` tells whether the cache rows below still belong to it."""

    length: int
    stamp: int
    recurrent: tuple[Any, Any] | None


class Sequence:
    """State of one sequence of at most `context` tokens.

    `advance` runs tokens through the target (used by `rewind`); `apply` commits recorded rows of the recurrent layers.
    """

    def __init__(
        self,
        shape: StateShape,
        context: int,
        *,
        advance: Callable[["Sequence", Ids[int]], None],
        apply: Callable[["Sequence", int], None],
        memory: Memory | None = None,
    ) -> None:
        """`memory`: of the target's backend (default: the host's).

        Raises MemoryLimitError when it cannot be reserved.
        """
        self.shape, self.context = shape, context
        self._advance, self._apply = advance, apply
        try:
            self.kv = KvCache(shape.kv, context, memory)
            self.recurrent = RecurrentState(shape.recurrent, memory) if shape.recurrent else None
        except MemoryError as error:
            gib = shape.n_bytes(context) / 2**30
            raise MemoryLimitError(
                f"a context of {context} tokens needs {gib:.1f} GiB; choose a smaller -c"
            ) from error
        self._tokens: list[int] = []  # may hold more than `length`: cache rows not yet overwritten
        self._stamps: list[int] = []
        self._clock = next(_SERIAL) << 40  # stamps of two sequences are never equal
        self._length = 0
        self._pending: list[int] = []
        self._torn = False  # recurrent state was left between two lengths (Ctrl-C inside a step)
        self._marks: list[Snapshot] = []

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._length

    @property
    def tokens(self) -> list[int]:
        return self._tokens[: self._length]

    @property
    def pending(self) -> list[int]:
        """Tokens of a verified window that is neither committed nor dropped."""
        return list(self._pending)

    def room(self, count: int) -> None:
        """Raise RequestError unless `count` more tokens fit; mends the state after an interrupt."""
        self._mend()
        if self._length + count > self.context:
            raise RequestError(
                f"{count} more tokens after {self._length} exceed the context of {self.context}; use a larger -c"
            )

    def begin(self) -> None:
        """Note that recurrent state is about to change in place; `extend` ends it, an interrupt may not."""
        self._torn = self.recurrent is not None

    def extend(self, tokens: Ids[int]) -> None:
        """Note that the target has advanced by `tokens`."""
        self._pending = []
        self._overwrite(tokens)
        self._length += len(tokens)
        self._torn = False

    def expect(self) -> None:
        """Note that the target writes the cache row of a token that nobody knows yet; the state stays as it is."""
        self._pending = []
        self._overwrite([0])

    @property
    def stamp(self) -> tuple[int, int]:
        """Equal as long as the state is: it changes with every token that comes, goes or is overwritten."""
        return self._length, self._stamps[self._length - 1] if self._length else 0

    def hold(self, tokens: Ids[int]) -> None:
        """Note a verified window: its cache rows are written, nothing is committed."""
        self._overwrite(tokens)
        self._pending = list(tokens)

    def commit(self, count: int) -> None:
        """Make the first `count` tokens of the verified window part of the state and drop the rest.

        Raises RequestError for a count outside 0 .. the window's rows.
        """
        self._mend()
        if not 0 <= count <= len(self._pending):
            raise RequestError(
                f"commit({count}): the verified window has {len(self._pending)} rows"
            )
        if count and self.recurrent is not None:
            self.begin()
            self._apply(self, count)
        self._pending = []
        self._length += count
        self._torn = False

    def rewind(self, count: int) -> None:
        """Forget the last `count` committed tokens; the state has the bits of never having seen them.

        Recurrent layers restart from the nearest kept copy (Ctrl-C meanwhile leaves a shorter sequence).
        Raises RequestError for a count outside 0 .. length.
        """
        if not 0 <= count <= self._length:
            raise RequestError(f"rewind({count}): the sequence has {self._length} tokens")
        self._pending = []
        wanted = self._length - count
        if self.recurrent is None or (count == 0 and not self._torn):
            self._length = wanted
            return
        tokens = self._tokens[:wanted]
        mark = max(
            (m for m in self._marks if m.length <= wanted and self._holds(m)),
            key=lambda m: m.length,
            default=None,
        )
        self._reset(mark)
        if wanted > self._length:
            self._advance(self, tokens[self._length :])

    def assume(self, count: int) -> None:
        """Pretend to hold `count` tokens, over a cache of zeros: what a measurement of time needs, never a result."""
        self.rewind(self._length)
        self.kv.clear(count)
        self._overwrite([0] * count)
        self._length = count

    def snapshot(self) -> Snapshot:
        """A copy to `restore` later. The cache is shared, so it lasts until one of its rows is overwritten."""
        self._mend()
        stamp = self._stamps[self._length - 1] if self._length else 0
        return Snapshot(self._length, stamp, self.recurrent.copy() if self.recurrent else None)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back (or forward) to a snapshot. Raises RequestError when its cache rows have been overwritten."""
        if not self._holds(snapshot):
            raise RequestError(
                f"the snapshot at {snapshot.length} tokens is of another sequence or its rows have been overwritten"
            )
        self._pending = []
        self._reset(snapshot)

    def mark(self) -> None:
        """Keep a copy that later rewinds may start from; the oldest gives way."""
        if self.recurrent is None or any(
            m.length == self._length and self._holds(m) for m in self._marks
        ):
            return
        kept = [m for m in self._marks if self._holds(m)]
        self._marks = [*kept[-(MARKS - 1) :], self.snapshot()]

    def _mend(self) -> None:
        if self._torn:
            self.rewind(0)

    def _overwrite(self, tokens: Ids[int]) -> None:
        self._tokens[self._length :] = tokens
        self._stamps[self._length :] = range(self._clock + 1, self._clock + 1 + len(tokens))
        self._clock += len(tokens)

    def _holds(self, snapshot: Snapshot) -> bool:
        length = snapshot.length
        return length == 0 or (
            len(self._stamps) >= length and self._stamps[length - 1] == snapshot.stamp
        )

    def _reset(self, snapshot: Snapshot | None) -> None:
        self._length = snapshot.length if snapshot else 0
        if self.recurrent is None:
            return
        self._torn = True
        if snapshot is None or snapshot.recurrent is None:
            self.recurrent.clear()
        else:
            self.recurrent.put(snapshot.recurrent)
        self._torn = False
