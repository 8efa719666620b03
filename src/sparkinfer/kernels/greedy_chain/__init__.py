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
class Picks:
    """Results of a chain: int64 [1, slots] ids, and float32 [1, slots] their probabilities."""

    ids: Buffer
    chances: Buffer
    scratch: Buffer  # float32 [1, ids], of the op itself


def picks(backend: Backend, slots: int, ids: int) -> Picks:
    """Memory for the results of up to `slots` slots of `ids` ids."""
    width = -(-ids // 16) * 16
    return Picks(
        backend.buffer(1, slots, "int64"), backend.buffer(1, slots), backend.buffer(1, width)
    )


def greedy_chain(
    recorder: Recorder, logits: Buffer, ids: int, links: Links | None, out: Picks
) -> None:
    """Record for every row (slot) of the recorder: its largest logit's id and that id's softmax probability.

    Shapes: logits rows x at least `ids`. With `links` a slot's logits are increased by what the id of the slot before
    adds. On a tie the lowest id; what is no number cannot win and counts for nothing.
    Only where the host reads buffers directly.
    """
    select("greedy_chain", recorder.backend)(recorder, logits, ids, links, out)
