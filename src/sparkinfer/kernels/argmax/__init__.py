"""The largest logit of every row, for rows that the host cannot read directly."""

from sparkinfer.backend.base import Buffer, Recorder
from sparkinfer.kernels.select import select


def argmax(
    recorder: Recorder,
    logits: Buffer,
    out: Buffer,
    n_vocab: int,
    *,
    tokens: tuple[Buffer, int] | None = None,
) -> None:
    """Record out[r] = (id of the largest of the first `n_vocab` logits of row r, 1 if all of them are finite else 0).

    Shapes: logits rows x at least n_vocab, out int64 rows x 2. On a tie the lowest id. Rows do not mix.
    `tokens`, only on a device: a buffer of one row of int64 and its column that gets the first row's id; those of the
    other rows follow. An id outside the vocabulary, which rows without any number give, becomes the last one there.
    """
    record = select("argmax", recorder.backend)
    if tokens is None:
        record(recorder, logits, out, n_vocab)
    else:
        record(recorder, logits, out, n_vocab, tokens)


def argmax_words(
    recorder: Recorder,
    logits: Buffer,
    out: Buffer,
    n_vocab: int,
    params: Buffer,
    *,
    tokens: tuple[Buffer, int] | None = None,
    first: int | None = None,
) -> None:
    """`argmax` on a device, for a host that watches `out`, int64 rows x 1, the buffer of a `backend.board.Board`. The
    replay's serial stands in the run parameters.

    `first`, of a run of one row: the column of its token in `params`. The parameters become those of a replay for the
    token found: its id, the next position and serial, and the recurrent states change places.
    """
    select("argmax", recorder.backend, "record_words")(
        recorder, logits, out, n_vocab, params, tokens, first
    )
