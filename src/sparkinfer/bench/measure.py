"""Time workloads on a target in rounds of all of them, so that a slow minute hits them alike."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from sparkinfer.bench.workloads import Workload, random_tokens
from sparkinfer.decoding import best_rows
from sparkinfer.errors import OptionError

Report = Callable[[str, int, int], None]  # label, rounds done, rounds


class State(Protocol):
    """What is used of a target's sequence state."""

    def snapshot(self) -> Any: ...

    def restore(self, snapshot: Any) -> None: ...


class MeasuredTarget(Protocol):
    """What is used of a target."""

    @property
    def max_width(self) -> int: ...

    def new_state(self, context: int | None = None) -> Any: ...

    def forward(
        self, state: Any, tokens: Sequence[int], *, rows: Any = "last", verify: bool = False
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds of each round; `ratios` of a verify window: its seconds over one row's, per round."""

    workload: Workload
    seconds: tuple[float, ...]
    ratios: tuple[float, ...] = ()

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each round."""
        return [self.workload.tokens / seconds for seconds in self.seconds]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)

    @property
    def deviation(self) -> float:
        """Sample standard deviation of the rates, 0 for a single round."""
        return statistics.stdev(self.rates) if len(self.seconds) > 1 else 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    @property
    def cost(self) -> float | None:
        """Median over rounds of cost(n) / cost(1), None where no one-row window was run."""
        return statistics.median(self.ratios) if self.ratios else None


def measure(
    target: MeasuredTarget,
    n_vocab: int,
    workloads: Sequence[Workload],
    rounds: int,
    report: Report,
) -> list[Measurement]:
    """Run every workload once unmeasured, then `rounds` times, all of them in each round.

    Raises: OptionError for a window wider than the target's.
    """
    _check_widths(target, workloads)
    results: list[Measurement] = []
    for depth in dict.fromkeys(workload.depth for workload in workloads):
        here = [workload for workload in workloads if workload.depth == depth]
        results += _measure_depth(target, n_vocab, here, depth, rounds, report)
    return results


def _check_widths(target: MeasuredTarget, workloads: Iterable[Workload]) -> None:
    for workload in workloads:
        if workload.kind == "verify" and workload.tokens > target.max_width:
            limit = f"this target verifies 1 to {target.max_width} rows"
            raise OptionError(f"--widths {workload.tokens} is too wide; {limit}")


def _measure_depth(
    target: MeasuredTarget,
    n_vocab: int,
    workloads: list[Workload],
    depth: int,
    rounds: int,
    report: Report,
) -> list[Measurement]:
    longest = max(workload.tokens for workload in workloads)
    tokens = random_tokens(depth + longest, n_vocab)
    state = target.new_state(depth + longest)
    if depth:
        target.forward(state, tokens[:depth], rows="none")
    start = state.snapshot()
    seconds: dict[Workload, list[float]] = {workload: [] for workload in workloads}
    for turn in range(rounds + 1):
        for workload in workloads:
            elapsed = _run_once(target, state, workload, tokens[depth:])
            state.restore(start)
            if turn:  # the first turn warms up
                seconds[workload].append(elapsed)
        report(f"measuring at depth {depth}", turn, rounds)
    return [Measurement(w, tuple(times), _ratios(w, seconds)) for w, times in seconds.items()]


def _run_once(
    target: MeasuredTarget, state: Any, workload: Workload, tokens: Sequence[int]
) -> float:
    """Return the seconds of one run on a state at the workload's depth."""
    window = tokens[: workload.tokens]
    start = perf_counter()
    if workload.kind == "prompt":
        target.forward(state, window)
    elif workload.kind == "decode":
        for token in window:
            best_rows(target, state, [token])
    else:
        best_rows(target, state, window, rows="all", verify=True)
    return perf_counter() - start


def _ratios(workload: Workload, seconds: dict[Workload, list[float]]) -> tuple[float, ...]:
    single = seconds.get(Workload("verify", 1, workload.depth))
    if workload.kind != "verify" or not single:
        return ()
    return tuple(n / one for n, one in zip(seconds[workload], single, strict=True))
