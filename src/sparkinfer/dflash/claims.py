"""The draft's own confidence: what its probabilities are worth, and what windows cut by them gain.

A draft that gives its token 0.3 is usually right three times in ten, but nobody promised that: a draft may be
overconfident, penalties or sampling may change the target, and a draft may simply lie. So each claim is corrected
by what came of claims like it. What was cut off is never judged, therefore a window is left whole now and then.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

_BINS = 10  # of claims, equally wide
_DEPTHS = 3  # the first slot, the second, all further ones
_PRIOR = 8.0  # claims that the draft's word counts for
_KEEP = 0.99  # how much of what a bin has seen another claim leaves
_LEAST, _MOST = 0.01, 0.99
_TRY = (
    8,
    2.0,
)  # cuts at a bin's claim before one is left out: at first, and for each claim of it that was judged
_BLOCKS = 32  # blocks whose claims are remembered
_FEW = 6  # that say nothing yet
_GAIN = (1.0, 1.6)  # what cutting is credited with, least and most


class Calibration:
    """From what the draft claims to how often it is right, by slot and claim."""

    def __init__(self) -> None:
        bins = _BINS * _DEPTHS
        self.seen, self.surplus = [0.0] * bins, [0.0] * bins  # claims judged; kept minus claimed
        self.cuts = [0] * bins  # since one was left out

    def worth(self, slot: int, claim: float) -> float:
        """Probability that the target keeps the token of a slot it reaches."""
        place = _place(slot, claim)
        rate = claim + self.surplus[place] / (self.seen[place] + _PRIOR)
        return _MOST if rate > _MOST else _LEAST if rate < _LEAST else rate

    def observe(self, claims: Sequence[float], accepted: int, judged: int) -> None:
        """The first `judged` claims were judged, `accepted` of them kept."""
        for slot in range(min(judged, len(claims))):
            place = _place(slot, claims[slot])
            self.seen[place] = _KEEP * self.seen[place] + 1.0
            self.surplus[place] = _KEEP * self.surplus[place] + (slot < accepted) - claims[slot]

    def spares(self, slot: int, claim: float) -> bool:
        """A window is to be cut before this slot: whether it is left in, to learn what the claim is worth."""
        place = _place(slot, claim)
        self.cuts[place] += 1
        if self.cuts[place] < _TRY[0] + _TRY[1] * self.seen[place]:
            return False
        self.cuts[place] = 0
        return True

    def report(self) -> list[dict[str, Any]]:
        """Ready for JSON: bins that were judged."""
        return [
            {
                "slot": place // _BINS + 1,
                "claim": [round(place % _BINS / _BINS, 2), round((place % _BINS + 1) / _BINS, 2)],
                "seen": round(seen, 1),
                "surplus": round(self.surplus[place] / (seen + _PRIOR), 3),
            }
            for place, seen in enumerate(self.seen)
            if seen
        ]


class Blocks:
    """What the latest blocks claimed, to tell what cutting them would have gained."""

    def __init__(self) -> None:
        self._worth: deque[list[float]] = deque(maxlen=_BLOCKS)

    def add(self, worth: Sequence[float]) -> None:
        """Corrected claims of a block, as far as they were asked for."""
        self._worth.append(list(worth))

    @property
    def known(self) -> bool:
        """Whether there are enough to say anything."""
        return len(self._worth) >= _FEW

    def gains(
        self,
        widths: Sequence[int],
        base: Sequence[float],
        drafts: Sequence[float],
        rates: list[float],
        going: float,
    ) -> list[float]:
        """For each of `widths` (ascending from 1) tokens by time with windows cut, over those of whole ones.

        `base` are the costs of steps of these widths without their drafts and `drafts` those of the drafts, in plain
        steps; `rates` stand for what a block did not claim, and `going` is the rate that time is worth elsewhere.
        """
        slots = widths[-1] - 1
        worth = np.array([claimed[:slots] + rates[len(claimed) : slots] for claimed in self._worth])
        tokens = np.ones((len(worth), slots + 1))
        tokens[:, 1:] += worth.cumprod(1).cumsum(1)
        tokens = tokens[:, [width - 1 for width in widths]]
        costs = np.asarray(base)
        value = tokens - going * costs
        best = np.maximum.accumulate(value, 1)
        kept = np.maximum.accumulate(np.where(value >= best, np.arange(len(widths)), 0), 1)
        spent = costs[kept].mean(0)
        rate = (best.mean(0) + going * spent) / (spent + drafts)
        whole = tokens.mean(0) / (costs + drafts)
        gains: list[float] = np.clip(rate / whole, *_GAIN).tolist()
        return gains


def _place(slot: int, claim: float) -> int:
    depth = slot if slot < _DEPTHS - 1 else _DEPTHS - 1
    return depth * _BINS + min(int(claim * _BINS), _BINS - 1)
