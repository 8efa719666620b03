"""What a run is given: its parameters, and tokens that become the rows of its stream."""

from collections.abc import Sequence

import numpy as np

from sparkinfer.backend.base import Backend, Buffer, Recorder, Weight
from sparkinfer.backend.board import SERIALS
from sparkinfer.kernels import run_params as P
from sparkinfer.kernels.embed import embed
from sparkinfer.models.table import Table

_SERIAL = P.SERIAL // 8


class Intake:
    """Gives runs their parameters and the rows of `x`, from the host or, given `packed`, on the device."""

    def __init__(
        self,
        backend: Backend,
        x: Buffer,
        table: Table,
        packed: Weight | None = None,
        *,
        scale: float = 1.0,
        mask: Buffer | None = None,
    ) -> None:
        """`packed` is the table in the backend's form; rows are multiplied by `scale`.

        With both, a token below 0 stands for `mask` [1, width], which is multiplied too.
        """
        self._backend, self._x, self._packed = backend, x, packed
        self._table, self._scale, self._mask = table, np.float32(scale), mask
        room = 0 if packed is None else x.rows
        self.params = backend.buffer(1, P.WORDS + room, np.int64)
        self._mailbox = backend.mailbox(self.params)
        self.rows = backend.staging(x)
        self.serial = 0  # of the last run that was given something

    def column(self, row: int) -> tuple[Buffer, int] | None:
        """Where a device may write the token of a row itself, ahead of a run; None where the host writes `rows`."""
        return None if self._packed is None else (self.params, P.WORDS + row)

    def record(self, recorder: Recorder) -> None:
        """Make the rows of `x` before anything else of the run."""
        if self._packed is None:
            recorder.receive(self._x)
            return
        scale = float(self._scale)
        embed(recorder, self._packed, self.params, P.WORDS, self._x, scale=scale, mask=self._mask)

    def passed(self) -> int:
        """The next run's serial: of one that is about to be given its parameters, or has them (`argmax_words`)."""
        self.serial = (self.serial + 1) % SERIALS
        return self.serial

    def expand(self, token: int) -> None:
        """Do what `send` has to do for a token and need not wait for."""
        if self._packed is None:
            self._table.row(token)

    def send(self, words: list[int], tokens: Sequence[int] = ()) -> None:
        """Give the next run its parameters (P.WORDS numbers, of which the serial is put in here) and tokens, also while
        something runs.

        Rows without a token here have the one that the device has written (`column`).

        Without `packed` the host writes `rows`, so it waits until nothing runs.
        """
        words[_SERIAL] = self.passed()
        if self._packed is not None:
            self._mailbox.send([*words, *tokens])
            return
        if tokens:
            self._backend.wait()
            self._table.write(tokens, self.rows)
            if self._scale != 1.0:
                self.rows[: len(tokens)] *= self._scale
        self._mailbox.send(words)
