"""How likely the target keeps each slot of a draft, estimated from the slots it was seen to judge.

Text changes: a list is easy to draft, the prose after it is not. So the estimate mixes memories of
different length, each weighted by how well it predicted the latest steps. A slot that was not reached
says nothing and changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import Any

import numpy as np

from sparkinfer.backend.compiled import inner, routine

_FIRST = 0.8  # acceptance of the first slot before anything was seen
_DEEPER = 0.98  # of an unseen slot against the one before it
_ALIKE = 0.9  # of a slot's change that shows in the next one too
_EVIDENCE = 0.985  # per step: how fast it is forgotten how well a memory predicted
_SETTLED = 32  # steps
_LEAST_UNIT = 1e-9  # of counts that are forgotten
_REQUEST = 16.0  # steps: how much of what was seen a new request makes old
_LEAST, _MOST = 0.01, 0.99
_ASSUMED = 12.0  # steps that what a draft's file tells counts for
_HOPED = 0.5  # least acceptance that is taken from there: a draft has to be tried


@dataclass(frozen=True)
class Span:
    """How long a memory lasts: after `steps` all but 1/e is forgotten.

    `first` and `deeper` say how many observations the guess for a slot is worth. A memory `of_change` guesses
    that the slot is what the memory before it says, the others that it is like the slot before. One that `ages`
    forgets during plain steps too: what drafting was like just now does not stay true while nothing is drafted.
    """

    name: str
    steps: float
    first: float
    deeper: float
    of_change: bool = False
    ages: bool = True


SPANS = (
    Span("long", 160.0, 6.0, 3.0, ages=False),  # where slots differ: each for itself
    Span("long, smooth", 160.0, 6.0, 12.0, ages=False),
    Span("medium", 30.0, 6.0, 12.0, of_change=True),
    Span("short", 6.0, 3.0, 12.0, of_change=True),
)
# Rows of what is kept of each memory's slots, in units of UNIT: to forget is to make the unit smaller.
_REACHED, _KEPT, _RATES = range(3)
# Rows of what is kept of the memories: decayed log-likelihood, the unit, the share in the mixture.
_RIGHT, _UNIT, _SHARE = range(3)
_STEPS, _FIRSTS, _DEEPERS, _CHANGES, _AGES = (
    np.array([getattr(span, name) for span in SPANS], np.float64)
    for name in ("steps", "first", "deeper", "of_change", "ages")
)


@inner
def _clipped(rate: float) -> float:
    return _LEAST if rate < _LEAST else _MOST if rate > _MOST else rate


@inner
def _remember(slots: Any, mixture: Any, memory: int, accepted: int, judged: int) -> float:
    """Count a step's slots; returns the log of the probability that the memory gave to what happened."""
    chance, one = 1.0, 1.0 / mixture[_UNIT, memory]
    for slot in range(judged):
        rate = slots[_RATES, slot]
        chance *= rate if slot < accepted else 1.0 - rate
        slots[_REACHED, slot] += one
        if slot < accepted:
            slots[_KEPT, slot] += one
    return log(chance)


@inner
def _fade(slots: Any, mixture: Any, memory: int, steps: float) -> None:
    """Forget what `steps` steps make old."""
    unit = mixture[_UNIT, memory] * exp(-steps / _STEPS[memory])
    if unit < _LEAST_UNIT:
        for slot in range(slots.shape[1]):
            slots[_REACHED, slot] *= unit
            slots[_KEPT, slot] *= unit
        unit = 1.0
    mixture[_UNIT, memory] = unit


@inner
def _rate(slots: Any, longer: Any, memory: int, unit: float) -> None:
    """Set the rates of a memory; `longer` is the one before it (of the first, which has none, any)."""
    guess, change, weight = _FIRST, 0.0, _FIRSTS[memory]
    for slot in range(slots.shape[1]):
        reached, kept = slots[_REACHED, slot], slots[_KEPT, slot]
        if not _CHANGES[memory]:
            rate = _clipped((kept * unit + weight * guess) / (reached * unit + weight))
            guess, weight = rate * _DEEPER, _DEEPERS[memory]
        else:
            change *= _ALIKE
            if reached > 0.0:
                of = longer[_REACHED, slot]
                usual = longer[_KEPT, slot] / of if of > 0.0 else 0.0
                trust = reached * unit / (reached * unit + weight)
                change += trust * (kept / reached - usual - change)
            rate, weight = _clipped(longer[_RATES, slot] + change), _DEEPERS[memory]
        slots[_RATES, slot] = rate


@inner
def _mix(slots: Any, mixture: Any, expected: Any) -> None:
    """Shares of the memories by how well they predicted, and the tokens expected of so many slots."""
    memories, best, total = slots.shape[0], mixture[_RIGHT, 0], 0.0
    for memory in range(memories):
        if mixture[_RIGHT, memory] > best:
            best = mixture[_RIGHT, memory]
    for memory in range(memories):
        mixture[_SHARE, memory] = exp(mixture[_RIGHT, memory] - best)
        total += mixture[_SHARE, memory]
    for slot in range(len(expected)):
        expected[slot] = 1.0 if slot == 0 else 0.0
    for memory in range(memories):
        mixture[_SHARE, memory] /= total
        through = mixture[_SHARE, memory]  # its share times the chance to get this far
        for slot in range(slots.shape[2]):
            through *= slots[memory, _RATES, slot]
            expected[slot + 1] += through
    for slot in range(slots.shape[2]):
        expected[slot + 1] += expected[slot]


