"""What a step costs on this machine: measured per verify path and width, corrected while decoding, kept on disk."""

import bisect
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from sparkinfer.dflash.drift import Drift

PLAIN = "ar"  # the path of a plain step, one row and no draft
_CLEARLY = 0.95  # of the cost of a path that is preferred
_SURPRISE = 1.5  # a step is put down at this many times what it was expected to cost, at most
_SETTLED, _EVERY = 64, 4  # steps of a kind: after so many, one in four corrects its cost
_EARLY_EXIT = "token_loop"  # a path whose cost depends on how much is accepted; it was measured with all of it
_INTERPOLATED = 0.03  # least relative uncertainty of what was not measured
VERSION = 3  # of the file; another one is measured again
Key = tuple[str, int]  # path, width
Points = tuple[float, ...]  # seconds at each of the table's context lengths
Price = tuple[int, str, float, float]  # width, path, seconds of the step, those of the draft
Line = tuple[float, float]  # seconds at the first of these lengths, and for each token more


class Observed(NamedTuple):
    """A step as it came out.

    `drafted` counts the tokens that were judged, or would have been if none before them had been rejected;
    `accepted` those that were kept. `length` is the context at the step's start; `parts` splits `seconds`
    (plan, draft, target, sample, commit). `asked`: rows decided on before drafting, if the window was cut to `width`
    (0: it was not). `claims`: the draft's probabilities of its tokens from slot 0 on, as far as they were asked for.
    """

    width: int
    path: str
    length: int
    drafted: int
    accepted: int
    seconds: float
    parts: Mapping[str, float]
    asked: int = 0
    claims: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one step's parts at each context length.

    `measured` is False where neighbours were interpolated. `spread` is the uncertainty of the figure, relative to it.
    """

    target: Points  # verify and commit
    draft: Points
    measured: bool = True
    spread: float = 0.0

    @property
    def total(self) -> Points:
        return tuple(t + d for t, d in zip(self.target, self.draft, strict=True))


class CostTable:
    """Seconds of a whole step by path and width, linear in the context length.

    Raises: ValueError for a table without a plain step or with seconds that are not positive.
    """

    def __init__(
        self,
        lengths: Iterable[int],
        plain: Points,
        steps: Mapping[str, Mapping[int, Cost]],
        *,
        row: float = 0.0,
        wait: float = 0.0,
        spread: float = 0.0,
        origin: str = "given",
    ) -> None:
        """`steps[path][width]` for widths from 2, paths in order of preference.

        `row`: seconds the draft takes to append one more context row; `wait`: seconds that a step takes longer if the
        target starts on a window only when the host has seen the draft's claims, 0 where it always does (`steps` are
        without that); `spread`: relative uncertainty of `plain`.
        """
        self.lengths, self.base, self.row, self.wait = tuple(lengths), tuple(plain), row, wait
        self.spread, self.origin = spread, origin
        self.steps = {path: dict(sorted(costs.items())) for path, costs in steps.items()}
        _check(self)
        totals = {
            (path, w): cost.total for path, costs in self.steps.items() for w, cost in costs.items()
        }
        self._place = {key: place for place, key in enumerate([(PLAIN, 1), *totals])}
        self._lines = [self._through(points) for points in (self.base, *totals.values())]
        self._empty = self._line(0, 0)
        self._drafts: dict[int, Line] = {
            1: (0.0, 0.0)
        }  # by width: no path changes what a draft costs
        for by_width in self.steps.values():
            for width, cost in by_width.items():
                self._drafts.setdefault(width, self._through(cost.draft))
        spreads = [cost.spread for costs in self.steps.values() for cost in costs.values()]
        self._drift = Drift(self._place, [spread, *spreads])
        # By width: its ways in order of preference (place, path, line).
        self._ways: dict[int, list[tuple[int, str, Line]]] = {}
        for (path, width), place in sorted(self._place.items(), key=lambda item: item[0][1]):
            if width > 1:
                self._ways.setdefault(width, []).append((place, path, self._lines[place]))
        self.seen: dict[Key, int] = {}  # steps observed

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths some path has a cost for, without 1."""
        return tuple(sorted({width for costs in self.steps.values() for width in costs}))

    def plain(self, length: int) -> float:
        """Seconds of a plain step after `length` tokens."""
        return self.growth(length) * self._empty * self._drift.factors[0]

    def step(self, width: int, path: str, length: int) -> float:
        """Seconds of a step of `width` rows, draft included. Raises: KeyError for what the table does not hold."""
        return self._seconds((path, width) if width > 1 else (PLAIN, 1), length)

    def best_path(self, width: int, length: int, without: Collection[str] = ()) -> str | None:
        """The cheapest path for a width, `without` those named; None where there is none."""
        if width == 1:
            return PLAIN
        refused = {(path, width) for path in without}
        best = self.cheapest(length, refused).get(width)
        return best[0] if best else None

    def cheapest(self, length: int, without: Collection[Key] = ()) -> dict[int, tuple[str, float]]:
        """Width -> path and seconds of its cheapest way after `length` tokens; narrow first, width 1 left out.

        A path later in the order has to be clearly cheaper.
        """
        return {width: (path, now) for width, path, now, _ in self.prices(length, without)}

    def prices(self, length: int, without: Collection[Key] = ()) -> list[Price]:
        """The same in a list, with the seconds of the draft in it."""
        away, found = length - self.lengths[0], []
        factors, drafting, drafts = self._drift.factors, self._drift.drafting, self._drafts
        for width, ways in self._ways.items():
            least, best, seconds = inf, "", inf
            for place, path, (low, slope) in ways:
                if without and (path, width) in without:
                    continue
                now = low + slope * away
                now = (now if now > 0.5 * low else 0.5 * low) * factors[place]
                if now < least:
                    best, seconds, least = path, now, now * _CLEARLY
            if best:
                low, slope = drafts[width]
                draft = low + slope * away
                draft = (draft if draft > 0.5 * low else 0.5 * low) * drafting
                found.append((width, best, seconds, draft))
        return found

    def drafting(self, width: int, length: int) -> float:
        """Seconds of the draft in a step of that many rows: context rows, block and the choice of its tokens."""
        return self._at(self._drafts[width], length) * self._drift.drafting

    def observe(self, step: Observed, waiting: int | None = None) -> float:
        """Learn from a step and return what it is put down at, in plain steps.

        `waiting`: context rows the draft had to append in it (None: as many as usual). What is put down is not
        the step's own time but what such a step takes by now: a slow moment may hit any step, plain ones too.
        Steps of a kind that was never measured teach nothing, nor does a token loop that ended early, nor the
        first step of a kind: it may have had to record its tape. After many of a kind one in four is enough.
        """
        key = (step.path, step.width) if step.width > 1 else (PLAIN, 1)
        plain = self.plain(step.length)
        ended_early = step.path == _EARLY_EXIT and step.accepted + 1 < step.width
        if ended_early or key not in self._place:
            return step.seconds / plain
        cut = self.cut_off(step) / plain if step.asked else 0.0
        if step.asked and step.width == 1:
            return min(max(step.seconds / plain, 1.0 + cut), _SURPRISE * (1.0 + cut))
        line = self._line(self._place[key], step.length)
        expected = line * self._drift.factors[self._place[key]]
        seen = self.seen.get(key, 0)
        self.seen[key] = seen + 1
        if step.width == 1 or 0 < seen < _SETTLED or seen % _EVERY == 0 < seen:
            self._drift.observe(key, self.usual(step, waiting) / expected)
            after = line * self._drift.factors[self._place[key]] / self.plain(step.length)
            return min(after, _SURPRISE * expected / plain) + cut
        return expected / plain + cut

    def cut_off(self, step: Observed) -> float:
        """Seconds of the draft in a step that was cut, more than one of its width has."""
        if step.asked <= step.width:
            return 0.0
        asked, kept = (self.drafting(width, step.length) for width in (step.asked, step.width))
        return max(asked - kept, 0.0)

    def usual(self, step: Observed, waiting: int | None) -> float:
        """The step's seconds with as many rows for the draft to append and slots to fill as its width usually has."""
        if waiting is None or step.width == 1:
            return step.seconds
        rows = waiting - usual_rows(max(step.asked, step.width))
        extra = self.row * rows * self._drift.factors[0] + self.cut_off(step)
        return max(step.seconds - extra, 0.05 * step.seconds)

    @property
    def uncertainty(self) -> float:
        """Mean relative uncertainty of what was measured."""
        costs = [cost for by_width in self.steps.values() for cost in by_width.values()]
        return fmean([self.spread, *(cost.spread for cost in costs if cost.measured)])

    @property
    def level(self) -> float:
        """Logarithm of how much slower the machine is than when it was measured."""
        return self._drift.level

    def doubt(self, width: int, path: str) -> float:
        """Standard deviation of the logarithm of this step's cost over a plain one's."""
        return self._drift.doubt((path, width), (PLAIN, 1))

    def growth(self, length: int) -> float:
        """A plain step after `length` tokens against one after none, as it was measured."""
        low, slope = self._lines[0]
        seconds = low + slope * (length - self.lengths[0])
        return (seconds if seconds > 0.5 * low else 0.5 * low) / self._empty

    def _seconds(self, key: tuple[str, int], length: int) -> float:
        place = self._place[key]
        return self._line(place, length) * self._drift.factors[place]

    def _line(self, place: int, length: int) -> float:
        return self._at(self._lines[place], length)

    def _at(self, line: Line, length: int) -> float:
        low, slope = line
        seconds = low + slope * (length - self.lengths[0])
        return seconds if seconds > 0.5 * low else 0.5 * low

    def _through(self, points: Points) -> Line:
        distance = max(self.lengths[-1] - self.lengths[0], 1)
        return points[0], (points[-1] - points[0]) / distance

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON: what was measured (milliseconds at each context length) and the corrections since."""
        return {
            "version": VERSION,
            "origin": self.origin,
            "lengths": list(self.lengths),
            "plain_ms": _ms(self.base),
            "plain_spread": round(self.spread, 4),
            "draft_row_ms": round(self.row * 1e3, 6),
            "wait_ms": round(self.wait * 1e3, 6),
            "steps": [
                {
                    "path": path,
                    "width": width,
                    "target_ms": _ms(cost.target),
                    "draft_ms": _ms(cost.draft),
                    "measured": cost.measured,
                    "spread": round(cost.spread, 4),
                    "relative": round(sum(cost.total) / sum(self.base), 4),
                }
                for path, costs in self.steps.items()
                for width, cost in costs.items()
            ],
            "corrections": self._drift.report(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], origin: str = "given") -> "CostTable":
        """Read what `to_json` wrote, without the corrections. Raises: KeyError, TypeError, ValueError."""
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}, expected {VERSION}")
        steps: dict[str, dict[int, Cost]] = {}
        for entry in data["steps"]:
            cost = Cost(
                _from_ms(entry["target_ms"]),
                _from_ms(entry["draft_ms"]),
                bool(entry["measured"]),
                float(entry["spread"]),
            )
            steps.setdefault(str(entry["path"]), {})[int(entry["width"])] = cost
        lengths = [int(length) for length in data["lengths"]]
        row, wait = float(data["draft_row_ms"]) * 1e-3, float(data["wait_ms"]) * 1e-3
        plain, spread = _from_ms(data["plain_ms"]), float(data["plain_spread"])
        return cls(lengths, plain, steps, row=row, wait=wait, spread=spread, origin=origin)


def usual_rows(width: int) -> float:
    """Context rows the draft appends in a step of this width on average, as the table's costs assume."""
    return (width + 1) / 2


