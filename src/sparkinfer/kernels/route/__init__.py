"""Top-k routing of a mixture of experts."""

from dataclasses import dataclass

from sparkinfer.backend.base import Buffer, Recorder
from sparkinfer.kernels.select import select


@dataclass(frozen=True)
class Routing:
    """Result of `route` for `rows` rows, `used` experts each. A slot is a (row, expert) pair, slots ordered by expert.

    table: int64 words: number of active experts | rows x used slots of each row by rank | per active expert: its id,
    its number of rows, its first slot | the row of every slot. weights: float32 rows x used by rank, sum 1 a row.

    A GPU writes no table for a window of rows: its slots are ordered by row, then by rank (`triton_impl.slots_of`).
    """

    table: Buffer
    weights: Buffer
    experts: int
    used: int


def routing_words(rows: int, used: int, experts: int) -> int:
    """int64 words of a routing table."""
    return 1 + 2 * rows * used + 3 * min(experts, rows * used)


def route(recorder: Recorder, logits: Buffer, routing: Routing) -> None:
    """Record the choice of the `used` largest of the first `experts` logits of every row (ties: the lower id).

    Shapes: logits rows x at least experts. The weights are the softmax over the chosen logits, which equals the
    renormalised softmax over all. Rows do not mix, except that slots are numbered over all rows.
    """
    select("route", recorder.backend)(recorder, logits, routing)
