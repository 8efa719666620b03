"""The draft's own confidence: what its probabilities are worth, and what windows cut by them gain.

A draft that gives its token 0.3 is usually right three times in ten, but nobody promised that: a draft may be
overconfident, penalties or sampling may change the target, and a draft may simply lie. So each claim is corrected
by what came of claims like it. What was cut off is never judged, therefore a window is left whole now and then.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparkinfer.dflash.prior import DEPTHS, Claims

_BINS = 10  # of claims, equally wide
_WORD = 6.0  # claims of 0 that fail and claims of 1 that are kept: what the draft's word counts for
_PRIOR = 12.0  # claims of a bin that the line through all of them counts for
_HOLD, _KEEP = 0.995, 0.99  # how much of what a line, a bin has seen another claim leaves
_LEAST, _MOST = 0.01, 0.99
_ENOUGH = 16.0  # first slots judged before windows are cut
_SOME = 8.0  # claims of a depth judged before it is taken for itself
_ASSUMED = 16.0  # claims of a depth that what a draft's file tells counts for
_RARER = 4.0  # cuts at claims of a bin between two that are left out, for each claim of it that was judged
_BLOCKS = 32  # blocks whose claims are remembered
_EVERY = 32  # blocks between two looks at them
_FEW = 6  # that say nothing yet
_GAIN = (1.0, 1.6)  # what cutting is credited with, least and most


class _Line:
    """Least squares of what was kept on what was claimed, for slots of one depth.

    It tells what claims are worth that are hardly ever judged because windows are cut there: a draft whose claims mean
    nothing is as often right where it claims little. It starts as the draft's word, worth a few observations.
    """

    __slots__ = ("base", "count", "kept", "product", "slope", "square", "sum")

    def __init__(self) -> None:
        # As many claims of 0 that failed as claims of 1 that were kept.
        self.count, self.sum, self.kept = 2 * _WORD, _WORD, _WORD
        self.square = self.product = _WORD
        self.base, self.slope = 0.0, 1.0

    def at(self, claim: float) -> float:
        """What a claim is worth: half of it at least, where the line is too steep for what bends."""
        worth, half = self.base + self.slope * claim, 0.5 * claim
        return worth if worth > half else half

    def add(self, claim: float, kept: float) -> None:
        # The draft's word stays: what is forgotten are observations.
        self.count = _HOLD * (self.count - 2 * _WORD) + 2 * _WORD + 1.0
        self.sum = _HOLD * (self.sum - _WORD) + _WORD + claim
        self.kept = _HOLD * (self.kept - _WORD) + _WORD + kept
        self.square = _HOLD * (self.square - _WORD) + _WORD + claim * claim
        self.product = _HOLD * (self.product - _WORD) + _WORD + claim * kept
        self._fit()

    def assume(self, means: Claims, count: float) -> None:
        """As after `count` claims with these means."""
        self.count += count
        self.sum += count * means.claim
        self.kept += count * means.kept
        self.square += count * means.square
        self.product += count * means.product
        self._fit()

    def _fit(self) -> None:
        spread = self.count * self.square - self.sum * self.sum
        self.slope = (self.count * self.product - self.sum * self.kept) / spread
        self.base = (self.kept - self.slope * self.sum) / self.count


class Calibration:
    """From what the draft claims to how often it is right, by slot and claim."""

    def __init__(self) -> None:
        bins = _BINS * DEPTHS
        self.lines = [_Line() for _ in range(DEPTHS)]
        # The line of each depth, or of the one before as long as hardly any claims of it were judged.
        self._used = [self.lines[0]] * DEPTHS
        self.seen, self.surplus = [0.0] * bins, [0.0] * bins  # claims judged; kept minus expected
        self.cuts = [0] * bins  # since one was left out

    def assume(self, claims: Sequence[Claims]) -> None:
        """Begin as after some claims of every depth with these means. They are forgotten as those would be."""
        for depth, means in enumerate(claims):
            self.lines[depth].assume(means, _ASSUMED)
            self._used[depth:] = [self.lines[depth]] * (DEPTHS - depth)

    def worths(self, claims: Sequence[float], first: int = 0) -> list[float]:
        """Probabilities that the target keeps the tokens of the slots from `first` on, each if it reaches it."""
        found = []
        for slot in range(first, len(claims)):
            claim, depth = claims[slot], slot if slot < DEPTHS else DEPTHS - 1
            place = depth * _BINS + (int(claim * _BINS) if claim < 1.0 else _BINS - 1)
            rate = self._used[depth].at(claim) + self.surplus[place] / (self.seen[place] + _PRIOR)
            found.append(_MOST if rate > _MOST else _LEAST if rate < _LEAST else rate)
        return found

    def observe(self, claims: Sequence[float], accepted: int, judged: int) -> None:
        """The first `judged` claims were judged, `accepted` of them kept."""
        for slot, claim in enumerate(claims[:judged]):
            kept, depth = float(slot < accepted), slot if slot < DEPTHS else DEPTHS - 1
            place = depth * _BINS + (int(claim * _BINS) if claim < 1.0 else _BINS - 1)
            expected = self._used[depth].at(claim)
            self.seen[place] = _KEEP * self.seen[place] + 1.0
            self.surplus[place] = _KEEP * self.surplus[place] + kept - expected
            line = self.lines[depth]
            line.add(claim, kept)
            if self._used[depth] is not line and line.count >= 2 * _WORD + _SOME:
                self._used[depth:] = [line] * (DEPTHS - depth)

    @property
    def known(self) -> bool:
        """Whether enough claims were judged to cut windows by them."""
        return self.lines[0].count >= 2 * _WORD + _ENOUGH

    def spares(self, slot: int, claim: float) -> bool:
        """A window is to be cut before this slot: whether it is left in, to learn what the claim is worth.

        At first every one is, then one in more and more of its kind.
        """
        if not self.known:
            return True
        place = _place(slot, claim)
        self.cuts[place] += 1
        if self.cuts[place] <= _RARER * (1.0 + self.seen[place]):
            return False
        self.cuts[place] = 0
        return True

    def report(self) -> list[dict[str, Any]]:
        """Ready for JSON, by depth: what claims of 0, one half and 1 are worth in general, and those seen."""
        return [
            {
                "slot": depth + 1,
                "worth": [round(line.at(claim), 3) for claim in (0.0, 0.5, 1.0)],
                "seen": [round(seen) for seen in self.seen[depth * _BINS : (depth + 1) * _BINS]],
            }
            for depth, line in enumerate(self.lines)
        ]


class Blocks:
    """What the latest blocks claimed, to tell what cutting them would have gained."""

    def __init__(self) -> None:
        self._worth: deque[list[float]] = deque(maxlen=_BLOCKS)
        self._fresh = _EVERY  # blocks since the gains were computed
        self._gains: dict[int, float] = {}  # by width

    def add(self, worth: Sequence[float]) -> None:
        """Corrected claims of a block, as far as they were asked for."""
        self._worth.append(list(worth))
        self._fresh += 1

    def gains(
        self,
        widths: Sequence[int],
        base: Sequence[float],
        drafts: Sequence[float],
        rates: Callable[[], list[float]],
        going: float,
    ) -> list[float]:
        """For each of `widths` (ascending from 1) tokens by time with windows cut, over those of whole ones.

        `base` are the costs of steps of these widths without their drafts and `drafts` those of the drafts, in plain
        steps; `rates()` stand for what a block did not claim, and `going` is the rate that time is worth elsewhere.
        While little is known nothing is gained; and what was found is used for a few blocks more, it changes slowly.
        """
        if len(self._worth) < _FEW:
            return [1.0] * len(widths)
        if self._fresh >= _EVERY or not self._gains.keys() >= set(widths):
            found = self._replayed(widths, base, drafts, rates(), going)
            self._gains, self._fresh = dict(zip(widths, found, strict=True)), 0
        return [self._gains[width] for width in widths]

    def _replayed(
        self,
        widths: Sequence[int],
        base: Sequence[float],
        drafts: Sequence[float],
        rates: list[float],
        going: float,
    ) -> list[float]:
        slots = widths[-1] - 1
        worth = np.array([claimed[:slots] + rates[len(claimed) : slots] for claimed in self._worth])
        tokens = np.ones((len(worth), slots + 1))
        tokens[:, 1:] += worth.cumprod(1).cumsum(1)
        tokens = tokens[:, [width - 1 for width in widths]]
        costs = np.asarray(base)
        value = tokens - going * costs
        best = np.maximum.accumulate(value, 1)
        kept = np.maximum.accumulate(np.where(value >= best, np.arange(len(widths)), 0), 1)
        count = len(worth)
        spent = np.add.reduce(costs[kept]) / count
        rate = (np.add.reduce(best) / count + going * spent) / (spent + drafts)
        whole = np.add.reduce(tokens) / count / (costs + drafts)
        least, most = _GAIN
        return [min(most, max(least, gain)) for gain in (rate / whole).tolist()]


def _place(slot: int, claim: float) -> int:
    depth = slot if slot < DEPTHS else DEPTHS - 1
    return depth * _BINS + (int(claim * _BINS) if claim < 1.0 else _BINS - 1)