def _check(table: CostTable) -> None:
    lengths, count = table.lengths, len(table.lengths)
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"context lengths {lengths} do not ascend")
    for points in [
        table.base,
        *(c.total for costs in table.steps.values() for c in costs.values()),
    ]:
        if len(points) != count or not all(0 < s < 1e6 for s in points):
            raise ValueError(f"seconds {points} at {count} context lengths")
    spreads = [table.spread, *(c.spread for costs in table.steps.values() for c in costs.values())]
    if not all(0 <= value < 1e6 for value in (table.row, table.wait, *spreads)):
        raise ValueError(
            f"{table.row} seconds a draft row, {table.wait} of waiting, uncertainties {spreads}"
        )
    if any(width < 2 for costs in table.steps.values() for width in costs):
        raise ValueError("widths of speculative steps start at 2")


def filled(costs: Mapping[int, Cost], widths: Iterable[int]) -> dict[int, Cost]:
    """Costs of all `widths`: the given ones as they are, between them on a line that does not fall."""
    known = sorted(costs)
    result = {}
    for width in widths:
        if width in costs:
            result[width] = costs[width]
            continue
        place = bisect.bisect(known, width)
        low, high = costs[known[max(place - 1, 0)]], costs[known[min(place, len(known) - 1)]]
        left, right = known[max(place - 1, 0)], known[min(place, len(known) - 1)]
        share = (width - left) / (right - left) if right > left else 0.0
        target = _between(low.target, high.target, share)
        draft = _between(low.draft, high.draft, share)
        result[width] = Cost(target, draft, False, max(low.spread, high.spread, _INTERPOLATED))
    return result


