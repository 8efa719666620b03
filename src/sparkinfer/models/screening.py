"""The head's largest logits without its whole product: what a target keeps for it, and the rows it gives."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend.base import Activation, Backend, Buffer, Recorder, Weight
from sparkinfer.kernels.screen import MOST_ROWS, TOTALS, coarse_bytes, pack_screen, screen, why_not
from sparkinfer.models.weights import TensorSource, Weights
from sparkinfer.quant.formats import QUANT_FORMATS, dequantize

SWITCHED_OFF = "switched off (head_screen)"
_LOOK = 32  # runs after which it is asked whether screening pays
_REST = 1024  # runs without it when it does not
_PAYS = 0.75  # of the bytes that the coarse copy spares, exact tiles may take


def refusal(
    file: TensorSource, head: str, backend: Backend, *, exact: bool, wanted: bool
) -> str | None:
    """Why the head is not screened; None if it is. `exact`: its weights become float32."""
    info = file.tensors[head]
    kind = "F32" if exact else info.type_name
    reason = why_not(backend.name, kind, info.shape[1], info.shape[0])
    return reason or (None if wanted else SWITCHED_OFF)


def extra_bytes(file: TensorSource, head: str) -> int:
    """About what screening takes of the memory."""
    info = file.tensors[head]
    return coarse_bytes(info.shape[1], info.shape[0])


def pack_head(weights: Weights, head: str, norm: str) -> Any | None:
    """The coarse copy of a head, from the file; None where its weights have no bounds."""
    info = weights.file.tensors[head]
    inputs, outputs = info.shape[:2]
    spec = QUANT_FORMATS[info.type_name]
    blocks = weights.file.data(head).reshape(-1, spec.block_bytes)
    each = inputs // spec.block_size

    def rows(first: int, count: int) -> NDArray[np.float32]:
        values = dequantize(info.type_name, blocks[first * each : (first + count) * each])
        return np.asarray(values, np.float32).reshape(count, inputs)

    kind = weights.file.tensors[norm].type_name
    data = weights.file.data(norm).reshape(-1, QUANT_FORMATS[kind].block_bytes)
    before = np.asarray(dequantize(kind, data), np.float32).reshape(-1)
    return pack_screen(weights.backend, rows, outputs, inputs, before)


class Screening:
    """The op on a target's own buffers. `bounds` is overwritten by every run."""

    def __init__(
        self, backend: Backend, head: Weight, coarse: Any, bounds: Buffer, n_vocab: int
    ) -> None:
        self._backend, self._head, self._coarse, self._bounds = backend, head, coarse, bounds
        self._n_vocab = n_vocab
        self._picks = backend.buffer(MOST_ROWS, 2, np.int64)
        self._totals = backend.buffer(1, TOTALS, np.int64)
        self._most = _PAYS * max(0.0, 1 - coarse.n_bytes / head.n_bytes)  # share computed exactly
        self._next, self._seen, self._resting, self._rests = _LOOK, (0, 0), 0, 0

    def pays(self) -> bool:
        """Whether to screen the next run: a while not where the runs before had too many candidates, as with a text or
        a model whose logits are close together. By counts, not by time.
        """
        if self._resting:
            self._resting -= 1
            return False
        self._next -= 1
        if self._next < 0:
            runs, _, outputs = self._backend.staging(self._totals)[0].tolist()
            before, self._seen = self._seen, (runs, outputs)
            self._next = _LOOK - 1
            if outputs - before[1] > self._most * (runs - before[0]) * self._n_vocab:
                self._resting, self._next = _REST - 1, _LOOK
                self._rests += 1
                return False
        return True

    def record(self, recorder: Recorder, x: Activation) -> None:
        """After the op that writes the head's input."""
        screen(
            recorder, x, self._head, self._coarse, self._bounds, self._picks, self._totals, self._n_vocab
        )  # fmt: skip

    def picks(self, rows: int) -> NDArray[np.int64]:
        """Of the last run, int64 [rows, 2]: each row's best id, and whether all of its logits are finite."""
        self._backend.wait()
        found: NDArray[np.int64] = self._backend.staging(self._picks)[:rows]
        return found

    def counts(self) -> dict[str, float]:
        """Since the load: runs, their rows, the mean share of the head that was computed exactly in a run, and how
        often screening was left for a while because that was too much.
        """
        self._backend.wait()
        runs, rows, outputs = self._backend.staging(self._totals)[0].tolist()
        return {
            "runs": runs,
            "rows": rows,
            "exact_share": outputs / (runs * self._n_vocab) if runs else 0.0,
            "rests": self._rests,
        }
