"""Measure what steps cost here: plain rows, verify windows by path and width, and the draft's own work.

Everything runs on states that only pretend to hold a context (`assume`), in rounds of all measurements,
so that a slow moment hits them alike. What counts is the lower quartile over rounds: other processes only
ever make a step slower.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log, sqrt
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, Protocol

from sparkinfer.decoding import best_rows
from sparkinfer.dflash.base import Draft
from sparkinfer.dflash.costs import (
    Cost,
    CostTable,
    Points,
    filled,
    load_costs,
    save_costs,
    usual_rows,
)
from sparkinfer.dflash.verify import AHEAD, WINDOW, Paths, VerifyPath, VerifyTarget
from sparkinfer.machine import allowed_cores, cpu_model, own_version

Report = Callable[[str, int, int], None]  # what is done, rounds done, rounds
Clock = Callable[[], float]
Key = tuple[str, int]  # path or part, width

_SHORT, _LONG = 32, 1024  # context lengths
_SLACK = 48  # tokens the measurements may add to a pretended context before it is set up again
_WIDTHS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
_SLOW = 0.05  # seconds of a row from which fewer widths are measured
_SLOW_WIDTHS = (2, 4, 8, 16)
_BUDGET = 2.5  # seconds of measuring
_ROUNDS = (3, 15)  # least and most
_LONG_ROUND = 1.0  # seconds of a round from which two are enough
_SLOW_ROUNDS = 2
_PLAIN_EVERY = 4  # measurements between plain rows, which everything else is compared with
_CHECKED = 4  # rows of the window that is measured again when costs are read back
_AGREE = 0.15  # logarithm of its change that is no reason to measure everything again
_BUSY = 0.15  # mean relative uncertainty from which measurements are not kept for later
_EXTEND, _PROPOSE, _AHEAD = "extend", "propose", "ahead"
_LEAST_TARGET = (
    0.3  # of what a window took alone is its part of a step that does not wait, at least
)
_ROW: Key = ("plain", 1)
_STRIDE = 7919  # a prime: neighbours in a window are far apart in the vocabulary


class CostTarget(VerifyTarget, Protocol):
    """What measuring needs of a target (`sparkinfer.models.Target`)."""

    context: int

    @property
    def config(self) -> Any: ...  # n_vocab
    def new_state(self, context: int | None = None) -> Any: ...
    def wait(self) -> None: ...


def measured_costs(
    target: CostTarget,
    draft: Draft,
    paths: Paths,
    cache_dir: Path,
    progress: Report | None = None,
    *,
    clock: Clock = perf_counter,
) -> CostTable:
    """The costs of the permitted paths: read back if they were measured before, else measured and kept.

    Measurements belong to a fingerprint of machine, models and paths, and one of them is repeated when they are read
    back: if it comes out otherwise, all are. `origin` of the result says where they come from, and why. A folder that
    cannot be read or written is no error.
    """
    key = fingerprint(target, draft, paths)
    table, reason = load_costs(cache_dir, key)
    if table is not None and (change := _change(table, target, draft, paths.order, clock)):
        table, reason = None, f"a window now takes {change:.2f} of the time that was kept"
    if table is None:
        table = calibrate(
            target, draft, paths.order, most=paths.max_width, report=progress, clock=clock
        )
        table.origin = f"measured now: {reason}"
        if table.uncertainty > _BUSY:
            table.origin += "; not kept, because the machine was busy"
        elif (failure := save_costs(cache_dir, key, table)) is not None:
            table.origin += f"; could not be kept: {failure}"
    return table


def fingerprint(target: CostTarget, draft: Draft, paths: Paths) -> dict[str, Any]:
    """Everything a cost depends on, ready for JSON: machine, both models' plans, permitted paths, version."""
    return {
        "cpu": cpu_model(),
        "cores": allowed_cores(),
        "target": dict(target.plan),
        "draft": dict(draft.plan),
        "paths": {
            path.name: [w for w in range(2, paths.max_width + 1) if path.refusal(w) is None]
            for path in paths.order
        },
        "version": own_version(),
    }