def _between(low: Points, high: Points, share: float) -> Points:
    return tuple(a + share * (max(a, b) - a) for a, b in zip(low, high, strict=True))


def _ms(points: Points) -> list[float]:
    return [round(seconds * 1e3, 6) for seconds in points]


def _from_ms(milliseconds: Iterable[float]) -> Points:
    return tuple(float(value) * 1e-3 for value in milliseconds)


def cost_file(cache_dir: Path, fingerprint: Mapping[str, Any]) -> Path:
    """Where costs measured under this fingerprint are kept."""
    text = json.dumps(fingerprint, sort_keys=True, default=str)
    return cache_dir / "costs" / f"{sha256(text.encode()).hexdigest()[:24]}.json"


def load_costs(cache_dir: Path, fingerprint: Mapping[str, Any]) -> tuple[CostTable | None, str]:
    """The costs kept for this fingerprint; or None and why they cannot be used."""
    path = cost_file(cache_dir, fingerprint)
    try:
        data = json.loads(path.read_text())
        if data["fingerprint"] != json.loads(json.dumps(fingerprint, default=str)):
            return None, f"{path.name} was measured for something else"
        return CostTable.from_json(data["costs"], origin="read back"), f"{path.name}"
    except FileNotFoundError:
        return None, "nothing was kept"
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{path.name} cannot be read ({error.__class__.__name__})"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"{path.name} is damaged ({error})"


def save_costs(cache_dir: Path, fingerprint: Mapping[str, Any], table: CostTable) -> str | None:
    """Keep the costs for later processes, in one atomic step; returns why that was not possible, None if it was."""
    path = cost_file(cache_dir, fingerprint)
    text = json.dumps({"fingerprint": fingerprint, "costs": table.to_json()}, default=str, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text + "\n")
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        return f"{path.parent}: {error.strerror or error}"
    return None