@routine(
    "cube",
    "matrix",
    "vector",
    "vector",
    "float64",
    "float64",
    "float64",
    "int64",
    "int64",
    "int64",
    "int64",
)
def _learn(
    slots: Any, mixture: Any, expected: Any, beyond: Any, right: float, steps: float, since: float,
    accepted: int, judged: int, more: int, anew: int,
) -> float:  # fmt: skip
    """What `Acceptance` does to its numbers.

    Keep the share `right` of how well the memories predicted, forget `steps` steps and `since` plain ones, count a
    step's slots and the first `more` of the `beyond` ones, and make the estimates `anew`.
    """
    for memory in range(len(_STEPS)):
        own = slots[memory]
        _fade(own, mixture, memory, steps + since * _AGES[memory])
        likely = _remember(own, mixture, memory, accepted, judged)
        mixture[_RIGHT, memory] = right * mixture[_RIGHT, memory] + likely
        one = 1.0 / mixture[_UNIT, memory]
        for place in range(more):
            own[_REACHED, judged + place] += one
            one *= beyond[place]
            own[_KEPT, judged + place] += one
    if anew:
        for memory in range(len(_STEPS)):
            _rate(slots[memory], slots[memory - 1], memory, mixture[_UNIT, memory])
        _mix(slots, mixture, expected)
    return 0.0


KERNEL = _learn.kernel


@dataclass
class Acceptance:
    """Conditional acceptance per slot: slot 0 is the first token after the anchor."""

    slots: int
    reached: list[int] = field(default_factory=list)  # since it was made, for people
    kept: list[int] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.reached, self.kept = [0] * self.slots, [0] * self.slots
        self._slots = np.zeros((len(SPANS), 3, self.slots))
        self._mixture = np.zeros((3, len(SPANS)))
        self._mixture[_UNIT] = 1.0
        self._expected = np.zeros(self.slots + 1)
        self._beyond = np.zeros(self.slots)
        self._learn = _learn.bind(self._slots, self._mixture, self._expected, self._beyond)
        self.tokens: list[float] = []  # that a step with so many drafted slots yields
        self._estimate()

    def observe(
        self, drafted: int, accepted: int, since: int = 0, beyond: Sequence[float] = ()
    ) -> bool:
        """A step drafted so many tokens and the target kept so many; `since` plain steps came before it.

        Slots up to the first rejected one were judged; the others were not reached. `beyond`: how likely the slots
        were that a cut kept from being judged (all before them were kept). They count with that, because windows are
        cut where the draft is unsure: those judged alone would look too good. Returns whether the estimates are
        new: after many steps one changes little, and three of four are left to the next.
        """
        judged = min(drafted, accepted + 1, self.slots)
        accepted = min(accepted, judged)
        self.steps += 1
        new = self.steps < _SETTLED or since > 0 or self.steps % 4 == 0
        for place, chance in enumerate(beyond):
            self._beyond[place] = chance
        self._learn.call(_EVIDENCE, 1.0, since, accepted, judged, len(beyond), new)
        if new:
            self.tokens = self._expected.tolist()
        for slot in range(judged):
            self.reached[slot] += 1
        for slot in range(accepted):
            self.kept[slot] += 1
        return new

    def assume(self, rates: Sequence[float]) -> None:
        """Begin as after some steps in which slots were kept at these rates. It is forgotten as those would be.

        Only long memories are given them, so that others soon show where this text is another.
        """
        for span, slots, unit in zip(SPANS, self._slots, self._mixture[_UNIT], strict=True):
            reached = 0.0 if span.ages else _ASSUMED / float(unit)
            for slot, rate in enumerate(rates[: self.slots]):
                slots[_REACHED, slot] += reached
                reached *= max(rate, _HOPED)
                slots[_KEPT, slot] += reached
        self._estimate()

    @property
    def settled(self) -> bool:
        """Whether one step more changes little."""
        return self.steps >= _SETTLED

    def soften(self) -> None:
        """Another request begins: what was seen lately counts little, the rest and the preferred memory less."""
        self._estimate(0.5, _REQUEST)

    def expected(self, depth: int) -> float:
        """Tokens that a step with `depth` drafted slots yields: 1 + its chances to get through each slot."""
        return self.tokens[min(depth, self.slots)]

    @property
    def rates(self) -> list[float]:
        """Estimated conditional acceptance of every slot."""
        rates: list[float] = (self._mixture[_SHARE] @ self._slots[:, _RATES]).tolist()
        return rates

    def report(self) -> dict[str, Any]:
        """Ready for JSON; slots that were never reached show what is assumed of them."""
        rows = zip(self.reached, self.kept, self.rates, strict=True)
        return {
            "steps": self.steps,
            "slots": [
                {"slot": slot, "reached": reached, "accepted": kept, "estimate": round(rate, 3)}
                for slot, (reached, kept, rate) in enumerate(rows, 1)
            ],
            "memories": {
                span.name: round(float(share), 3)
                for span, share in zip(SPANS, self._mixture[_SHARE], strict=True)
            },
        }

    def _estimate(self, right: float = 1.0, steps: float = 0.0) -> None:
        """Make the estimates anew, after forgetting `steps` and all but `right` of how well memories predicted."""
        self._learn.call(right, steps, 0.0, 0, 0, 0, True)
        self.tokens = self._expected.tolist()
