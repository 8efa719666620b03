"""Statistics of paired blocks, in numpy alone; tests compare them with scipy.

A block gives one number, the logarithm of candidate over base. In each block a fair coin says whether the order is
base-candidate-candidate-base or its mirror. If the two sides do not differ, the number's sign is therefore a coin's,
whatever the machine does: drift, spikes, clocks that jump, neighbours that depend on each other. So the test that flips
signs is exact for any noise and any number of blocks, and so is the interval that it inverts to. That is why
decisions rest on it. A bootstrap of six blocks covers less than it says (measured in benchmarks/judge_simulation.py)
and is shown for comparison only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
EXACT_BLOCKS = 16  # 65535 subsets; more blocks are judged on a sample of subsets
_SAMPLED_SUBSETS = 19_999
_SIMULATED = 4000  # draws behind a predicted power
_SIMULATE_BLOCKS = 10  # beyond, the t test has the same power as the exact one
_MOST_BLOCKS = 500  # a prediction beyond helps nobody
_UNIT = 1e-12  # of a log ratio
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class SignFlip:
    """Means of subsets of the values, in order. Under symmetry the true centre lies between any two with equal chance.

    `total` counts the sign patterns: 2**n, or the sampled ones, the pattern without a flip included.
    """

    means: Floats
    total: int

    @classmethod
    def of(cls, values: Sequence[float] | Floats, seed: int = 0) -> "SignFlip":
        """Every subset of up to `EXACT_BLOCKS` values, else a seeded sample of subsets (still exact)."""
        # Whole numbers of 1e-12 add up exactly in any order, so that p is the same on every machine.
        numbers = np.round(np.asarray(values, np.float64) / _UNIT)
        count = len(numbers)
        chosen, sizes = _subsets(count, 0 if count <= EXACT_BLOCKS else seed)
        means = np.sort(chosen @ numbers / sizes) * _UNIT
        return cls(means, len(means) + 1)

    def p(self, centre: float = 0.0) -> float:
        """Two-sided p of the hypothesis that the centre is this."""
        below, above = self.one_sided(centre)
        return min(1.0, 2 * min(below, above))

    def one_sided(self, centre: float) -> tuple[float, float]:
        """P values of "the centre is at most this" and of "it is at least this"."""
        at_most = 1 + int(np.searchsorted(self.means, centre, "right"))
        at_least = 1 + len(self.means) - int(np.searchsorted(self.means, centre, "left"))
        return at_most / self.total, at_least / self.total

    def interval(self, alpha: float) -> tuple[float, float] | None:
        """The centres that are not rejected at `alpha`; None if so few values can reject none."""
        rank = self.rank(alpha)
        if rank < 1:
            return None
        return float(self.means[rank - 1]), float(self.means[-rank])

    def rank(self, alpha: float) -> int:
        return math.floor(alpha / 2 * self.total + 1e-9)


@lru_cache(maxsize=32)
def _subsets(count: int, seed: int) -> tuple[Floats, Floats]:
    """Rows of 0 and 1 that choose some of `count` values, and how many: all subsets but the empty one, or a sample."""
    if count <= EXACT_BLOCKS:
        chosen = (np.arange(1, 2**count)[:, None] >> np.arange(count)) & 1
    else:
        random = np.random.default_rng([seed, count])
        chosen = random.integers(0, 2, (_SAMPLED_SUBSETS, count))
        chosen = chosen[chosen.any(axis=1)]
    return chosen.astype(np.float64), chosen.sum(axis=1).astype(np.float64)


def least_alpha(count: int) -> float:
    """The smallest level at which so many blocks can reject at all: all signs equal, both sides."""
    return float(2.0 ** (1 - count))


def attained(count: int, alpha: float) -> float:
    """What a sign-flip test at `alpha` really spends: p values of few blocks come in steps."""
    total = 2**count if count <= EXACT_BLOCKS else _SAMPLED_SUBSETS + 1
    return 2 * math.floor(alpha / 2 * total + 1e-9) / total


def hodges_lehmann(values: Sequence[float] | Floats) -> float:
    """Median of the means of all pairs, each value with itself included."""
    return float(_pair_medians(np.asarray(values, np.float64)[None, :])[0])


def _pair_medians(rows: Floats) -> Floats:
    first, second = np.triu_indices(rows.shape[1])
    medians: Floats = np.median((rows[:, first] + rows[:, second]) / 2, axis=1)
    return medians


def bca_interval(
    values: Sequence[float] | Floats,
    alpha: float = 0.05,
    *,
    seed: int = 0,
    resamples: int = 2000,
    statistic: Callable[[Floats], Floats] = _pair_medians,
) -> tuple[float, float] | None:
    """Bias-corrected and accelerated bootstrap interval over blocks; None for fewer than 3.

    `statistic` maps rows of values to one number a row.
    """
    numbers = np.asarray(values, np.float64)
    count = len(numbers)
    if count < 3:
        return None
    random = np.random.default_rng([seed, count, resamples])
    drawn = np.sort(statistic(numbers[random.integers(0, count, (resamples, count))]))
    point = float(statistic(numbers[None, :])[0])
    below = np.count_nonzero(drawn < point) + np.count_nonzero(drawn == point) / 2
    bias = _NORMAL.inv_cdf(min(max(below / resamples, 0.5 / resamples), 1 - 0.5 / resamples))
    left_out = statistic(np.array([np.delete(numbers, index) for index in range(count)]))
    gaps = left_out.mean() - left_out
    spread = float((gaps**2).sum())
    acceleration = float((gaps**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0
    ends = []
    for tail in (alpha / 2, 1 - alpha / 2):
        shifted = bias + _NORMAL.inv_cdf(tail)
        share = _NORMAL.cdf(bias + shifted / (1 - acceleration * shifted))
        ends.append(float(np.quantile(drawn, share)))
    return ends[0], ends[1]


def student_cdf(t: float, freedom: int) -> float:
    """Student's distribution for whole degrees of freedom: a finite sum in the angle (both parities)."""
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    if freedom == 1:
        return 0.5 + angle / math.pi
    for j in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (j - 1) / j
        total += term
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + inside / 2


