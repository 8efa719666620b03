"""The largest logit of every row, for rows that the host cannot read directly."""

from sparkinfer.backend.base import Buffer, Recorder
from sparkinfer.kernels.select import select


def argmax(recorder: Recorder, logits: Buffer, out: Buffer, n_vocab: int) -> None:
    """Record out[r] = (id of the largest of the first `n_vocab` logits of row r, 1 if all of them are finite else 0).

    Shapes: logits rows x at least n_vocab, out int64 rows x 2. On a tie the lowest id. Rows do not mix.
    """
    select("argmax", recorder.backend)(recorder, logits, out, n_vocab)
