"""The commit path: every token of every decoder becomes output here, one at a time.

A step of k tokens is pushed token by token and stops where k single steps would have stopped.
"""

from collections.abc import Mapping
from typing import Protocol

from sparkinfer.engine.result import FinishReason, StopMatch
from sparkinfer.engine.stop import StopScanner
from sparkinfer.sampling import TokenLogprob


class DetokenizerLike(Protocol):
    """Incremental text of tokens; complete characters only, the tail on flush."""

    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...


class Output:
    """Text, tokens and log-probabilities of one generation, and why it ended.

    `stop_ids` maps each ending id to the stop string it stands for, if one was given for it.
    `limit` tokens end the output with `limit_reason`. Stop strings are looked for in the text
    after the first `min_tokens` tokens only.
    """

    def __init__(
        self,
        detokenizer: DetokenizerLike,
        scanner: StopScanner,
        stop_ids: Mapping[int, str | None],
        limit: int,
        limit_reason: FinishReason,
        min_tokens: int = 0,
    ) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop: StopMatch | None = None
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._stop_ids = stop_ids
        self._limit = limit
        self._limit_reason: FinishReason = limit_reason
        self._min_tokens = min_tokens
        self._pieces: list[str] = []
        self._taken = 0
        if limit <= 0:
            self.finish(limit_reason)

    @property
    def text(self) -> str:
        """All certain text so far; complete once finished."""
        return "".join(self._pieces)

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self._limit - len(self.tokens)

    def push(self, token: int, logprob: TokenLogprob | None) -> bool:
        """Commit one token; True once the output has ended with it."""
        assert self.finish_reason is None, "a token after the end"
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token in self._stop_ids:
            self.finish("stop", StopMatch(token, self._stop_ids[token]))
        else:
            self._add(self._detokenizer.push(token))
        if self.finish_reason is None and self.room <= 0:
            self.finish(self._limit_reason)
        return self.finish_reason is not None

    def finish(self, reason: FinishReason, stop: StopMatch | None = None) -> None:
        """End the output: the tail of an open character and held back text come out now."""
        self.finish_reason, self.stop = reason, stop
        self._add(self._detokenizer.flush())
        self._pieces.append(self._scanner.flush())

    def take(self) -> str:
        """Text that became certain since the last call."""
        fresh = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return fresh

    def _add(self, text: str) -> None:
        if len(self.tokens) <= self._min_tokens:
            self._pieces.append(text)
            return
        self._pieces.append(self._scanner.push(text))
        if self._scanner.match is not None and self.stop is None:
            self.finish_reason, self.stop = "stop", StopMatch(text=self._scanner.match)
