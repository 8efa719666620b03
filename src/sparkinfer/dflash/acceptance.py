"""How likely the target keeps each slot of a draft, estimated from the slots it was seen to judge.

Text changes: a list is easy to draft, the prose after it is not. So the estimate mixes memories of
different length, each weighted by how well it predicted the latest steps. A slot that was not reached
says nothing and changes nothing.
"""

from dataclasses import dataclass, field
from math import exp, log
from typing import Any

MEMORIES = (
    160.0,
    40.0,
    10.0,
)  # steps after which a memory has forgotten all but 1/e, longest first
_FIRST = 0.75  # acceptance of the first slot before anything was seen
_DEEPER = 0.98  # of an unseen slot against the one before it
_FIRST_WEIGHT = 6.0
_DIFFERENCE = 12.0
_WEIGHT = 12.0  # observations that what is guessed for a slot is worth
_ALIKE = 0.9  # of a slot's change shows in the next one too
_EVIDENCE = 0.93  # per step: how fast old successes of a memory stop counting for it
_LEAST, _MOST = 0.01, 0.99


@dataclass
class _Memory:
    """Decayed counts of slots reached and kept, the acceptance they suggest and how well that predicted."""

    span: float
    reached: list[float]
    kept: list[float]
    rates: list[float]
    evidence: float = 0.0  # decayed log-likelihood

    def fade(self, steps: float) -> None:
        factor = exp(-steps / self.span)
        for slot in range(len(self.reached)):
            self.reached[slot] *= factor
            self.kept[slot] *= factor

    def add(self, accepted: int, judged: int) -> None:
        for slot in range(judged):
            self.reached[slot] += 1.0
        for slot in range(accepted):
            self.kept[slot] += 1.0

    def likelihood(self, accepted: int, judged: int) -> float:
        """Log of the probability this memory gave to what happened."""
        total = sum(log(rate) for rate in self.rates[:accepted])
        return total + (log(1.0 - self.rates[accepted]) if judged > accepted else 0.0)

    def estimate(self, longer: "_Memory | None") -> None:
        """Set the rates: the longest memory's from its counts, another one's from how it differs from the next longer.

        Where counts are few the shallower slots decide: an unseen slot is like the one before it.
        """
        rates, step = self.rates, 0.0
        for slot, reached in enumerate(self.reached):
            weight = _DIFFERENCE if longer else _WEIGHT if slot else _FIRST_WEIGHT
            trust = reached / (reached + weight)
            seen = self.kept[slot] / reached if reached else 0.0
            if longer is None:
                guess = rates[slot - 1] * _DEEPER if slot else _FIRST
                rate = trust * seen + (1.0 - trust) * guess
            else:
                own = seen - longer.kept[slot] / longer.reached[slot] if reached else 0.0
                step = trust * own + (1.0 - trust) * _ALIKE * step
                rate = longer.rates[slot] + step
            rates[slot] = min(_MOST, max(_LEAST, rate))


@dataclass
class Acceptance:
    """Conditional acceptance per slot: slot 0 is the first token after the anchor."""

    slots: int
    reached: list[int] = field(default_factory=list)  # since it was made, for people
    kept: list[int] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        n = self.slots
        self.reached, self.kept = [0] * n, [0] * n
        self._memories = [_Memory(span, [0.0] * n, [0.0] * n, [0.0] * n) for span in MEMORIES]
        self._estimate()

    def observe(self, drafted: int, accepted: int, since: int = 0) -> None:
        """A step drafted so many tokens and the target kept so many; `since` plain steps came before it.

        Slots up to the first rejected one were judged; the others were not reached.
        """
        judged = min(drafted, accepted + 1, self.slots)
        accepted = min(accepted, judged)
        for memory in self._memories:
            memory.evidence = _EVIDENCE * memory.evidence + memory.likelihood(accepted, judged)
            # What drafting was like long ago stays true while nothing is drafted; what it was like just now does not.
            memory.fade(1.0 if memory.span == MEMORIES[0] else 1.0 + since)
            memory.add(accepted, judged)
        for slot in range(judged):
            self.reached[slot] += 1
        for slot in range(accepted):
            self.kept[slot] += 1
        self.steps += 1
        self._estimate()

    def soften(self) -> None:
        """Another request begins: what was seen counts half, and no memory is preferred."""
        for memory in self._memories:
            memory.evidence = 0.0
            memory.fade(memory.span * log(2.0))
        self._estimate()

    def _estimate(self) -> None:
        longer = None
        for memory in self._memories:
            memory.estimate(longer)
            longer = memory
        best = max(memory.evidence for memory in self._memories)
        weights = [exp(memory.evidence - best) for memory in self._memories]
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        expected = [0.0] * (self.slots + 1)
        for share, memory in zip(self._shares, self._memories, strict=True):
            product, tokens = 1.0, 1.0
            expected[0] += share
            for slot, rate in enumerate(memory.rates):
                product *= rate
                tokens += product
                expected[slot + 1] += share * tokens
        self._expected = expected

    def expected(self, depth: int) -> float:
        """Tokens that a step with `depth` drafted slots yields: 1 + the probabilities that it gets to each slot."""
        return self._expected[min(depth, self.slots)]

    @property
    def rates(self) -> list[float]:
        """Estimated conditional acceptance of every slot."""
        pairs = list(zip(self._shares, self._memories, strict=True))
        return [sum(share * m.rates[slot] for share, m in pairs) for slot in range(self.slots)]

    def report(self) -> dict[str, Any]:
        """Ready for JSON; slots that were never reached show what is assumed of them."""
        return {
            "steps": self.steps,
            "slots": [
                {"slot": slot + 1, "reached": r, "accepted": k, "estimate": round(rate, 3)}
                for slot, (r, k, rate) in enumerate(
                    zip(self.reached, self.kept, self.rates, strict=True)
                )
            ],
            "memories": {
                f"{memory.span:g} steps": round(share, 3)
                for share, memory in zip(self._shares, self._memories, strict=True)
            },
        }
