"""Numbers for a device, from pinned memory: the host need not wait to write the next ones."""

from collections.abc import Sequence
from typing import Any, Protocol

POSTS = 4  # messages between two waits: a step of DFlash sends two


class Waiting(Protocol):
    """What a mailbox needs of its backend."""

    waits: int  # times that the host has waited

    def wait(self) -> None:
        """Return when everything that was started is done."""


class PinnedMailbox:
    """Rows in turn, so that one is written while the device has yet to read those before it."""

    def __init__(self, backend: Waiting, target: Any, rows: Any) -> None:
        """`target`: where the numbers go, on the device. `rows`: 2 x POSTS tensors of its kind in pinned memory, for a
        wait for one replay says nothing of what was sent after it, at most POSTS of them.
        """
        self._backend, self._target, self._rows = backend, target, rows
        self._host = rows.numpy()
        self._ways: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._next, self._sent, self._waits = 0, 0, backend.waits

    def send(self, values: Sequence[int]) -> None:
        if self._waits != self._backend.waits:
            self._sent, self._waits = 0, self._backend.waits
        if self._sent == POSTS:
            self._backend.wait()
            self._sent, self._waits = 0, self._backend.waits
        post, count = self._next, len(values)
        self._next = (post + 1) % (2 * POSTS)
        self._sent += 1
        self._host[post, :count] = values
        way = self._ways.get((post, count))
        if way is None:
            way = self._ways[post, count] = self._target[:count], self._rows[post, :count]
        way[0].copy_(way[1], non_blocking=True)
