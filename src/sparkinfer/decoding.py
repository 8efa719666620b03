"""Decoders: from a target's logits to the next tokens, one step at a time.

`AutoregressiveDecoder` takes one token a step and is the oracle of every other decoder: whatever
another one proposes and verifies, the tokens it returns must be these.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sparkinfer.sampling import Sampler, TokenHistory, TokenLogprob
from sparkinfer.sampling.lazy import LazyRow

Row = NDArray[np.float32] | LazyRow  # logits after a token
Progress = Callable[[int, int], None]  # (tokens done, tokens in total)
PREFILL_PATH = "prefill"
AR_PATH = "ar"


def picked(target: Any, rows: Any) -> Any:
    """Rows of logits that the target's last forward gave, with their largest known if the target found these."""
    found = getattr(target, "picked", None)
    return rows if found is None else found(rows)


def best_rows(target: Any, state: Any, tokens: Sequence[int], **how: Any) -> Any:
    """The rows of a forward for a choice that needs little but each row's largest logit, where the target knows less
    work for that (`sparkinfer.models.Target.best`).
    """
    return Reader(target)(state, tokens, **how)


class Reader:
    """Runs a target for whoever chooses tokens from its rows; `sampler` is whose they are, None for a greedy one."""

    def __init__(self, target: Any) -> None:
        self._target, self._best = target, getattr(target, "best", None)
        self.sampler: Sampler | None = None

    def __call__(self, state: Any, tokens: Sequence[int], **how: Any) -> Any:
        """The rows of a forward."""
        greedy = self.sampler is None or self.sampler.largest_is_enough
        if greedy and self._best is not None:
            return self._best(state, tokens, **how)
        return picked(self._target, self._target.forward(state, tokens, **how))


