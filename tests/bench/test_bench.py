"""Workloads, rounds and reports, on a target that only notes what it is asked."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from sparkinfer.bench import measure as module
from sparkinfer.bench.measure import Measurement, measure
from sparkinfer.bench.report import json_line, table
from sparkinfer.bench.workloads import Workload, parse_counts, plan_workloads, random_tokens
from sparkinfer.errors import OptionError
from sparkinfer.options import resolve


class NotingState:
    """A state that is its length; a window leaves it alone."""

    def __init__(self, context: int | None) -> None:
        self.context, self.length = context, 0

    def snapshot(self) -> int:
        return self.length

    def restore(self, snapshot: int) -> None:
        self.length = snapshot


class NotingTarget:
    """Notes (depth, tokens, rows, verify) of every forward; each takes as many ticks as tokens."""

    max_width = 8

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, str, bool]] = []
        self.states: list[NotingState] = []
        self.now = 0.0

    def new_state(self, context: int | None = None) -> NotingState:
        self.states.append(NotingState(context))
        return self.states[-1]

    def forward(
        self, state: Any, tokens: Sequence[int], *, rows: Any = "last", verify: bool = False
    ) -> None:
        assert all(0 <= token < 50 for token in tokens)
        self.calls.append((state.length, len(tokens), rows, verify))
        state.length += 0 if verify else len(tokens)
        assert state.length <= state.context
        self.now += len(tokens)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> NotingTarget:
    target = NotingTarget()
    monkeypatch.setattr(module, "perf_counter", lambda: target.now)
    return target


def run(target: NotingTarget, workloads: list[Workload], rounds: int) -> list[Measurement]:
    return measure(target, 50, workloads, rounds, lambda *_: None)


def test_workloads_cover_every_depth_and_leave_zeros_out() -> None:
    found = [w.name for w in plan_workloads([512], [0], [1, 4], [0, 1024])]
    assert found == ["pp512", "v1", "v4", "pp512 @ d1024", "v1 @ d1024", "v4 @ d1024"]


def test_each_round_runs_every_workload_from_the_same_depth(target: NotingTarget) -> None:
    workloads = plan_workloads([5], [2], [1, 3], [4])
    results = run(target, workloads, 3)
    prompt, decode = [(4, 5, "last", False)], [(4, 1, "last", False), (5, 1, "last", False)]
    windows = [(4, 1, "all", True), (4, 3, "all", True)]
    assert target.calls == [(0, 4, "none", False), *(prompt + decode + windows) * 4]
    assert [result.workload for result in results] == workloads
    assert target.states[0].context == 9
    assert [result.seconds for result in results] == [
        (5.0,) * 3,
        (2.0,) * 3,
        (1.0,) * 3,
        (3.0,) * 3,
    ]
    assert [result.cost for result in results] == [None, None, 1.0, 3.0]


def test_a_window_has_no_relative_cost_without_one_row(target: NotingTarget) -> None:
    assert [r.cost for r in run(target, plan_workloads([], [], [2], [0]), 2)] == [None]


def test_a_window_that_is_too_wide_is_refused(target: NotingTarget) -> None:
    with pytest.raises(OptionError, match="--widths 9 is too wide; this target verifies 1 to 8"):
        run(target, plan_workloads([], [], [1, 9], [0]), 1)
    assert target.calls == []


def test_statistics_of_a_measurement() -> None:
    result = Measurement(Workload("decode", 10, 0), (1.0, 2.0, 5.0))
    assert result.rates == [10.0, 5.0, 2.0]
    assert (result.mean, result.median) == (pytest.approx(17 / 3), 5.0)
    assert result.deviation == pytest.approx(4.041452)
    assert Measurement(Workload("decode", 10, 0), (1.0,)).deviation == 0.0


@pytest.mark.parametrize("text", ["", "1,,2", "-1", "1.5", "x", "²", str(2**30)])
def test_a_list_of_counts_is_checked(text: str) -> None:
    with pytest.raises(
        OptionError, match="-p .* is not a list of whole numbers from 0 to 16777216"
    ):
        parse_counts("-p", text)


def test_counts_and_tokens_are_the_same_every_time() -> None:
    assert parse_counts("-d", "0, 1024,0") == [0, 1024]
    assert random_tokens(20, 7) == random_tokens(20, 7)
    assert set(random_tokens(200, 7)) == set(range(7))


def test_a_record_carries_plan_options_and_machine() -> None:
    result = Measurement(Workload("verify", 4, 128), (0.25, 0.5), (1.5, 2.5))
    line = json_line(result, {"name": "m"}, {"isa": "avx2"}, resolve({"threads": "2"}, {}))
    assert "\n" not in line
    record = json.loads(line)
    assert (record["test"], record["cost"], record["median"]) == ("v4 @ d128", 2.0, 12.0)
    assert record["seconds"] == [0.25, 0.5]
    assert record["plan"] == {"isa": "avx2"} and record["model"] == {"name": "m"}
    assert record["options"]["threads"] == {"value": 2, "origin": "flag"}
    assert record["environment"]["cores"] >= 1


def test_the_table_has_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    results = [Measurement(Workload("verify", 4, 0), (0.5, 0.5), (1.25, 1.25))]
    Console(width=100).print(table(results))
    assert capsys.readouterr().out.splitlines()[1].split() == [
        *("v4", "8.0", "±", "0.0", "8.0", "500.00", "1.25")
    ]
