"""Progress on a terminal, on request, and nowhere else."""

import sys

import pytest

from sparkinfer.cli.console import complain, progress
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
