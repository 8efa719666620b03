"""From the logits of a block to tokens of the target: scaling, a reduced vocabulary and the Markov head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.dflash.base import Chain, Logits, Row
from sparkinfer.models.table import Table
from sparkinfer.sampling.lazy import LazyRow

LEAST = -1e30  # logit of an id that the draft cannot propose
_NEAR = np.float32(9.0)  # below the largest logit: what is less likely than that hardly counts


@dataclass(frozen=True)
class MarkovHead:
    """Adds W1[previous] W2^T to a slot's logits.

    `before` is W1 [target ids, rank]; `product` multiplies a vector [rank] with W2 [draft ids, rank] and may overwrite
    its last result.
    """

    before: Table
    product: Callable[[NDArray[np.float32]], NDArray[np.float32]]

    def bias(self, previous: int) -> NDArray[np.float32]:
        """float32 [draft ids], valid until the next call."""
        return self.product(self.before.row(previous))


@dataclass(frozen=True)
class Output:
    """What turns raw logits [draft ids] into logits over the target's ids."""

    n_vocab: int
    ids: NDArray[np.int64] | None = None  # target's id of each draft id; None: they are the same
    multiplier: float = 1.0
    softcap: float = 0.0
    markov: MarkovHead | None = None

    @property
    def scaled(self) -> bool:
        """Whether anything but a Markov head changes raw logits."""
        return self.multiplier != 1.0 or self.softcap > 0

    def logits(self, row: Row, previous: int) -> Logits:
        """Final logits over the draft's ids. A new array, unless nothing changes them."""
        raw: Logits = np.asarray(row)
        if self.multiplier != 1.0:
            raw = raw * np.float32(self.multiplier)
        if self.softcap > 0:
            raw = np.tanh(raw / np.float32(self.softcap)) * np.float32(self.softcap)
        if self.markov is not None:
            raw = raw + self.markov.bias(previous)
        return raw

    @property
    def ordered(self) -> bool:
        """Whether the largest raw logit is the largest of all."""
        return self.markov is None and self.multiplier > 0

    def best(self, raw: Row, previous: int) -> int:
        """Scaling that keeps the order is not computed."""
        index = int((raw if self.ordered else self.logits(raw, previous)).argmax())
        return index if self.ids is None else int(self.ids[index])

    def surest(self, raw: Row, previous: int) -> tuple[int, float | None]:
        """`best` and its probability; None where the row is on a device and nothing else asks for all of it."""
        if isinstance(raw, LazyRow) and self.ordered:
            return self.best(raw, previous), None
        logits = self.logits(raw, previous)
        index = int(logits.argmax())
        return index if self.ids is None else int(self.ids[index]), likelihood(logits, index)

    def row(self, raw: Logits, previous: int) -> Logits:
        """Finite logits over the target's ids, a new array."""
        values = self.logits(raw, previous)
        if self.ids is None:
            out = values.copy() if values is raw else values
        else:
            out = np.full(self.n_vocab, LEAST, np.float32)
            out[self.ids] = values
        return _finite(out)


@dataclass(frozen=True)
class Selector:
    """Second generation: of a slot's `top` likeliest ids, adds <P[previous] * h, S[id]> to the logits.

    `before` is P and `after` S, both [target ids, rank]; h [rank] comes with each slot.
    """

    before: Table
    after: Table
    top: int


class SelectorProposals:
    """Only the candidates of a slot can be proposed: other ids have the least logit."""

    def __init__(
        self, raw: Logits, hidden: NDArray[np.float32], output: Output, selector: Selector
    ):
        """`raw` [depth, ids] and `hidden` [depth, rank] are overwritten by the draft's next call."""
        self.depth = len(raw)
        self._raw, self._hidden, self._output, self._selector = raw, hidden, output, selector
        self._found: dict[int, tuple[NDArray[np.int64], Logits, NDArray[np.float32]]] = {}

    def best(self, slot: int, previous: int) -> int:
        ids, scores = self._scores(slot, previous)
        return int(ids[np.argmax(scores)])

    def surest(self, slot: int, previous: int) -> tuple[int, float | None]:
        ids, scores = self._scores(slot, previous)
        index = int(np.argmax(scores))
        return int(ids[index]), likelihood(scores, index)

    def row(self, slot: int, previous: int) -> Logits:
        ids, scores = self._scores(slot, previous)
        out = np.full(self._output.n_vocab, LEAST, np.float32)
        out[ids] = scores
        return out

    def _scores(self, slot: int, previous: int) -> tuple[NDArray[np.int64], Logits]:
        ids, logits, after = self._candidates(slot)
        query = self._selector.before.row(previous) * self._hidden[slot]
        return ids, _finite(logits + after @ query)

    def _candidates(self, slot: int) -> tuple[NDArray[np.int64], Logits, NDArray[np.float32]]:
        """Ids in ascending order, their logits and rows of S."""
        if slot not in self._found:
            row = _finite(self._output.logits(self._raw[slot], 0).copy())
            top = self._selector.top
            ids = np.sort(np.argpartition(row, len(row) - top)[len(row) - top :])
            self._found[slot] = ids, row[ids], self._selector.after.take(ids)
        return self._found[slot]


def likelihood(logits: Logits, index: int) -> float:
    """Of the largest logit's id, under the softmax of those near it; 0.0 where that is not finite.

    What is left out raises it by less than a few per cent, and takes most of the time.
    """
    largest = logits[index]
    near = logits[logits > largest - _NEAR]
    total = float(np.exp(near - largest).sum())
    return 1.0 / total if total >= 1.0 else 0.0


def _finite(values: Logits) -> Logits:
    """In place."""
    finite: Logits = np.nan_to_num(values, copy=False, nan=LEAST, posinf=-LEAST, neginf=LEAST)
    return finite


class BlockProposals:
    """Every slot for itself, but for the Markov head."""

    def __init__(self, raw: Any, output: Output, chain: Chain | None = None) -> None:
        """`raw` logits [depth, draft ids] are overwritten by the draft's next call; rows may lie on a device. `chain`:
        what is known of them.
        """
        self.depth = len(raw)
        self._raw, self._output, self._chain = raw, output, chain

    @property
    def chain(self) -> Chain | None:
        """A copy."""
        known = self._chain
        return known and Chain(known.anchor, [*known.tokens], [*known.chances])

    def best(self, slot: int, previous: int) -> int:
        chain = self._chain
        if chain is not None and chain.holds(slot, previous):
            return chain.tokens[slot]
        return self._output.best(self._raw[slot], previous)

    def surest(self, slot: int, previous: int) -> tuple[int, float | None]:
        chain = self._chain
        if chain is not None and chain.holds(slot, previous):
            return chain.tokens[slot], chain.chances[slot]
        return self._output.surest(self._raw[slot], previous)

    def row(self, slot: int, previous: int) -> Logits:
        return self._output.row(self._raw[slot], previous)
