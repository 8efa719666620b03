"""How far the machine is from what was measured: one factor for all steps, one for drafting ones, one for each kind.

A Kalman filter on logarithms. The common factor moves fast (another process, a lower clock), a kind's own
slowly (it was measured badly), and the filter keeps account of what each observation can be blamed on. So
a machine that slows down as a whole changes every cost alike, and what never ran is corrected with the rest.
"""

from collections.abc import Iterable, Sequence
from math import exp, log, sqrt
from typing import Any

import numpy as np

_NOISE = (0.05**2, 0.08**2, 0.5**2)  # variance of one step's logarithm: least, at the start, most
_NOISE_GAIN = 0.03  # how fast that is learned
_CLIP = 2.5  # standard deviations: an outlier (a page fault, a stolen core) counts as this much
_START = (0.3**2, 0.25**2, 0.05**2)  # variance at the start: common, of drafting steps, of one kind
_CREEP = (0.02**2, 0.001**2, 0.001**2)  # what a step adds to them

Kind = tuple[str, int]  # path, width


class Drift:
    """Factors on measured costs by kind of step."""

    def __init__(self, kinds: Iterable[Kind], spreads: Sequence[float]) -> None:
        """`spreads`: relative uncertainty of each kind's measured cost."""
        self._place = {kind: place for place, kind in enumerate(kinds, 2)}
        n = len(self._place) + 2
        own = [_START[2] + spread**2 for spread in spreads]
        self._value = np.zeros(n)
        self._covariance = np.diag([*_START[:2], *own])
        self._drafts = [width > 1 for _, width in self._place]
        self._diagonal = self._covariance.reshape(-1)[:: n + 1]
        self._factors: list[float] | None = None
        self._drafting = 1.0
        self._creep = np.array([*_CREEP[:2], *[_CREEP[2]] * (n - 2)])
        self._noise = _NOISE[1]

    def factors(self) -> list[float]:
        """What each kind's measured cost is to be multiplied with, in the order of the kinds."""
        if self._factors is None:
            common, drafting, *own = self._value.tolist()
            self._drafting = exp(common + drafting)
            self._factors = [
                exp(common + value + drafting) if drafts else exp(common + value)
                for value, drafts in zip(own, self._drafts, strict=True)
            ]
        return self._factors

    def observe(self, kind: Kind, ratio: float) -> None:
        """A step of this kind took `ratio` times what was expected, factor included."""
        covariance, (common, *parts) = self._covariance, self._parts(kind)
        self._diagonal += self._creep
        shared = covariance[common].copy()  # it is symmetric
        for part in parts:
            shared += covariance[part]
        known = sum(shared[part].item() for part in (common, *parts))
        variance = known + self._noise
        most = _CLIP * variance**0.5
        surprise = min(most, max(-most, log(max(ratio, 1e-9))))
        self._value += shared * (surprise / variance)
        self._factors = None
        covariance -= shared[:, None] * (shared / variance)
        noise = self._noise + _NOISE_GAIN * (surprise**2 - known - self._noise)
        self._noise = min(_NOISE[2], max(_NOISE[0], noise))

    def factor(self, place: int) -> float:
        """Of one kind, by its place in that order."""
        if self._factors is not None:
            return self._factors[place]
        value = self._value
        own, shared = value[place + 2].item(), value[1].item() if self._drafts[place] else 0.0
        return exp(value[0].item() + shared + own)

    @property
    def drafting(self) -> float:
        """What the measured cost of a draft is to be multiplied with."""
        if self._factors is not None:
            return self._drafting
        return exp(self._value[0].item() + self._value[1].item())

    @property
    def level(self) -> float:
        """Logarithm of the common factor."""
        return float(self._value[0])

    def doubt(self, one: Kind, other: Kind) -> float:
        """Standard deviation of the logarithm of one kind's factor over another's."""
        difference = np.zeros(len(self._value))
        difference[self._parts(one)] += 1.0
        difference[self._parts(other)] -= 1.0
        variance = float(difference @ self._covariance @ difference)
        return sqrt(max(variance, 0.0))

    def _parts(self, kind: Kind) -> list[int]:
        return [0, self._place[kind]] if kind[1] == 1 else [0, 1, self._place[kind]]

    def report(self) -> dict[str, Any]:
        """Factors, ready for JSON; kinds within 1 % of the common ones are left out."""
        return {
            "common": round(exp(self._value[0]), 4),
            "drafting": round(exp(self._value[1]), 4),
            "noise": round(self._noise**0.5, 4),
            "kinds": {
                f"{path} {width}": round(exp(self._value[place]), 4)
                for (path, width), place in self._place.items()
                if abs(self._value[place]) > 0.01
            },
        }
