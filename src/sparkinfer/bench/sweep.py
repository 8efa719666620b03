"""Plain decoding, every draft depth and the planner side by side, on prompts by domain, in turns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sparkinfer.bench.agree import compare_results
from sparkinfer.bench.answers import PLAIN, Side, answer, decoding_steps, merge, tokens_a_step
from sparkinfer.bench.spread import Spread, in_turns
from sparkinfer.decoding import SpeculationReport
from sparkinfer.engine import Engine, PathCount, Result

Report = Callable[[str, int, int], None]
PARTS = ("draft", "target", "sample", "commit")
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt's tokens and its domain."""

    domain: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One answer of one side in one round, and whether it is plain decoding's."""

    side: str
    task: int
    round: int
    result: Result
    identical: bool

    @property
    def seconds(self) -> float:
        return self.result.timings.decode_s

    @property
    def tokens(self) -> int:
        return self.result.timings.decode_tokens

    @property
    def step_seconds(self) -> float:
        """Seconds of all steps, the one of the prompt's own token included: what `parts` split."""
        return self.result.timings.total_s - self.result.timings.prefill_s


@dataclass(frozen=True, slots=True)
class Measured:
    """A side's runs, and those of plain decoding in the same rounds on the same prompts."""

    side: Side
    runs: tuple[Run, ...]
    plain: tuple[Run, ...]

    @property
    def speed(self) -> Spread | None:
        """Tokens per second of each round over all prompts."""
        return _spread(_speeds(self.runs))

    @property
    def ratio(self) -> Spread | None:
        """Speed over plain decoding's, round by round; None where nothing was decoded."""
        ours, theirs = _speeds(self.runs), _speeds(self.plain)
        if not all(theirs.get(turn) for turn in ours):
            return None
        return _spread({turn: speed / theirs[turn] for turn, speed in ours.items()})

    @property
    def steps(self) -> PathCount:
        total = PathCount()
        for run in self.runs:
            merge(total, decoding_steps(run.result))
        return total

    @property
    def tokens_a_step(self) -> float | None:
        return tokens_a_step(self.steps)

    @property
    def identical(self) -> bool:
        return all(run.identical for run in self.runs)

    @property
    def paths(self) -> dict[str, PathCount]:
        """Steps by path and mode."""
        total: dict[str, PathCount] = {}
        for run in self.runs:
            for path, count in run.result.paths.items():
                merge(total.setdefault(path, PathCount()), count)
        return total

    @property
    def step_parts(self) -> dict[str, float]:
        """Seconds of a step by part; `other` is what no part covers, `step` the whole."""
        steps = sum(count.steps for count in self.paths.values())
        sums = {
            part: sum(run.result.timings.parts.get(part, 0.0) for run in self.runs)
            for part in PARTS
        }
        whole = sum(run.step_seconds for run in self.runs)
        sums |= {"other": whole - sum(sums.values()), "step": whole}
        return {part: seconds / steps for part, seconds in sums.items()}

    @property
    def slots(self) -> list[tuple[int, int]]:
        """For each slot after the anchor how often it was judged and how often kept."""
        return add_slots(run.result.speculation for run in self.runs)

    @property
    def widths(self) -> dict[int, int]:
        """Steps by the rows asked for."""
        total: dict[int, int] = {}
        for run in self.runs:
            report = run.result.speculation
            for width, count in (report.widths if report else {}).items():
                total[width] = total.get(width, 0) + count
        return dict(sorted(total.items()))

    @property
    def refusals(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for run in self.runs:
            report = run.result.speculation
            for reason, count in (report.refusals if report else {}).items():
                total[reason] = total.get(reason, 0) + count
        return total

    @property
    def last_report(self) -> SpeculationReport | None:
        return self.runs[-1].result.speculation

    def of_tasks(self, wanted: Iterable[int]) -> "Measured":
        """Return the same of some prompts only."""
        tasks = set(wanted)
        return Measured(
            self.side,
            tuple(run for run in self.runs if run.task in tasks),
            tuple(run for run in self.plain if run.task in tasks),
        )


def sweep(
    engine: Engine,
    sides: Sequence[Side],
    tasks: Sequence[Task],
    *,
    tokens: int,
    rounds: int,
    report: Report,
    recorded: Callable[[int, Sequence[int], Result], None] | None = None,
) -> list[Measured]:
    """Answer every prompt with every side in each round; the first side is plain decoding.

    An answer ends where the model ends it, after `tokens` tokens at most: text forced out of a model
    beyond its own end repeats itself, which flatters a draft. Prompts are computed anew each time. Sides
    go forwards in one round and backwards in the next. `recorded` is given each plain answer before
    the other sides run.
    Raises: RequestError for a prompt that leaves no room for `tokens` more.
    """
    assert sides[0].name == PLAIN, "the first side is what the others are compared with"
    reference = [
        answer(engine, sides[0], task.tokens, number, max_tokens=tokens)
        for number, task in enumerate(tasks)
    ]
    if recorded:
        for number, task in enumerate(tasks):
            recorded(number, task.tokens, reference[number])
    for side in sides:  # every width's tape is recorded before anything is measured
        answer(engine, side, tasks[0].tokens, 0, max_tokens=min(tokens, _WARM_UP_TOKENS))
    runs: dict[str, list[Run]] = {side.name: [] for side in sides}
    total = rounds * len(tasks)
    for turn in range(rounds):
        for number, task in enumerate(tasks):
            report("measuring", turn * len(tasks) + number, total)
            for index in in_turns(len(sides), turn + number):
                side = sides[index]
                result = answer(engine, side, task.tokens, number, max_tokens=tokens)
                same = compare_results(reference[number], result) is None
                runs[side.name].append(Run(side.name, number, turn, result, same))
    report("measuring", total, total)
    plain = tuple(runs[PLAIN])
    return [Measured(side, tuple(runs[side.name]), plain) for side in sides]


def add_slots(reports: Iterable[SpeculationReport | None]) -> list[tuple[int, int]]:
    """Return the sums over reports of how often each slot was judged and kept."""
    total: list[tuple[int, int]] = []
    for report in reports:
        for slot, (reached, kept) in enumerate(report.slots if report else ()):
            if slot == len(total):
                total.append((0, 0))
            total[slot] = (total[slot][0] + reached, total[slot][1] + kept)
    return total


def _speeds(runs: Iterable[Run]) -> dict[int, float]:
    """Tokens per second of each round; rounds without any decoding are left out."""
    sums: dict[int, tuple[int, float]] = {}
    for run in runs:
        tokens, seconds = sums.get(run.round, (0, 0.0))
        sums[run.round] = (tokens + run.tokens, seconds + run.seconds)
    return {turn: tokens / seconds for turn, (tokens, seconds) in sums.items() if seconds}


def _spread(figures: dict[int, float]) -> Spread | None:
    return Spread.of(list(figures.values())) if figures else None
