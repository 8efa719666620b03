"""One request, plain and speculative in turns: what does speculation gain on it, and is it the same answer?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparkinfer.bench.answers import decoding_steps, merge, tokens_a_step
from sparkinfer.bench.spread import Spread, in_turns
from sparkinfer.engine import PathCount, Result

Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """`plain[i]` and `speculative[i]` ran in round i; `printed` is the answer that was shown before."""

    printed: Result
    plain: tuple[Result, ...]
    speculative: tuple[Result, ...]
    compared: bool  # False where the acceptance rule promises the distribution, not the tokens

    @property
    def difference(self) -> int | None:
        """Return the first position at which two runs differ, None if all runs are identical."""
        first = self.plain[0]
        found = [_difference(first, run) for run in (self.printed, *self.plain, *self.speculative)]
        return min((place for place in found if place is not None), default=None)

    @property
    def agrees(self) -> bool:
        """Every run gave what was promised of it."""
        return not self.compared or self.difference is None

    @property
    def ratio(self) -> Spread | None:
        """Return speculative over plain decoding speed; None if there was nothing to decode."""
        return _spread([(s.timings.decode_tok_s, p.timings.decode_tok_s) for p, s in self._pairs()])

    @property
    def whole_ratio(self) -> Spread | None:
        """Return the same of whole requests, prompt included: plain over speculative time."""
        return _spread([(p.timings.total_s, s.timings.total_s) for p, s in self._pairs()])

    @property
    def tokens_a_step(self) -> float | None:
        total = PathCount()
        for run in self.speculative:
            merge(total, decoding_steps(run))
        return tokens_a_step(total)

    def speed(self, speculate: bool) -> float:
        """Return the median decoding speed of a side in tokens per second."""
        runs = self.speculative if speculate else self.plain
        return Spread.of([run.timings.decode_tok_s for run in runs]).median

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "plain_tok_s": [run.timings.decode_tok_s for run in self.plain],
            "speculative_tok_s": [run.timings.decode_tok_s for run in self.speculative],
            "plain_total_s": [run.timings.total_s for run in self.plain],
            "speculative_total_s": [run.timings.total_s for run in self.speculative],
            "ratio": self.ratio.to_dict() if self.ratio else None,
            "whole_ratio": self.whole_ratio.to_dict() if self.whole_ratio else None,
            "tokens_a_step": self.tokens_a_step,
            "compared": self.compared,
            "identical": self.difference is None,
            "first_difference": self.difference,
        }

    def _pairs(self) -> list[tuple[Result, Result]]:
        return list(zip(self.plain, self.speculative, strict=True))


def compare(
    run: Callable[[bool], Result],
    rounds: int,
    report: Report,
    *,
    printed: Result,
    compared: bool = True,
) -> Comparison:
    """Run the request `rounds` times on either side, A B, B A, after one unmeasured plain run.

    `run(speculate)` makes the whole request, its prompt computed anew and always with the same seed;
    `printed` is an answer that the speculative side has given before.
    """
    results: dict[bool, list[Result]] = {False: [], True: []}
    run(False)
    for turn in range(rounds):
        report("comparing with plain decoding", turn, rounds)
        for side in in_turns(2, turn):
            results[bool(side)].append(run(bool(side)))
    report("comparing with plain decoding", rounds, rounds)
    return Comparison(printed, tuple(results[False]), tuple(results[True]), compared)


def _difference(first: Result, other: Result) -> int | None:
    for place, (a, b) in enumerate(zip(first.tokens, other.tokens, strict=False)):
        if a != b:
            return place
    same_end = (first.text, first.finish_reason) == (other.text, other.finish_reason)
    if len(first.tokens) == len(other.tokens) and same_end:
        return None
    return min(len(first.tokens), len(other.tokens))


def _spread(pairs: list[tuple[float, float]]) -> Spread | None:
    if not all(above and below for above, below in pairs):
        return None
    return Spread.of([above / below for above, below in pairs])