class SequenceLike(Protocol):
    """What decoding needs of a target's state (`sparkinfer.state.Sequence`)."""

    @property
    def length(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def recurrent(self) -> object: ...  # None if going back to any length costs nothing
    def snapshot(self) -> Any: ...
    def restore(self, snapshot: Any) -> None: ...
    def rewind(self, n: int) -> None: ...


class TargetLike(Protocol):
    """What decoding needs of a target (`sparkinfer.models.Target`)."""

    @property
    def plan(self) -> Mapping[str, Any]: ...
    def new_state(self) -> Any: ...
    def prefill(
        self, state: Any, tokens: Sequence[int], progress: Progress | None = None
    ) -> Row: ...
    def forward(self, state: Any, tokens: Sequence[int]) -> Any: ...
    def set_taps(self, layers: Sequence[int]) -> None: ...


class StepResult(NamedTuple):
    """What one step produced and how.

    `tokens` are in order, at least one; `logprobs` match them one to one, or are empty when the
    request asked for none. `rows` is the number of rows the target computed, `drafted` how many
    proposed tokens were among them and `accepted` how many of those the target agreed with. `path` names the
    way the rows were computed and `mode` whether a recorded graph was replayed. `seconds` splits
    the step's time by part ("target", "sample", "draft", ...).
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    path: str = AR_PATH
    mode: str = ""
    rows: int = 1
    drafted: int = 0
    accepted: int = 0
    seconds: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """What speculation did for one request, and why.

    `steps`, `drafted` and `accepted` count the steps that drafted; `slots` tells for each slot
    after the anchor how often it was judged and how often kept; `widths` counts all steps by the
    rows asked for (1: a plain one), `cuts` those of them whose drafted window was cut to that.
    `refusals` counts verify paths that declined, as "path: reason". `gap_rows` tokens of the
    context are unknown to the draft. `expected` is the speed-up over plain decoding the planner
    expected at the start; `gain` what came out against the measured cost of one row, None before
    the first decode step. `planner` holds the planner's own numbers, ready for JSON.
    """

    draft: str
    policy: str
    accept: str
    steps: int
    drafted: int
    accepted: int
    slots: tuple[tuple[int, int], ...]
    widths: Mapping[int, int]
    refusals: Mapping[str, int]
    gap_rows: int
    why: str
    expected: float
    gain: float | None
    planner: Mapping[str, Any]
    cuts: Mapping[int, int] = field(default_factory=dict)

    @property
    def tau(self) -> float:
        """Mean acceptance length: tokens a drafting step yields, 1.0 before the first one."""
        return 1.0 + (self.accepted / self.steps if self.steps else 0.0)


class Decoder(Protocol):
    """Produces the output of one request after another, over a state it is given.

    The order of calls is `begin`, then `step` and `commit` in turn. After `commit` the state holds
    every output token but the last, as after plain decoding, and the history holds all of them.
    """

    name: str

    @property
    def plan(self) -> Mapping[str, Any]:
        """What it resolved beyond the target's plan, for records."""

    def describe(self) -> str | None:
        """One line on its drafting for people; None from a decoder that never drafts."""

    def begin(
        self,
        state: SequenceLike,
        tokens: Sequence[int],
        sampler: Sampler,
        history: TokenHistory,
        progress: Progress | None = None,
    ) -> None:
        """Prefill `tokens`, the part of the prompt (at least one token) the state does not hold."""

    def step(self, limit: int) -> StepResult:
        """The next tokens, at least one; more than `limit` (>= 1) would be thrown away."""

    def commit(self, count: int) -> None:
        """Keep the first `count` (>= 1) tokens of the last step; the others were never there.

        Deciding after the step, not undoing it, is what recurrent states need: a window that was
        verified but not committed has left them as they were.
        """

    def report(self) -> SpeculationReport | None:
        """What speculation did since `begin`; None from a decoder that never drafts."""


class AutoregressiveDecoder:
    """One row, one token a step."""

    name = AR_PATH

    def __init__(self, target: TargetLike) -> None:
        self._target, self._read = target, Reader(target)
        ahead = bool(getattr(target, "runs_ahead", False))
        self._row_after = getattr(target, "row_after", None) if ahead else None
        self._mode = str(target.plan.get("mode", ""))
        self._state: SequenceLike
        self._sampler: Sampler
        self._history: TokenHistory
        self._first: Row | None = None

    def begin(
        self,
        state: SequenceLike,
        tokens: Sequence[int],
        sampler: Sampler,
        history: TokenHistory,
        progress: Progress | None = None,
    ) -> None:
        """Prefill the rest of the prompt; its last row gives the first token."""
        self._target.set_taps(())
        self._state, self._sampler, self._history = state, sampler, history
        self._read.sampler = sampler
        self._first = self._target.prefill(state, tokens, progress)

    def step(self, limit: int) -> StepResult:
        """The next token. The first step computes no row: it uses the prompt's last one."""
        assert limit >= 1, limit
        started = perf_counter()
        row, self._first = self._first, None
        path, mode, rows = PREFILL_PATH, "", 0
        if row is None:
            path, mode, rows = AR_PATH, self._mode, 1
            row = self._next_row(limit)
        computed = perf_counter()
        choice = self._sampler.choose(row, self._history)
        self._history.push(choice.token)
        seconds = {"target": computed - started, "sample": perf_counter() - computed}
        return StepResult(
            tokens=(choice.token,),
            logprobs=(choice.logprob,) if choice.logprob else (),
            path=path,
            mode=mode,
            rows=rows,
            seconds=seconds,
        )

    def _next_row(self, limit: int) -> Row:
        """The last token's. Where the target can, it begins with the next one too, unless this one is the last."""
        last = self._history.output[-1:]
        if self._row_after is not None and self._sampler.largest_is_enough:
            row: Row = self._row_after(self._state, last[0], ahead=limit > 1)
            return row
        found: Row = self._read(self._state, last)[0]
        return found

    def commit(self, count: int) -> None:
        """A step has one token, and the row it came from is part of the state already."""
        assert count == 1, count

    @property
    def plan(self) -> Mapping[str, Any]:
        """Nothing of its own."""
        return {}

    def describe(self) -> None:
        """No step drafts."""

    def report(self) -> None:
        """No step drafts."""