@lru_cache(maxsize=512)
def student_quantile(p: float, freedom: int) -> float:
    """The t with `student_cdf(t) = p`, by bisection."""
    if p < 0.5:
        return -student_quantile(1 - p, freedom)
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < p else (low, middle)
    return high


def deviation(values: Sequence[float] | Floats) -> float:
    """Sample standard deviation, 0 for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def student_p(values: Sequence[float] | Floats, centre: float = 0.0) -> tuple[float, float]:
    """One-sided p values of the t test: "the mean is at most this", "it is at least this". 1 for one value."""
    count = len(values)
    if count < 2:
        return 1.0, 1.0
    gap, spread = float(np.mean(values)) - centre, deviation(values)
    if spread == 0:
        t = math.copysign(math.inf, gap) if gap else 0.0
    else:
        t = gap / (spread / math.sqrt(count))
    under = student_cdf(-t, count - 1)
    return under, student_cdf(t, count - 1)


def student_interval(
    values: Sequence[float] | Floats, alpha: float = 0.05
) -> tuple[float, float] | None:
    """Interval of the mean by the t distribution; None for one value."""
    count = len(values)
    if count < 2:
        return None
    half = student_quantile(1 - alpha / 2, count - 1) * deviation(values) / math.sqrt(count)
    mean = float(np.mean(values))
    return mean - half, mean + half


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected for their number, step by step from the smallest; in the order given."""
    count = len(p_values)
    corrected, largest = [1.0] * count, 0.0
    for place, number in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (count - place) * p_values[number]))
        corrected[number] = largest
    return corrected


@lru_cache(maxsize=64)
def _thresholds(count: int, alpha: float) -> Floats:
    """Sorted effects, in standard deviations of a block, from which simulated normal blocks reject."""
    random = np.random.default_rng([20240229, count])
    chosen, sizes = _subsets(count, 0)
    rank = math.floor(alpha / 2 * 2**count + 1e-9)
    drawn = random.standard_normal((_SIMULATED, count))
    lows = np.partition(drawn @ chosen.T / sizes, rank - 1, axis=1)[:, rank - 1]
    return np.sort(-lows)


def power(effect: float, spread: float, count: int, alpha: float) -> float:
    """Chance that `count` blocks with this true log ratio and standard deviation find it at `alpha`."""
    if count < 2 or attained(count, alpha) <= 0:
        return 0.0
    if spread <= 0:
        return 1.0 if effect else 0.0
    ratio = abs(effect) / spread
    if count <= _SIMULATE_BLOCKS:
        found = np.searchsorted(_thresholds(count, alpha), ratio, "left")
        return float(found) / _SIMULATED
    return _student_power(ratio * math.sqrt(count), count - 1, alpha)


def _student_power(shift: float, freedom: int, alpha: float) -> float:
    """Power of the t test: over the distribution of the estimated deviation, by its quantiles."""
    critical = student_quantile(1 - alpha / 2, freedom)
    shares = (np.arange(200) + 0.5) / 200
    # Wilson and Hilferty: the cube root of a chi-square over its freedom is nearly normal.
    normal = np.array([_NORMAL.inv_cdf(share) for share in shares])
    scale = np.sqrt(
        np.maximum(1 - 2 / (9 * freedom) + normal * math.sqrt(2 / (9 * freedom)), 0) ** 3
    )
    return float(np.mean([1 - _NORMAL.cdf(critical * float(s) - shift) for s in scale]))


def detectable(spread: float, count: int, alpha: float, wanted: float = 0.8) -> float | None:
    """Least log ratio that `count` blocks find with chance `wanted` at `alpha`; None if they can find none."""
    if count < 2 or attained(count, alpha) <= 0:
        return None
    if count <= _SIMULATE_BLOCKS:
        return spread * float(np.quantile(_thresholds(count, alpha), wanted))
    quantiles = student_quantile(1 - alpha / 2, count - 1) + student_quantile(wanted, count - 1)
    return spread * quantiles / math.sqrt(count)


def blocks_to_settle(
    point: float, spread: float, delta: float, alpha: float, *, least: int
) -> int | None:
    """Number of blocks, `least` or more, after which this effect is probably found or known to be below `delta`.

    "Probably": in 4 of 5 cases if point and spread are the true ones. None beyond any practical number.
    """
    count = least
    while count <= _MOST_BLOCKS:
        smallest = detectable(spread, count, alpha)
        # To lie inside +-delta, interval and luck must fit into what the point leaves.
        if smallest is not None and (abs(point) >= smallest or abs(point) + smallest <= delta):
            return count
        count += max(1, count // 8)
    return None
