"""Progress on a terminal, on request, and nowhere else."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sparkinfer.cli.console import _Bars, complain, progress
from sparkinfer.options import resolve


def report_twice(mode: str) -> None:
    with progress(resolve({"progress": mode}, {})) as report:
        for done in (0, 1, 2):
            report("loading", done, 2)


@pytest.mark.parametrize(("mode", "expected"), [("auto", ""), ("off", ""), ("on", "loading ...\n")])
def test_off_a_terminal(mode: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    report_twice(mode)
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_bars_on_a_terminal(
    mode: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    report_twice(mode)
    out, err = capsys.readouterr()
    assert out == "" and "loading" in err and "100%" in err


def test_reports_from_many_threads_share_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    bars, start = _Bars(), _Bars._start
    starts: list[int] = []

    def slow_start(self: _Bars) -> Any:
        starts.append(1)
        time.sleep(0.01)
        return start(self)

    monkeypatch.setattr(_Bars, "_start", slow_start)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda done: bars.show("loading", done, 20), range(21)))
    bars.close()
    assert len(starts) == 1


def test_work_that_is_done_at_once_shows_no_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress(resolve({}, {})) as report:
        report("loading", 5, 5)
    assert capsys.readouterr() == ("", "")


def test_a_complaint_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    complain("two\n  lines", None)
    assert capsys.readouterr().err == "error: two lines\n"