def calibrate(
    target: CostTarget,
    draft: Draft,
    paths: Sequence[VerifyPath],
    *,
    most: int | None = None,
    report: Report | None = None,
    clock: Clock = perf_counter,
) -> CostTable:
    """Measure steps of at most `most` rows (default: all that target and draft can do), in about three seconds.

    A slow model gets few widths and at most two rounds; the widths between are interpolated. The draft is left
    without context.
    """
    lengths = _lengths(target.context)
    top = min(target.max_width, draft.max_depth + 1, target.context - lengths[-1] - 1)
    bench = _Bench(target, draft, lengths, clock)
    try:
        single = bench.plain_row()
        plan = _plan(paths, min(top, most or top), slow=single > _SLOW)
        bench.add(plan, lengths)
        bench.measure(slow=single > _SLOW, report=report)
    finally:
        draft.assume(0)
    return _table(bench.results(), lengths, plan, paths)


def _change(
    table: CostTable, target: CostTarget, draft: Draft, paths: Sequence[VerifyPath], clock: Clock
) -> float | None:
    """A window's cost in plain steps now over what the table says, if that is not about 1. Takes some twenty steps."""
    first = next((path for path in paths if path.name in table.steps), None)
    if first is None:
        return None
    measured = [width for width, cost in table.steps[first.name].items() if cost.measured]
    width = min(measured, key=lambda width: abs(width - _CHECKED))
    bench = _Bench(target, draft, table.lengths[:1], clock)
    bench.add(_Plan({first.name: first}, {first.name: (width,)}), table.lengths[:1])
    try:
        window, plain = bench.compare((first.name, width), _ROW)
    finally:
        draft.assume(0)
    change = window / plain / (table.steps[first.name][width].target[0] / table.base[0])
    return None if abs(log(change)) < _AGREE else change


