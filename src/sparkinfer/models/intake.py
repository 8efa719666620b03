"""What a run is given: its parameters, and tokens that become the rows of its stream."""

from collections.abc import Sequence

import numpy as np

from sparkinfer.backend.base import Backend, Buffer, Recorder, Weight
from sparkinfer.kernels import run_params as P
from sparkinfer.kernels.embed import embed
from sparkinfer.models.table import Table


class Intake:
    """Writes run parameters (`words`, int64) and the rows of `x`, from the host or, given `packed`, on the device."""

    def __init__(
        self,
        backend: Backend,
        x: Buffer,
        table: Table,
        packed: Weight | None = None,
        *,
        scale: float = 1.0,
    ) -> None:
        """`packed` is the table in the backend's form; rows are multiplied by `scale`."""
        self._backend, self._x, self._packed = backend, x, packed
        self._table, self._scale = table, np.float32(scale)
        room = 0 if packed is None else x.rows
        self.params = backend.buffer(1, P.WORDS + room, np.int64)
        self.words = backend.staging(self.params)[0]
        self.rows = backend.staging(x)

    def record(self, recorder: Recorder) -> None:
        """Bring both before anything else of the run."""
        if self._packed is None:
            recorder.receive(self._x)
            recorder.receive(self.params, 1)
            return
        recorder.receive(self.params, 1, P.WORDS + recorder.rows)
        embed(recorder, self._packed, self.params, P.WORDS, self._x, scale=float(self._scale))

    def write(self, tokens: Sequence[int]) -> None:
        """Give a run its tokens. Nothing may run meanwhile (`Backend.wait`)."""
        if self._packed is not None:
            self.words[P.WORDS : P.WORDS + len(tokens)] = tokens
            return
        self._table.write(tokens, self.rows)
        if self._scale != 1.0:
            self.rows[: len(tokens)] *= self._scale
