"""Words that a device leaves in the host's memory, for a host that watches them instead of asking the driver.

A word tells of a row the id of its largest logit, whether all its logits are finite, and which replay found that.
"""

import ctypes
import os
from collections.abc import Callable, Iterable

from sparkinfer.backend.base import Buffer

BEST_BITS, SERIAL_BITS = 32, 30  # of a word, from the lowest on: the id, one bit, the serial
SERIALS = 2**SERIAL_BITS  # serials begin again after as many
_SERIAL_AT = BEST_BITS + 1
_ASK = 4096  # looks at a word, about 2 ms, between two questions whether the device still runs


def _pause() -> Callable[[], object]:
    """A call that lets other threads run for a moment; by ctypes, for a call from there lets go of Python's lock."""
    found: Callable[[], object] | None = getattr(ctypes.CDLL(None), "sched_yield", None)
    return os.sched_yield if found is None else found


class Board:
    """One int64 word a row. `buffer` is its memory as a device sees it."""

    def __init__(
        self,
        buffer: Buffer,
        words: memoryview,
        ended: Callable[[], bool],
        waited: Callable[[], None],
    ) -> None:
        """`words` is the same memory as the host sees it; `ended` tells whether all that was started is done; `waited`
        is told of every wait.
        """
        self.buffer, self._words = buffer, words
        self._ended, self._waited = ended, waited
        self._pause = _pause()

    def wait(self, rows: Iterable[int], serial: int) -> None:
        """Return when the replay of this serial has left its words for these rows: what came before it is done."""
        words, pause, looks = self._words, self._pause, 0
        for row in rows:
            while words[row] >> _SERIAL_AT != serial:
                pause()
                looks += 1
                if looks % _ASK == 0 and self._ended() and words[row] >> _SERIAL_AT != serial:
                    raise RuntimeError(f"replay {serial} ended without its word for row {row}")
        self._waited()

    def rows(self, first: int, count: int) -> list[tuple[int, bool]]:
        """The ids and whether all logits are finite, of some rows that are there."""
        finite, best = 1 << BEST_BITS, (1 << BEST_BITS) - 1
        words = self._words[first : first + count].tolist()
        return [(word & best, word & finite != 0) for word in words]
