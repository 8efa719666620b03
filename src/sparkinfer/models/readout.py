"""Logits that a tape leaves in a buffer, and how the host reads them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend.base import Backend, Buffer, Recorder
from sparkinfer.kernels.argmax import argmax, argmax_words
from sparkinfer.sampling.lazy import LazyRows

Rows = NDArray[np.float32] | LazyRows


class Whole:
    """A row that lies on a device, as an array: valid until the next replay."""

    __slots__ = ("_fetch", "_row")

    def __init__(self, fetch: Callable[[int], NDArray[np.float32]], row: int) -> None:
        self._fetch, self._row = fetch, row

    def argmax(self) -> int:
        return int(self._fetch(self._row).argmax())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        values = self._fetch(self._row)
        return values if dtype is None else values.astype(dtype)


class Readout:
    """The first `n_vocab` columns of `buffer`. Tapes also find each row's `largest`, always where no host reads it."""

    def __init__(
        self, backend: Backend, buffer: Buffer, n_vocab: int, *, largest: bool = False
    ) -> None:
        self.buffer, self.n_vocab, self._backend = buffer, n_vocab, backend
        self._board = backend.board(buffer.rows)
        self._picks: Buffer | None = None
        self._read: NDArray[np.float32] | None = None  # last, from the first row on
        if largest and self._board is None:
            self._picks = backend.buffer(buffer.rows, 2, np.int64)

    def record(
        self,
        recorder: Recorder,
        params: Buffer,
        tokens: tuple[Buffer, int] | None = None,
        *,
        row: int = 0,
        follows: int | None = None,
    ) -> None:
        """After the op that writes the buffer from `row` on. `tokens` as `argmax` has it, `follows` is the `first` of
        `argmax_words`.
        """
        if self._picks is not None:
            argmax(recorder, self.buffer, self._picks, self.n_vocab, tokens=tokens)
        if self._board is not None:
            logits, words = self.buffer, self._board.buffer
            if row:
                logits, words = logits.part(row, 1), words.part(row, 1)
            argmax_words(
                recorder, logits, words, self.n_vocab, params, tokens=tokens, first=follows
            )

    def read(self, count: int, first: int = 0, serial: int | None = None) -> Any:
        """Rows `first` .. of the last replay, or of the one of that `serial`; the next one for them overwrites them."""
        if serial is None or self._board is None:
            self._backend.wait()
        else:
            self._board.wait(range(first, first + count), serial)
        if self._backend.on_host:
            rows: NDArray[np.float32] = self.buffer.array[first : first + count, : self.n_vocab]
            self._read = None if first else rows
            return rows
        return self.picked(count, first)

    def holds(self, rows: Any) -> bool:
        """Whether these rows are what the host has read in the buffer last, from its first row on."""
        return rows is self._read and rows is not None

    def picked(self, count: int, first: int = 0) -> LazyRows:
        """The same rows, of which the largest logits are known already."""
        return LazyRows(
            self._found(count, first), lambda row: self._fetch(first + row), self.n_vocab
        )

    def whole(self, count: int) -> list["Whole"]:
        """The first rows of the last replay, each brought from the device when it is asked for."""
        return [Whole(self._fetch, row) for row in range(count)]

    def found(self, count: int) -> list[int]:
        """The largest logits' ids of the first rows of a replay that has been waited for."""
        return [min(index, self.n_vocab - 1) for index, _ in self._found(count)]

    def _found(self, count: int, first: int = 0) -> Sequence[tuple[int, bool]]:
        """Of rows, the largest logit's id and whether all are finite."""
        if self._board is not None:
            return self._board.rows(first, count)
        assert self._picks is not None
        picks: list[tuple[int, bool]] = self._backend.staging(self._picks)[
            first : first + count
        ].tolist()
        return picks

    def _fetch(self, row: int) -> NDArray[np.float32]:
        values = self.buffer.array[row, : self.n_vocab]
        whole: NDArray[np.float32] = (
            values if self._backend.on_host else self._backend.download(values)
        )
        return whole
