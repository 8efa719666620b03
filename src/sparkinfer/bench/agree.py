"""Does speculation change anything? Every setting against plain decoding, token by token and bit by bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkinfer.bench.answers import PLAIN, Side, answer, decoding_steps, merge
from sparkinfer.bench.oracle import Oracle
from sparkinfer.decoding import AutoregressiveDecoder
from sparkinfer.engine import Engine, PathCount, Result

Report = Callable[[str, int, int], None]
_PARTS = ("tokens", "logprobs", "text", "finish_reason", "stop", "usage")
_BEYOND = 24  # tokens after the length asked for among which a token to stop at is looked for


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to speculate; `path` must be taken by a step at least once, "" leaves it open."""

    side: Side
    path: str = ""

    @property
    def name(self) -> str:
        return self.side.name


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing in which a run is not what plain decoding gave.

    `position` counts tokens from 0; it is None for what has no position.
    """

    setting: str
    prompt: int
    repeat: int
    part: str
    position: int | None
    plain: Any
    got: Any

    def line(self) -> str:
        where = "" if self.position is None else f" at token {self.position}"
        run = f"prompt {self.prompt}, {self.setting}, run {self.repeat + 1}"
        return f"{run}: {self.part} differ{where}: plain {self.plain}, speculative {self.got}"


@dataclass(slots=True)
class Tally:
    """What a setting's runs came to."""

    pairs: int = 0
    agreeing: int = 0
    runs: int = 0
    tokens: int = 0  # compared, repeats included
    steps: PathCount = field(default_factory=PathCount)


@dataclass(slots=True)
class Agreement:
    """All settings over all prompts; a pair agrees if each of its runs does."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    stops: int = 0  # prompts whose answer ended at a stop token, not at the length

    @property
    def pairs(self) -> int:
        return sum(tally.pairs for tally in self.tallies.values())

    @property
    def agreeing(self) -> int:
        return sum(tally.agreeing for tally in self.tallies.values())

    @property
    def tokens(self) -> int:
        return sum(tally.tokens for tally in self.tallies.values())

    @property
    def passed(self) -> bool:
        """Everything agreed, and there was something to agree on."""
        return not self.differences and self.agreeing == self.pairs > 0 and self.tokens > 0

    def lines(self) -> list[str]:
        """Return the lines that scripts look for."""
        share = self.agreeing / self.pairs if self.pairs else 0.0
        return [
            f"METRIC SPEC_AGREE {self.agreeing}/{self.pairs} = {share:.4f}",
            f"METRIC TOKENS_COMPARED {self.tokens}",
            f"VERDICT {'PASS' if self.passed else 'FAIL'}",
        ]


def check(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[Setting],
    *,
    tokens: int,
    repeats: int,
    options: dict[str, Any],
    oracle: Oracle,
    report: Report,
) -> Agreement:
    """Answer every prompt plainly, then with every setting `repeats` times, and compare.

    `options` are those of the request (temperature and seed). The oracle learns each plain answer.
    Raises: RequestError for a prompt that leaves no room for `tokens` more.
    """
    agreement = Agreement({setting.name: Tally() for setting in settings})
    total = len(prompts) * len(settings)
    for number, prompt in enumerate(prompts):
        reference, ends = _reference(engine, number, prompt, tokens, options, agreement)
        oracle.record(number, prompt, reference)
        agreement.stops += reference.finish_reason == "stop"
        for index, setting in enumerate(settings):
            report("comparing", number * len(settings) + index, total)
            _pair(engine, number, prompt, setting, reference, ends, repeats, agreement)
    report("comparing", total, total)
    return agreement


def _reference(
    engine: Engine,
    number: int,
    prompt: Sequence[int],
    tokens: int,
    options: dict[str, Any],
    agreement: Agreement,
) -> tuple[Result, dict[str, Any]]:
    """Return the plain answer and the options that gave it.

    It ends at a token that appears for the first time after at least `tokens` tokens, where there
    is one, else after `tokens` tokens. Plain decoding must agree with itself, too.
    """
    plain = Side(PLAIN, AutoregressiveDecoder(engine.target))
    base = {**options, "ignore_eos": True, "logprobs": 1}
    longer = answer(engine, plain, prompt, number, **base, max_tokens=tokens + _BEYOND)
    ends = {**base, "max_tokens": tokens}
    stop = _late_token(longer.tokens, tokens)
    if stop is not None:
        ends |= {"max_tokens": tokens + _BEYOND, "stop_ids": (stop,)}
    reference = answer(engine, plain, prompt, number, **ends)
    found = _first_difference(longer.tokens[: len(reference.tokens)], reference.tokens)
    if found is not None:
        difference = Difference(PLAIN, number, 1, "tokens", *found)
        agreement.differences.append(difference)
    return reference, ends


def _late_token(tokens: Sequence[int], least: int) -> int | None:
    """Return a token whose first place is at `least` tokens or later, None if there is none."""
    seen = set(tokens[: least - 1])
    return next((token for token in tokens[least - 1 :] if token not in seen), None)


def _pair(
    engine: Engine,
    number: int,
    prompt: Sequence[int],
    setting: Setting,
    reference: Result,
    ends: dict[str, Any],
    repeats: int,
    agreement: Agreement,
) -> None:
    tally = agreement.tallies[setting.name]
    tally.pairs += 1
    agrees = True
    for repeat in range(repeats):
        result = answer(engine, setting.side, prompt, number, **ends)
        tally.runs += 1
        tally.tokens += len(reference.tokens)
        merge(tally.steps, decoding_steps(result))
        found = compare_results(reference, result) or _untaken(setting, result)
        if found is not None:
            agrees = False
            agreement.differences.append(Difference(setting.name, number, repeat, *found))
    tally.agreeing += agrees


def compare_results(plain: Result, got: Result) -> tuple[str, int | None, Any, Any] | None:
    """Return the first part that differs, its position and both values; None if nothing does."""
    for part in _PARTS:
        a, b = getattr(plain, part), getattr(got, part)
        if a == b:
            continue
        if part in ("tokens", "logprobs"):
            found = _first_difference(a, b)
            assert found is not None
            return (part, *found)
        return part, None, a, b
    return None


def _first_difference(plain: Sequence[Any], got: Sequence[Any]) -> tuple[int, Any, Any] | None:
    for place in range(max(len(plain), len(got))):
        a = plain[place] if place < len(plain) else None
        b = got[place] if place < len(got) else None
        if a != b:
            return place, a, b
    return None


def _untaken(setting: Setting, result: Result) -> tuple[str, int | None, Any, Any] | None:
    """A path that no step took has not been checked."""
    taken = sorted({path.partition("/")[0] for path in result.paths})
    if not setting.path or setting.path in taken:
        return None
    return "paths", None, setting.path, ", ".join(taken)
