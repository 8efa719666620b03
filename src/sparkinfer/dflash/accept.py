"""Acceptance: which drafted tokens the target keeps, and the token of its own that follows them.

`match` draws the target's own token for every row and keeps a draft token that equals it: the
output is plain decoding's, token for token, sampled or not. `rejection` keeps a draft token with
probability min(1, p / q) and else draws from what p has more than q: the same distribution, other
tokens than plain decoding with the same seed would give.
Source: Leviathan et al., "Fast inference from transformers via speculative decoding" (2023), 2.3.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np

from sparkinfer.dflash.base import Chain, Confident, Proposals, Row
from sparkinfer.sampling import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    Choice,
    Distribution,
    Sampler,
    TokenHistory,
    uniform,
)

More = Callable[[Sequence[float]], bool]  # claims so far -> whether another slot is worth a look


class Judge(Protocol):
    """Judges the rows of one window in order. Rows see the tokens before them as if these were output already."""

    drafts: list[int]  # what the window holds after the anchor
    claims: list[
        float
    ]  # the draft's probabilities of them; empty if nobody asked or the draft does not tell
    choices: list[Choice]  # the target's tokens so far: accepted drafts, then one of its own
    accepted: int
    judged: int  # drafts that were accepted or rejected; later ones were never looked at

    def keep(self, count: int) -> None:
        """Forget all drafts but the first `count`; before the first row is judged."""

    def __call__(self, index: int, row: Row) -> bool:
        """Take row `index` of the window; True when the next row is of use.

        Raises: ModelOutputError for a logit that is not finite.
        """


class Match:
    """Keep what the target would have chosen itself.

    So the window may end anywhere, for any reason: `more` is asked after each slot whether to choose a token for the
    next one too (unless all are chosen already), and `keep` cuts off what was chosen.
    """

    def __init__(
        self,
        proposals: Proposals,
        anchor: int,
        sampler: Sampler,
        history: TokenHistory,
        more: More | None = None,
    ) -> None:
        self._sampler, self._history = sampler, history
        self.drafts: list[int] = []
        self.claims: list[float] = []
        self.choices: list[Choice] = []
        self.accepted = self.judged = 0
        known: Chain | None = getattr(proposals, "chain", None) if more else None
        if known is not None and known.anchor == anchor:
            self.drafts, self.claims = known.tokens, known.chances
            return
        surest = proposals.surest if more and isinstance(proposals, Confident) else None
        for slot in range(proposals.depth):
            previous = self.drafts[-1] if slot else anchor
            if surest is None or more is None:
                self.drafts.append(proposals.best(slot, previous))
                continue
            token, claim = surest(slot, previous)
            self.drafts.append(token)
            if claim is None:
                surest = None
                self.claims.clear()
                continue
            self.claims.append(claim)
            if not more(self.claims):
                break

    def keep(self, count: int) -> None:
        """Forget all drafts but the first `count`; before the first row is judged."""
        del self.drafts[count:]

    def __call__(self, index: int, row: Row) -> bool:
        choice = self._sampler.choose(row, self._history)
        accepted = index < len(self.drafts) and choice.token == self.drafts[index]
        return self._take(index, choice, accepted)

    def _take(self, index: int, choice: Choice, accepted: bool) -> bool:
        """Note a choice; nothing comes after a rejected draft, the bonus token or an ending one."""
        self._history.push(choice.token)
        self.choices.append(choice)
        self.judged += index < len(self.drafts)
        self.accepted += accepted
        return accepted and choice.token not in self._sampler.stop_ids


class Rejection(Match):
    """Keep a token drawn from q with probability min(1, p / q).

    With a temperature `more` is not asked and there are no claims: tokens are drawn, and a window that ends where a
    token is drawn that the draft thinks unlikely would prefer the others.
    """

    def __init__(
        self,
        proposals: Proposals,
        anchor: int,
        sampler: Sampler,
        history: TokenHistory,
        more: More | None = None,
    ) -> None:
        if sampler.params.greedy:
            super().__init__(proposals, anchor, sampler, history, more)
            self._laws: list[Distribution] = []
            return
        self._sampler, self._history = sampler, history
        self.drafts, self.claims, self._laws = [], [], []
        self.choices = []
        self.accepted = self.judged = 0
        for slot in range(proposals.depth):
            row = proposals.row(slot, self.drafts[-1] if slot else anchor)
            law = sampler.distribution(row, history)
            token = law.draw(uniform(sampler.seed, history.position, DRAFT_STREAM))
            history.push(token)
            self.drafts.append(token)
            self._laws.append(law)
        history.pop(proposals.depth)

    def __call__(self, index: int, row: Row) -> bool:
        if index >= len(self._laws):
            return super().__call__(index, row)
        sampler, history = self._sampler, self._history
        p, q, draft = sampler.distribution(row, history), self._laws[index], self.drafts[index]
        u = uniform(sampler.seed, history.position, ACCEPT_STREAM)
        accepted = u * q.probability(draft) < p.probability(draft)
        token = draft if accepted else self._residual(p, q)
        return self._take(index, Choice(token, sampler.logprob(row, token)), accepted)

    def _residual(self, p: Distribution, q: Distribution) -> int:
        """Drawn from max(0, p - q); from p where rounding leaves nothing of that."""
        size = self._sampler.n_vocab
        excess = np.maximum(p.dense(size) - q.dense(size), 0.0)
        total = float(excess.sum())
        law = Distribution(None, excess, total) if total > 0.0 else p
        return law.draw(uniform(self._sampler.seed, self._history.position))


RULES: Mapping[str, type[Match]] = MappingProxyType({"match": Match, "rejection": Rejection})
