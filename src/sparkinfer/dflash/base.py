"""What the loop needs of a draft: context rows made of the target's features, and proposals for the next slots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sparkinfer.sampling.lazy import LazyRow

# float32 [rows, taps x n_embd]: the target's residual stream after each tapped layer, side by side, in the memory of
# the target's backend.
Features = Any
Logits = NDArray[np.float32]
Row = Logits | LazyRow  # a row of the target's logits


class Proposals(Protocol):
    """What a draft says about the `depth` slots after an anchor; slot 0 is the first token after it.

    `previous` is the token chosen for the slot before (the anchor for slot 0): a head that chains
    its slots reads it.
    """

    @property
    def depth(self) -> int:
        """Slots."""

    def best(self, slot: int, previous: int) -> int:
        """The likeliest token of a slot, an id of the target."""

    def row(self, slot: int, previous: int) -> Logits:
        """Finite logits over the target's ids, float32 [n_vocab]; ids the draft cannot propose are very low."""


@runtime_checkable
class Confident(Protocol):
    """Proposals that can tell how sure they are of their likeliest tokens."""

    def surest(self, slot: int, previous: int) -> tuple[int, float | None]:
        """`best`, and about the probability it has in `row`, 0 .. 1; None where that would be dear to know.

        It would be where the row is still on a device and only its largest logit has come over.
        """


@dataclass(frozen=True, slots=True)
class Chain:
    """The likeliest token of every slot after the likeliest one before it, and their probabilities.

    Proposals that know them already have one as `chain`. Whoever is given one may change its lists.
    """

    anchor: int
    tokens: list[int]
    chances: list[float]

    def holds(self, slot: int, previous: int) -> bool:
        """Whether it tells about this slot after the token `previous`."""
        return previous == (self.tokens[slot - 1] if slot else self.anchor)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Proposals of which nothing but the likeliest tokens are asked."""

    tokens: Sequence[int]

    @property
    def depth(self) -> int:
        return len(self.tokens)

    def best(self, slot: int, previous: int) -> int:
        return self.tokens[slot]

    def row(self, slot: int, previous: int) -> Logits:
        raise AssertionError("only the likeliest tokens are known")


@dataclass(frozen=True)
class Ahead:
    """A block that has only been started. `told` gives its tokens once the device is done, and `claims` the draft's
    probabilities of them (None: it does not tell); `known`: they are known now, else the device leaves them for the
    target.
    """

    told: Callable[[], Sequence[int]]
    known: Sequence[int] | None = None
    claims: Callable[[], Sequence[float]] | None = None


class Draft(Protocol):
    """A draft with the context of one sequence. Rows may be missing at the front: they are masked, never guessed."""

    name: str
    taps: tuple[int, ...]  # target layers after which it reads the residual stream
    max_depth: int  # most slots of a block

    @property
    def plan(self) -> Mapping[str, Any]:
        """Everything that was resolved at load, for records."""

    @property
    def length(self) -> int:
        """Tokens that its context covers; the next anchor stands at this position."""

    @property
    def gap(self) -> int:
        """How many of them have no row, because the target computed them without the draft."""

    def begin(self, tokens: Sequence[int]) -> None:
        """Continue after these tokens, which the target's state holds; keeps the rows that belong to them."""

    def extend(self, tokens: Sequence[int], features: Features) -> None:
        """Append context rows for tokens the target has computed, at most 64 at a time."""

    def propose(self, anchor: int, depth: int) -> Proposals:
        """Fill `depth` slots (1 .. max_depth) after `anchor`, the token at position `length`.

        Valid until the next call.
        """

    def assume(self, length: int) -> None:
        """Pretend to hold `length` rows, of zeros: what a measurement of time needs."""
