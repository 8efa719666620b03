"""How far the machine is from what was measured: one factor for all steps, one for drafting ones, one for each kind.

A Kalman filter on logarithms. The common factor moves fast (another process, a lower clock), a kind's own
slowly (it was measured badly), and the filter keeps account of what each observation can be blamed on. So
a machine that slows down as a whole changes every cost alike, and what never ran is corrected with the rest.
"""

from collections.abc import Iterable, Sequence
from math import exp, log, sqrt
from typing import Any

import numpy as np

from sparkinfer.backend.compiled import routine

_NOISE = (0.05**2, 0.08**2, 0.5**2)  # variance of one step's logarithm: least, at the start, most
_NOISE_GAIN = 0.03  # how fast that is learned
_CLIP = 2.5  # standard deviations: an outlier (a page fault, a stolen core) counts as this much
_START = (0.3**2, 0.25**2, 0.05**2)  # variance at the start: common, of drafting steps, of one kind
_CREEP = (0.02**2, 0.001**2, 0.001**2)  # what a step adds to them

Kind = tuple[str, int]  # path, width


@routine(
    "vector",
    "matrix",
    "vector",
    "vector",
    "vector",
    "vector",
    "int64",
    "int64",
    "float64",
    "float64",
)
def _observe(
    value: Any, covariance: Any, creep: Any, kinds: Any, factors: Any, shared: Any,
    part: int, drafts: int, ratio: float, noise: float,
) -> float:  # fmt: skip
    """As `Drift.observe`; `kinds`: 1 for those that draft. Sets `factors` and returns the new noise."""
    n, drafting = len(value), 1.0 if drafts else 0.0
    for i in range(n):
        covariance[i, i] += creep[i]
    for i in range(n):
        shared[i] = covariance[0, i] + drafting * covariance[1, i] + covariance[part, i]
    known = shared[0] + drafting * shared[1] + shared[part]
    variance = known + noise
    most, surprise = _CLIP * sqrt(variance), log(ratio)
    surprise = most if surprise > most else -most if surprise < -most else surprise
    for i in range(n):
        value[i] += shared[i] * (surprise / variance)
        for j in range(n):
            covariance[i, j] -= shared[i] * (shared[j] / variance)
    factors[0] = exp(value[0] + value[1])
    for kind in range(len(kinds)):
        factors[kind + 1] = exp(value[0] + kinds[kind] * value[1] + value[kind + 2])
    noise += _NOISE_GAIN * (surprise * surprise - known - noise)
    return _NOISE[0] if noise < _NOISE[0] else _NOISE[2] if noise > _NOISE[2] else noise


KERNEL = _observe.kernel


class Drift:
    """Factors on measured costs by kind of step."""

    def __init__(self, kinds: Iterable[Kind], spreads: Sequence[float]) -> None:
        """`spreads`: relative uncertainty of each kind's measured cost."""
        self._place = {kind: place for place, kind in enumerate(kinds, 2)}
        n = len(self._place) + 2
        own = [_START[2] + spread**2 for spread in spreads]
        self._value = np.zeros(n)
        self._covariance = np.diag([*_START[:2], *own])
        self._kinds = np.array([float(width > 1) for _, width in self._place])
        self._factors = np.ones(n - 1)  # of drafts, then of each kind
        # What a draft's measured cost, and each kind's in their order, is to be multiplied with.
        self.drafting, self.factors = 1.0, [1.0] * (n - 2)
        self._creep = np.array([*_CREEP[:2], *[_CREEP[2]] * (n - 2)])
        self._noise = _NOISE[1]
        self._observe = _observe.bind(
            self._value, self._covariance, self._creep, self._kinds, self._factors, np.empty(n)
        )

    def observe(self, kind: Kind, ratio: float) -> None:
        """A step of this kind took `ratio` times what was expected, factor included."""
        self._noise = self._observe.call(
            self._place[kind], kind[1] > 1, max(ratio, 1e-9), self._noise
        )
        self.drafting, *self.factors = self._factors.tolist()

    @property
    def level(self) -> float:
        """Logarithm of the common factor."""
        return float(self._value[0])

    def doubt(self, one: Kind, other: Kind) -> float:
        """Standard deviation of the logarithm of one kind's factor over another's."""
        signs = dict.fromkeys(self._parts(one), 1.0)
        for part in self._parts(other):
            signs[part] = signs.get(part, 0.0) - 1.0
        covariance, places = self._covariance, [part for part in signs if signs[part]]
        variance = sum(signs[i] * signs[j] * covariance.item(i, j) for i in places for j in places)
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
