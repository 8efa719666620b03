"""An oracle in place of a draft: replays a recorded output with scripted acceptance.

For benchmarks and tests, never for users.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkinfer.dflash.base import Ahead, Chosen, Draft, Features, Logits, Proposals

_NEVER = -1e4  # logit of what the oracle does not propose


def acceptance_script(mean: float, depth: int, steps: int = 1000) -> list[int]:
    """Accepted drafts per step, 0 .. depth, whose running mean stays within one of `mean` accepted drafts a step."""
    script, total = [], 0
    for step in range(1, steps + 1):
        script.append(max(0, min(depth, round(mean * step) - total)))
        total += script[-1]
    return script


@dataclass(frozen=True)
class ScriptedProposals(Chosen):
    """Fixed tokens, each with all of the probability."""

    n_vocab: int

    def row(self, slot: int, previous: int) -> Logits:
        row = np.full(self.n_vocab, _NEVER, np.float32)
        row[self.tokens[slot]] = 0.0
        return row


class ScriptedDraft:
    """Knows `recording` (prompt and plain output) and makes the drafts of step i right up to `script[i]`, then wrong.

    With `inner` a real draft's network runs beside it at its full cost; its proposals are thrown
    away.
    """

    def __init__(
        self,
        recording: Sequence[int],
        script: Sequence[int],
        n_vocab: int,
        *,
        inner: Draft | None = None,
        max_depth: int = 15,
    ) -> None:
        self.recording, self.script, self.n_vocab = list(recording), list(script), n_vocab
        self.inner = inner
        self.max_depth = min(max_depth, inner.max_depth) if inner else max_depth
        self.taps = inner.taps if inner else ()
        self.name = f"scripted acceptance ({inner.name})" if inner else "scripted acceptance"
        self.step = 0
        self._length = 0

    @property
    def plan(self) -> Mapping[str, Any]:
        network = dict(self.inner.plan) if self.inner else None
        return {"scripted": True, "max_depth": self.max_depth, "network": network}

    @property
    def length(self) -> int:
        return self._length

    @property
    def gap(self) -> int:
        return self.inner.gap if self.inner else 0

    def begin(self, tokens: Sequence[int]) -> None:
        self._length = len(tokens)
        if self.inner:
            self.inner.begin(tokens)

    def extend(self, tokens: Sequence[int], features: Features) -> None:
        self._length += len(tokens)
        if self.inner:
            self.inner.extend(tokens, features)

    def assume(self, length: int) -> None:
        self._length = length
        if self.inner:
            self.inner.assume(length)

    def extend_ahead(self, count: int) -> None:
        self.inner.extend_ahead(count)  # type: ignore[union-attr]

    @property
    def runs_ahead(self) -> bool:
        """As the network: its tokens are not waited for either."""
        return bool(getattr(self.inner, "runs_ahead", False))

    def propose_ahead(self, anchor: int, depth: int) -> Ahead:
        self.inner.propose_ahead(anchor, depth)  # type: ignore[union-attr]
        tokens = self._next(depth)
        return Ahead(lambda: tokens, tokens)

    def propose(self, anchor: int, depth: int) -> Proposals:
        if self.inner:
            _pay(self.inner.propose(anchor, depth), anchor)
        return ScriptedProposals(self._next(depth), self.n_vocab)

    def _next(self, depth: int) -> tuple[int, ...]:
        """The tokens of the next step."""
        right = self.script[self.step % len(self.script)]
        self.step += 1
        known = self.recording[self._length + 1 : self._length + 1 + depth]
        known += [0] * (depth - len(known))
        return tuple(
            token if slot < right else (token + 1) % self.n_vocab
            for slot, token in enumerate(known)
        )


def _pay(proposals: Proposals, anchor: int) -> None:
    """Spend the time that choosing the network's tokens takes."""
    previous = anchor
    for slot in range(proposals.depth):
        previous = proposals.best(slot, previous)
