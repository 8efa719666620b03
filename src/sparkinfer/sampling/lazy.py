"""Rows of logits that are still on a device: most choices need only the largest."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class LazyRow:
    """One row. `best` is the id of its largest logit (the lowest id on a tie); `finite` tells whether all are.

    As an array it is the whole row, brought when asked for; valid until the forward after the one that made it.
    """

    __slots__ = ("_fetch", "_place", "best", "finite")

    def __init__(
        self, best: int, finite: bool, fetch: Callable[[int], NDArray[np.float32]], place: int = 0
    ) -> None:
        """`fetch(place)` brings the row."""
        self.best, self.finite, self._fetch, self._place = best, finite, fetch, place

    def argmax(self) -> int:
        return self.best

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        values = self._fetch(self._place)
        return values if dtype is None else values.astype(dtype)


class LazyRows:
    """Rows of one forward. `picks`: of each row its best id, and whether it is finite."""

    def __init__(
        self,
        picks: Sequence[tuple[int, bool]],
        fetch: Callable[[int], NDArray[np.float32]],
        n_vocab: int,
    ) -> None:
        self._picks, self._fetch = picks, fetch
        self.shape = (len(picks), n_vocab)

    def __len__(self) -> int:
        return len(self._picks)

    def __getitem__(self, index: int) -> LazyRow:
        place = range(len(self))[index]
        best, finite = self._picks[place]
        return LazyRow(best, bool(finite), self._fetch, place)

    def __iter__(self) -> Iterator[LazyRow]:
        for place, (best, finite) in enumerate(self._picks):
            yield LazyRow(best, bool(finite), self._fetch, place)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        values = np.stack([self._fetch(place) for place in range(len(self))])
        return values if dtype is None else values.astype(dtype)
