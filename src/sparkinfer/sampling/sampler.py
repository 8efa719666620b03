"""Sampler: one row of logits and the tokens before it to one token and its log-probabilities."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparkinfer.errors import ModelOutputError, RequestError
from sparkinfer.kernels.argmax.cpu_impl import largest as largest_of
from sparkinfer.sampling.arrays import Ids, Logits, largest, log_total
from sparkinfer.sampling.distribution import Distribution, adjust, distribution
from sparkinfer.sampling.history import TokenHistory
from sparkinfer.sampling.lazy import LazyRow
from sparkinfer.sampling.params import SamplingParams
from sparkinfer.sampling.randomness import uniform


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probabilities at one position under the model's own distribution.

    `top` holds the requested number of (id, log-probability), best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Choice(NamedTuple):
    """The token chosen for one row; `logprob` is None unless the request asked for it."""

    token: int
    logprob: TokenLogprob | None = None


class Sampler:
    """Applies one request's `SamplingParams`; holds no state between rows.

    `n_vocab` is the number of ids a tokenizer knows: logits beyond it are padding and never win.
    `stop_ids` are what `min_tokens` bans. The output depends on the row, the history and the seed
    only, so a row judged inside a block gives what the same row would give alone.

    Raises: RequestError for a bias on an unknown id, or a `min_tokens` that bans every id.
    """

    def __init__(
        self, params: SamplingParams, n_vocab: int, *, seed: int, stop_ids: Iterable[int] = ()
    ) -> None:
        unknown = [token for token in params.logit_bias if token >= n_vocab]
        if unknown:
            last = n_vocab - 1
            raise RequestError(f"logit_bias has token id {unknown[0]}; ids go from 0 to {last}")
        self.stop_ids = frozenset(stop_ids)
        banned = sorted(token for token in self.stop_ids if 0 <= token < n_vocab)
        if params.min_tokens and len(banned) >= n_vocab:
            raise RequestError("min_tokens would ban every token: all ids are stop ids")
        self.params = params
        self.n_vocab = n_vocab
        self.seed = seed
        self._banned: Ids | None = np.array(banned, dtype=np.int64) if banned else None
        # Whether `choose` needs nothing of a finite row but its largest logit's id.
        self.largest_is_enough = (
            params.greedy
            and not params.adjusts
            and params.logprobs is None
            and not params.min_tokens
        )

    def choose(self, row: Logits | LazyRow, history: TokenHistory) -> Choice:
        """The token for a row, float32 [>= n_vocab], that follows `history`.

        Raises: ModelOutputError for a logit that is not finite.
        """
        if isinstance(row, LazyRow):
            if self.largest_is_enough and row.finite and row.best < self.n_vocab:
                return Choice(row.best)
            row = np.asarray(row)
        valid, best = self._checked(row, history)
        adjusted = adjust(valid, history, self.params, self._bans(history))
        if not self.params.greedy:
            u = uniform(self.seed, history.position)
            token = distribution(adjusted, self.params).draw(u)
        else:
            token = best if adjusted is valid else int(adjusted.argmax())
        return Choice(token, self._logprob(valid, token))

    def distribution(self, row: Logits | LazyRow, history: TokenHistory) -> Distribution:
        """The exact distribution `choose` draws from; one id with probability 1 when greedy."""
        valid, _ = self._checked(np.asarray(row), history)
        return distribution(adjust(valid, history, self.params, self._bans(history)), self.params)

    def logprob(self, row: Logits | LazyRow, token: int) -> TokenLogprob | None:
        """The log-probabilities that go with a token chosen elsewhere; None unless the request asked for them."""
        if self.params.logprobs is None:
            return None
        return self._logprob(np.asarray(row)[: self.n_vocab], token)

    def _checked(self, row: Logits, history: TokenHistory) -> tuple[Logits, int]:
        """The row without padding, and the id of its largest logit."""
        valid = row[: self.n_vocab]
        if valid.dtype == np.float32 and valid.flags.c_contiguous:
            best, finite = largest_of(valid)
        else:
            best, finite = int(valid.argmax()), bool(np.isfinite(valid).all())
        if not finite:
            bad = int(np.flatnonzero(~np.isfinite(valid))[0])
            where = f"token id {bad} at position {history.position}"
            raise ModelOutputError(f"the model's logit for {where} is {valid[bad]}")
        return valid, best

    def _bans(self, history: TokenHistory) -> Ids | None:
        return self._banned if len(history.output) < self.params.min_tokens else None

    def _logprob(self, valid: Logits, token: int) -> TokenLogprob | None:
        count = self.params.logprobs
        if count is None:
            return None
        total = log_total(valid)
        top = largest(valid, count) if count else np.empty(0, dtype=np.int64)
        alternatives = tuple((int(i), float(valid[i]) - total) for i in top)
        return TokenLogprob(token, float(valid[token]) - total, alternatives)
