"""Verify paths: ways to run a window of tokens through the target before it is known how many of them stay.

Every path gives the same bits. `compact` and `window` leave the live state alone and commit
recorded rows; `token_loop` and `block` advance it and go back: attention layers forget, recurrent
layers restart from a copy of the window's head and run the kept tokens again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from sparkinfer.decoding import Reader
from sparkinfer.dflash.base import Features, Row

COMPACT_MAX_ROWS = 4
COMPACT, WINDOW = "compact", "window"  # one forward that records: few rows, and all widths
AHEAD = (COMPACT, WINDOW)  # paths whose windows may start before the host knows them
Judge = Callable[[int, Row], bool]


class VerifyTarget(Protocol):
    """What verifying needs of a target (`sparkinfer.models.Target`)."""

    max_width: int

    @property
    def plan(self) -> Any: ...
    def forward(
        self, state: Any, tokens: Sequence[int], *, rows: Any = "last", verify: bool = False
    ) -> Any: ...
    def tapped(self, rows: int) -> Features: ...
    def feature_rows(self, rows: int) -> Features: ...


class Verified(NamedTuple):
    """`rows` of the window were computed.

    `features` [rows, taps x n_embd] may be a view that the next forward overwrites.
    """

    path: str
    mode: str
    rows: int
    features: Features


class VerifyPath(Protocol):
    """One way. `run` and `commit` alternate; between them nothing else may use the state."""

    name: str

    def refusal(self, width: int) -> str | None:
        """Why this path does not serve a window of `width` rows; None if it does."""

    def run(self, state: Any, window: Sequence[int], judge: Judge) -> Verified:
        """Give `judge(index, logits)` the rows in order until it returns False or the window ends."""

    def commit(self, state: Any, kept: int) -> None:
        """Leave the state as after the first `kept` (>= 1) tokens of the window, decoded one at a time."""


class Batched:
    """All rows in one forward that records what a commit needs: `compact` and `window`."""

    def __init__(
        self, name: str, target: VerifyTarget, most: int, off: str | None, read: Reader
    ) -> None:
        self.name, self._target, self._most, self._off = name, target, most, off
        self._read = read
        self._mode = str(target.plan.get("mode", ""))

    def refusal(self, width: int) -> str | None:
        if self._off is not None:
            return self._off
        return f"{width} rows, at most {self._most}" if width > self._most else None

    def run(self, state: Any, window: Sequence[int], judge: Judge) -> Verified:
        rows = self._read(state, window, rows="all", verify=True)
        return self.judged(rows, judge)

    def judged(self, rows: Any, judge: Judge) -> Verified:
        """What `run` gives, of rows that a forward has given."""
        for index, row in enumerate(rows):
            if not judge(index, row):
                break
        return Verified(self.name, self._mode, len(rows), self._target.tapped(len(rows)))

    def commit(self, state: Any, kept: int) -> None:
        state.commit(kept)


class _Advancing:
    """Runs on the live state and takes back what was too much."""

    name: str

    def __init__(self, target: VerifyTarget, read: Reader) -> None:
        self._target, self._read = target, read
        self._mode = str(target.plan.get("mode", ""))
        self._head: Any = None
        self._window: list[int] = []
        self._advanced = 0

    def _start(self, state: Any, window: Sequence[int]) -> None:
        self._window, self._advanced = list(window), 0
        self._head = state.snapshot() if state.recurrent is not None else None

    def commit(self, state: Any, kept: int) -> None:
        assert 1 <= kept <= self._advanced, (kept, self._advanced)
        if kept == self._advanced:
            return
        if self._head is None:
            state.rewind(self._advanced - kept)
            return
        state.restore(self._head)
        self._target.forward(state, self._window[:kept], rows="none")


class TokenLoop(_Advancing):
    """One row at a time; ends at the first row that no later one can follow."""

    name = "token_loop"

    def refusal(self, width: int) -> str | None:
        return None

    def run(self, state: Any, window: Sequence[int], judge: Judge) -> Verified:
        self._start(state, window)
        features = self._target.feature_rows(len(window))
        for index, token in enumerate(window):
            row = self._read(state, [token])[0]
            features[index : index + 1] = self._target.tapped(1)
            self._advanced += 1
            if not judge(index, row):
                break
        return Verified(self.name, self._mode, self._advanced, features[: self._advanced])


class Block(_Advancing):
    """One ordinary forward of the whole window: the fallback that serves any width."""

    name = "block"

    def __init__(self, target: VerifyTarget, off: str | None, read: Reader) -> None:
        super().__init__(target, read)
        self._off = off

    def refusal(self, width: int) -> str | None:
        return self._off

    def run(self, state: Any, window: Sequence[int], judge: Judge) -> Verified:
        self._start(state, window)
        rows = self._read(state, window, rows="all")
        self._advanced = len(window)
        for index, row in enumerate(rows):
            if not judge(index, row):
                break
        return Verified(self.name, self._mode, len(window), self._target.tapped(len(window)))


class Paths:
    """The paths in the order in which a refusal falls through, and how often each refused."""

    def __init__(self, target: VerifyTarget, *, rows: bool = True, compact: int = 2) -> None:
        """`rows` False leaves wide windows to the token loop; `compact` 0 switches that path off."""
        wide = None if rows else "row-batched windows are switched off (dflash_rows)"
        small = None if compact else "switched off (dflash_compact_verify)"
        self.read = Reader(target)  # of whoever judges the windows
        compact_rows = min(COMPACT_MAX_ROWS, target.max_width)
        order: list[VerifyPath] = [
            Batched(COMPACT, target, compact_rows, small, self.read),
            Batched(WINDOW, target, target.max_width, wide, self.read),
            Block(target, wide, self.read),
            TokenLoop(target, self.read),
        ]
        self.order = tuple(order)
        self.max_width = compact_rows if compact == 1 else target.max_width
        self._from = {path.name: order[start:] + order[:start] for start, path in enumerate(order)}
        self.refusals: Counter[str] = Counter()

    def together(self, width: int) -> bool:
        """Whether a path runs windows of so many rows in one forward that records."""
        batched = (path for path in self.order if isinstance(path, Batched))
        return any(path.refusal(width) is None for path in batched)

    def pick(self, preferred: str, width: int) -> VerifyPath:
        """The preferred path, or the first one after it in order (then from the start) that serves the width."""
        for path in self._from[preferred]:
            reason = path.refusal(width)
            if reason is None:
                return path
            self.refusals[f"{path.name}: {reason}"] += 1
        raise AssertionError("the token loop serves every width")
