"""The likeliest tokens of a block slot by slot, where each slot's logits may depend on the token before it."""

from dataclasses import dataclass

from sparkinfer.backend.base import Activation, Backend, Buffer, Recorder, Weight
from sparkinfer.kernels.select import select


@dataclass(frozen=True)
class Links:
    """What a token adds to the logits of the slot after it: after @ before[token].

    `before` float32 [ids, rank]; `first` [1, rank] stands for the token before slot 0, written ahead of a replay;
    `after` reads its input from `x`, private to each thread.
    """

    before: Buffer
    first: Buffer
    after: Weight
    x: Activation


@dataclass(frozen=True)
class TokenLinks:
    """The same for a device, which knows the token before slot 0: it stands in a column of the one row of `anchor`.

    `before` float32 has a row [rank] for each token, not for each id; `after` is a weight of floats.
    """

    before: Buffer
    after: Weight
    anchor: tuple[Buffer, int]


@dataclass(frozen=True)
class Picks:
    """Results of a chain: int64 [1, slots] ids, and float32 [1, slots] their probabilities."""

    ids: Buffer
    chances: Buffer
    scratch: Buffer  # float32 [1, ids], of the op itself


@dataclass(frozen=True)
class TokenPicks:
    """Results on a device: `found` int64 [slots, 2] has each slot's token and the bits of its float32 probability.

    `known` int64 [1, ids]: the token of each id (None: the same number). `tokens`: a buffer of one row of int64 and its
    column that gets slot 0's token; the others follow.
    """

    found: Buffer
    known: Buffer | None = None
    tokens: tuple[Buffer, int] | None = None


def picks(backend: Backend, slots: int, ids: int) -> Picks:
    """Memory for the results of up to `slots` slots of `ids` ids."""
    width = -(-ids // 16) * 16
    return Picks(
        backend.buffer(1, slots, "int64"), backend.buffer(1, slots), backend.buffer(1, width)
    )


def greedy_chain(
    recorder: Recorder,
    logits: Buffer,
    ids: int,
    links: Links | TokenLinks | None,
    out: Picks | TokenPicks,
) -> None:
    """Record for every row (slot) of the recorder: its largest logit's id and that id's softmax probability.

    Shapes: logits rows x at least `ids`. With `links` a slot's logits are increased by what the id of the slot before
    adds. On a tie the lowest id; what is no number cannot win and counts for nothing.
    `Links` and `Picks` are for a host that reads buffers directly, `TokenLinks` and `TokenPicks` for devices.
    """
    select("greedy_chain", recorder.backend)(recorder, logits, ids, links, out)
