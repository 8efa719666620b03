"""How far the machine is from what was measured: one factor for all steps, one for drafting ones, one for each kind.

A Kalman filter on logarithms. The common factor moves fast (another process, a lower clock), a kind's own slowly
(it was measured badly), and the filter keeps account of what each observation can be blamed on.
So a machine that slows down as a whole changes every cost alike, and what never ran is corrected with the rest.
"""

from collections.abc import Iterable
from math import exp, log
from typing import Any

import numpy as np

_NOISE = 0.08**2  # of one step's logarithm
_CLIP = 2.5  # standard deviations: an outlier (a page fault, a stolen core) counts as this much
_START = (0.3**2, 0.1**2, 0.06**2)  # variance at the start: common, of drafting steps, of one kind
_CREEP = (0.02**2, 0.001**2, 0.001**2)  # what a step adds to them

Kind = tuple[str, int]  # path, width


class Drift:
    """Factors on measured costs by kind of step."""

    def __init__(self, kinds: Iterable[Kind]) -> None:
        self._place = {kind: place for place, kind in enumerate(kinds, 2)}
        n = len(self._place) + 2
        self._value = np.zeros(n)
        self._covariance = np.diag([*_START[:2], *[_START[2]] * (n - 2)])
        self._drafts = np.array([float(width > 1) for _, width in self._place])
        self._factors: list[float] | None = None
        self._creep = np.array([*_CREEP[:2], *[_CREEP[2]] * (n - 2)])

    def factors(self) -> list[float]:
        """What each kind's measured cost is to be multiplied with, in the order of the kinds."""
        if self._factors is None:
            value = self._value[2:] + self._value[0] + self._value[1] * self._drafts
            self._factors = np.exp(value).tolist()
        return self._factors

    def observe(self, kind: Kind, ratio: float) -> None:
        """A step of this kind took `ratio` (> 0) times what was expected, factor included."""
        parts = [0, self._place[kind]] if kind[1] == 1 else [0, 1, self._place[kind]]
        covariance = self._covariance
        covariance.flat[:: len(covariance) + 1] += self._creep
        shared = covariance[:, parts].sum(axis=1)
        variance = float(shared[parts].sum()) + _NOISE
        most = _CLIP * variance**0.5
        surprise = min(most, max(-most, log(max(ratio, 1e-9))))
        self._value += shared * (surprise / variance)
        self._factors = None
        covariance -= np.outer(shared, shared) / variance

    def report(self) -> dict[str, Any]:
        """Factors, ready for JSON; kinds within 1 % of the common ones are left out."""
        return {
            "common": round(exp(self._value[0]), 4),
            "drafting": round(exp(self._value[1]), 4),
            "kinds": {
                f"{path} {width}": round(exp(self._value[place]), 4)
                for (path, width), place in self._place.items()
                if abs(self._value[place]) > 0.01
            },
        }
