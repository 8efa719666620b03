"""How likely the target keeps each slot of a draft, estimated from the slots it was seen to judge.

Text changes: a list is easy to draft, the prose after it is not. So the estimate mixes memories of
different length, each weighted by how well it predicted the latest steps. A slot that was not reached
says nothing and changes nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import Any

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


class _Memory:
    """Decayed counts of slots reached and kept, the acceptance they suggest and how well that predicted.

    Counts stand in units of `unit`: to forget is to make the unit smaller.
    """

    def __init__(self, span: Span, slots: int) -> None:
        self.span = span
        self.reached, self.kept, self.rates = [0.0] * slots, [0.0] * slots, [0.0] * slots
        self.evidence = 0.0  # decayed log-likelihood
        self.unit = 1.0
        self._step = exp(-1.0 / span.steps)

    def fade(self, steps: float) -> None:
        self.unit *= self._step if steps == 1.0 else exp(-steps / self.span.steps)
        if self.unit < _LEAST_UNIT:
            self.reached = [count * self.unit for count in self.reached]
            self.kept = [count * self.unit for count in self.kept]
            self.unit = 1.0

    def add(self, accepted: int, judged: int, beyond: Sequence[float]) -> None:
        one = 1.0 / self.unit
        for slot in range(judged):
            self.reached[slot] += one
        for slot in range(accepted):
            self.kept[slot] += one
        for slot, rate in enumerate(beyond, judged):
            self.reached[slot] += one
            one *= rate
            self.kept[slot] += one

    def likelihood(self, accepted: int, judged: int) -> float:
        """Log of the probability this memory gave to what happened."""
        rates, chance = self.rates, 1.0
        for slot in range(accepted):
            chance *= rates[slot]
        return log(chance * (1.0 - rates[accepted]) if judged > accepted else chance)

    def estimate(self, longer: "_Memory") -> None:
        """Set the rates; `longer` is the memory before this one."""
        rates, weight, unit = [], self.span.first, self.unit
        if self.span.of_change:
            change = 0.0
            for reached, kept, known, (of, share) in zip(
                self.reached, self.kept, longer.rates, longer.counts, strict=True
            ):
                change *= _ALIKE
                if reached:
                    trust = reached * unit / (reached * unit + weight)
                    seen = kept / reached - (share / of if of else 0.0)
                    change += trust * (seen - change)
                rate = known + change
                rates.append(_MOST if rate > _MOST else _LEAST if rate < _LEAST else rate)
                weight = self.span.deeper
        else:
            guess = _FIRST
            for reached, kept in zip(self.reached, self.kept, strict=True):
                rate = (kept * unit + weight * guess) / (reached * unit + weight)
                rate = _MOST if rate > _MOST else _LEAST if rate < _LEAST else rate
                guess, weight = rate * _DEEPER, self.span.deeper
                rates.append(rate)
        self.rates = rates

    @property
    def counts(self) -> Iterable[tuple[float, float]]:
        """Of each slot how often it was reached and kept."""
        return zip(self.reached, self.kept, strict=True)


@dataclass
class Acceptance:
    """Conditional acceptance per slot: slot 0 is the first token after the anchor."""

    slots: int
    reached: list[int] = field(default_factory=list)  # since it was made, for people
    kept: list[int] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.reached, self.kept = [0] * self.slots, [0] * self.slots
        self._memories = [_Memory(span, self.slots) for span in SPANS]
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
        for memory in self._memories:
            memory.evidence = _EVIDENCE * memory.evidence + memory.likelihood(accepted, judged)
            memory.fade(1.0 + since * memory.span.ages)
            memory.add(accepted, judged, beyond)
        for slot in range(judged):
            self.reached[slot] += 1
        for slot in range(accepted):
            self.kept[slot] += 1
        self.steps += 1
        new = self.steps < _SETTLED or since > 0 or self.steps % 4 == 0
        if new:
            self._estimate()
        return new

    def assume(self, rates: Sequence[float]) -> None:
        """Begin as after some steps in which slots were kept at these rates. It is forgotten as those would be.

        Only long memories are given them, so that others soon show where this text is another.
        """
        for memory in self._memories:
            reached = 0.0 if memory.span.ages else _ASSUMED / memory.unit
            for slot, rate in enumerate(rates[: self.slots]):
                memory.reached[slot] += reached
                reached *= max(rate, _HOPED)
                memory.kept[slot] += reached
        self._estimate()

    @property
    def settled(self) -> bool:
        """Whether one step more changes little."""
        return self.steps >= _SETTLED

    def soften(self) -> None:
        """Another request begins: what was seen lately counts little, the rest and the preferred memory less."""
        for memory in self._memories:
            memory.evidence *= 0.5
            memory.fade(_REQUEST)
        self._estimate()

    def expected(self, depth: int) -> float:
        """Tokens that a step with `depth` drafted slots yields: 1 + its chances to get through each slot."""
        return self._expected[min(depth, self.slots)]

    @property
    def rates(self) -> list[float]:
        """Estimated conditional acceptance of every slot."""
        pairs = list(zip(self._shares, self._memories, strict=True))
        return [sum(share * m.rates[slot] for share, m in pairs) for slot in range(self.slots)]

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
                memory.span.name: round(share, 3)
                for share, memory in zip(self._shares, self._memories, strict=True)
            },
        }

    def _estimate(self) -> None:
        longer = self._memories[0]
        for memory in self._memories:
            memory.estimate(longer)
            longer = memory
        best = max(memory.evidence for memory in self._memories)
        weights = [exp(memory.evidence - best) for memory in self._memories]
        self._shares = [weight / sum(weights) for weight in weights]
        through = self._shares  # of a memory: its share times the chance to get this far
        tokens = 1.0
        self._expected = [tokens]
        for rates in zip(*(memory.rates for memory in self._memories), strict=True):
            through = [chance * rate for chance, rate in zip(through, rates, strict=True)]
            tokens += sum(through)
            self._expected.append(tokens)