def _lengths(context: int) -> list[int]:
    """Context lengths to measure at: a short and a long one that leave room for windows."""
    room = context - 32
    if room < 2:
        return [0]
    long, short = min(_LONG, room), min(_SHORT, room // 2)
    return [short, long]


@dataclass(frozen=True)
class _Plan:
    """What is measured: widths by path and, of the draft, all of those widths."""

    paths: Mapping[str, VerifyPath]
    widths: Mapping[str, tuple[int, ...]]

    @property
    def all_widths(self) -> list[int]:
        return sorted({width for widths in self.widths.values() for width in widths})


def _plan(paths: Sequence[VerifyPath], top: int, slow: bool) -> _Plan:
    """The first path that serves a width is measured at all widths, the second at its narrowest and widest.

    A slow model gets only the first. Paths stand in order of preference; what comes third would have to be
    faster than two before it.
    """
    candidates = {width for width in (_SLOW_WIDTHS if slow else _WIDTHS) if width <= top}
    if top >= 2:
        candidates.add(top)
    first: dict[str, list[int]] = {}
    second: dict[str, list[int]] = {}
    for width in sorted(candidates):
        serving = [path.name for path in paths if path.refusal(width) is None]
        if serving:
            first.setdefault(serving[0], []).append(width)
        if len(serving) > 1 and not slow:
            second.setdefault(serving[1], []).append(width)
    widths = {name: set(known) for name, known in first.items()}
    for name, known in second.items():
        widths.setdefault(name, set()).update({known[0], known[-1]})
    return _Plan(
        {path.name: path for path in paths},
        {name: tuple(sorted(known)) for name, known in widths.items()},
    )


@dataclass(frozen=True)
class _Result:
    """Seconds at each context length, and how uncertain they are relative to themselves."""

    seconds: Points
    spread: float


def _quartile(values: Sequence[float]) -> tuple[float, float]:
    """The lower quartile, and its distance to the median as a measure of what it is worth."""
    ascending = sorted(values)
    low, middle = ascending[(len(ascending) - 1) // 4], ascending[len(ascending) // 2]
    return low, (middle - low) / low / sqrt(max(len(ascending) / 4, 1.0))


@dataclass
class _Bench:
    """Runs measurements at their context lengths and keeps their seconds."""

    target: CostTarget
    draft: Draft
    lengths: Sequence[int]
    clock: Clock
    seconds: dict[tuple[Key, int], list[float]] = field(default_factory=dict)
    runs: dict[Key, Callable[[], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = min(self.target.context, self.lengths[-1] + _SLACK)
        self.state = self.target.new_state(size)
        self.runs[_ROW] = self._plain
        self._base = -1  # context length that is pretended
        self._turn = 0  # tokens used

    def plain_row(self) -> float:
        """Seconds of one plain row, the better of two after a warm-up."""
        seconds = []
        for _ in range(3):
            self._settle(self.lengths[0], 1)
            seconds.append(self._timed(self._plain))
        return min(seconds[1:])

    def add(self, plan: _Plan, lengths: Sequence[int]) -> None:
        """Set up the measurements of a plan."""
        for name, widths in plan.widths.items():
            for width in widths:
                self.runs[name, width] = self._verify(plan.paths[name], width)
        for width in plan.all_widths:
            self.runs[_PROPOSE, width] = self._propose(width - 1)
        for rows in {1, max(plan.all_widths, default=1)}:
            self.runs[_EXTEND, rows] = self._extend(rows)
        if getattr(self.draft, "runs_ahead", False):
            batched = plan.widths.get(WINDOW, ())
            for width in {*batched[:1], *batched[-1:]}:
                self.runs[_AHEAD, width] = self._ahead(width)
        self.seconds = {(key, length): [] for key in self.runs for length in lengths}

    def compare(self, one: Key, other: Key) -> tuple[float, float]:
        """Seconds of two measurements at the first length, the least of eight in turn."""
        seconds: dict[Key, list[float]] = {one: [], other: []}
        for turn in range(9):
            for key, times in seconds.items():
                self._settle(self.lengths[0], key[1])
                elapsed = self._timed(self.runs[key])
                if turn:
                    times.append(elapsed)
        return min(seconds[one]), min(seconds[other])

    def measure(self, slow: bool, report: Report | None) -> None:
        """Warm up, then rounds of all measurements, every second one in the opposite order."""
        self._round(1, self.lengths[:1], keep=False)
        started = self.clock()
        least, most = (_SLOW_ROUNDS, _SLOW_ROUNDS) if slow else _ROUNDS
        done = 0
        while done < most and (done < least or self._time_is_left(started, done)):
            if done and self.clock() - started > _LONG_ROUND * done:
                least = _SLOW_ROUNDS
                if done >= least:
                    break
            lengths = self.lengths[-1:] if slow and done else self.lengths
            self._round(1 if done % 2 else -1, lengths, keep=True)
            done += 1
            if report:
                report("measuring steps", done, most)
        if report and done < most:
            report("measuring steps", most, most)

    def results(self) -> dict[Key, _Result]:
        """What every measurement came to; a longer context is never cheaper."""
        results = {}
        for key in self.runs:
            values, spreads = zip(
                *(_quartile(self.seconds[key, length]) for length in self.lengths), strict=True
            )
            if values[-1] < values[0]:
                values = (fmean(values),) * len(values)
            results[key] = _Result(values, fmean(spreads))
        return results

    def _time_is_left(self, started: float, done: int) -> bool:
        spent = self.clock() - started
        return spent + spent / done <= _BUDGET

    def _round(self, direction: int, lengths: Sequence[int], *, keep: bool) -> None:
        others = [key for key in self.runs if key != _ROW][::direction]
        for length in lengths:
            for place, key in enumerate(others):
                for now in (_ROW, key) if place % _PLAIN_EVERY == 0 else (key,):
                    self._settle(length, now[1])
                    elapsed = self._timed(self.runs[now])
                    if keep:
                        self.seconds[now, length].append(elapsed)

    def _timed(self, run: Callable[[], None]) -> float:
        started = self.clock()
        run()
        self.target.wait()
        return self.clock() - started

    def _settle(self, length: int, rows: int) -> None:
        """Pretend to be at about this length, with room for so many rows."""
        most = min(self.state.context, length + _SLACK)
        if self._base != length or self.state.length + rows > most:
            self.state.assume(length)
        if self._base != length or self.draft.length + rows > most:
            self.draft.assume(length)
        self._base = length

    def _tokens(self, count: int) -> list[int]:
        """Always other ones: rows of the same token would share their experts and be cheaper than real ones."""
        first, self._turn = self._turn, self._turn + count
        vocabulary: int = self.target.config.n_vocab
        return [(index * _STRIDE) % vocabulary for index in range(first, first + count)]

    def _plain(self) -> None:
        best_rows(self.target, self.state, self._tokens(1))

    def _verify(self, path: VerifyPath, width: int) -> Callable[[], None]:
        def run() -> None:
            path.run(self.state, self._tokens(width), lambda index, row: True)
            path.commit(self.state, 1)

        return run

    def _propose(self, depth: int) -> Callable[[], None]:
        def run() -> None:
            (token,) = self._tokens(1)
            proposals = self.draft.propose(token, depth)
            for slot in range(depth):
                token = proposals.best(slot, token)

        return run

    def _ahead(self, width: int) -> Callable[[], None]:
        """A block and its window, which starts before the host knows it."""

        def run() -> None:
            (token,) = self._tokens(1)
            ahead = self.draft.propose_ahead(token, width - 1)  # type: ignore[attr-defined]
            finish = self.target.verify_ahead(self.state, token, width - 1, ahead.known)  # type: ignore[attr-defined]
            finish(ahead.told)
            self.state.commit(1)

        return run

    def _extend(self, rows: int) -> Callable[[], None]:
        def run() -> None:
            self.draft.extend(self._tokens(rows), self.target.tapped(rows))

        return run


def _table(
    results: Mapping[Key, _Result], lengths: Sequence[int], plan: _Plan, paths: Iterable[VerifyPath]
) -> CostTable:
    """Whole steps from their parts."""
    extends = {rows: result for (part, rows), result in results.items() if part == _EXTEND}
    few, many = extends[min(extends)], extends[max(extends)]
    row = 0.0
    if len(extends) > 1:
        row = max(0.0, (many.seconds[0] - few.seconds[0]) / (max(extends) - min(extends)))
    plain, steps, wait = results[_ROW], {}, _wait(results)
    for path in paths:
        widths = plan.widths.get(path.name, ())
        if not widths:
            continue
        verify = [plain.seconds, *(results[path.name, width].seconds for width in widths)]
        _, *verify = _rising(verify)
        costs = {}
        for width, target in zip(widths, verify, strict=True):
            propose = results[_PROPOSE, width]
            more = row * (usual_rows(width) - min(extends))
            pairs = zip(propose.seconds, few.seconds, strict=True)
            draft = tuple(proposing + extending + more for proposing, extending in pairs)
            if path.name in AHEAD:
                target = tuple(max(s - wait, _LEAST_TARGET * s) for s in target)
            costs[width] = Cost(target, draft, spread=results[path.name, width].spread)
        served = range(widths[0], widths[-1] + 1)
        steps[path.name] = filled(costs, [w for w in served if path.refusal(w) is None])
    return CostTable(
        lengths, plain.seconds, steps, row=row, wait=wait, spread=plain.spread, origin="measured"
    )


def _wait(results: Mapping[Key, _Result]) -> float:
    """Seconds by which a block and its window one after the other take longer than the two at once."""
    more = [
        results[_PROPOSE, width].seconds[0] + results[WINDOW, width].seconds[0] - ahead.seconds[0]
        for (part, width), ahead in results.items()
        if part == _AHEAD
    ]
    return max(0.0, fmean(more)) if more else 0.0


def _rising(costs: Sequence[Points]) -> list[Points]:
    """More rows never cost less than fewer: what noise says otherwise is raised to the row before."""
    result = [costs[0]]
    for points in costs[1:]:
        result.append(tuple(max(low, now) for low, now in zip(result[-1], points, strict=True)))
    return result
