"""StopScanner: the outcome depends on the text, never on how it was cut into pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkinfer.engine.stop import StopScanner


def by_definition(text, stops):
    """The first stop string to end, the longest at that character; what stands before it."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


def scan(pieces, stops):
    scanner = StopScanner(stops)
    out = [scanner.push(piece) for piece in pieces]
    return out, scanner.flush(), scanner.match


letters = st.text("abé", max_size=40)


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.text("abé", max_size=4), max_size=12),
    st.lists(st.text("abé", min_size=1, max_size=5), max_size=4),
)
def test_any_cutting_gives_what_the_whole_text_gives(pieces, stops):
    text = "".join(pieces)
    expected, match = by_definition(text, stops)
    out, tail, found = scan(pieces, stops)
    assert ("".join(out) + tail, found) == (expected, match)
    out, tail, found = scan(list(text), stops)
    assert ("".join(out) + tail, found) == (expected, match)


@settings(max_examples=300, deadline=None)
@given(letters, st.lists(st.text("abé", min_size=1, max_size=5), max_size=4))
def test_no_more_is_held_back_than_a_stop_string_may_need(text, stops):
    scanner, shown = StopScanner(stops), ""
    for end, character in enumerate(text, 1):
        shown += scanner.push(character)
        if scanner.match is not None:
            break
        held = text[len(shown) : end]
        assert shown + held == text[:end]
        starts = [stop for stop in stops if held and stop.startswith(held)]
        assert not held or starts, f"{held!r} begins no stop string"
        longest = max(
            (n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n]) and n),
            default=0,
        )
        assert len(held) == longest


def test_nothing_comes_after_a_match():
    scanner = StopScanner(["STOP"])
    assert scanner.push("abcST") == "abc"
    assert scanner.push("OPdef") == ""
    assert scanner.match == "STOP"
    assert scanner.push("more") == "" and scanner.flush() == ""


def test_a_false_start_is_released_as_it_was():
    scanner = StopScanner(["aab"])
    assert [scanner.push(c) for c in "aaaab"] == ["", "", "a", "a", ""]
    assert scanner.match == "aab"


@pytest.mark.parametrize(
    ("text", "stops", "expected", "match"),
    [
        ("xabcdef", ["abcdef", "cd"], "xab", "cd"),  # the first to end, not the first to begin
        ("xabc", ["bc", "abc"], "x", "abc"),  # both end here: the longest
        ("x\r\n\ny", ["\n\n", "\n"], "x\r", "\n"),
        ("caf\u00e9", ["\u00e9"], "caf", "\u00e9"),
        ("cafe\u0301", ["\u00e9"], "cafe\u0301", None),  # other bytes: no match
        ("a\U0001f600b", ["\U0001f600"], "a", "\U0001f600"),
        ("abc", [], "abc", None),
    ],
)
def test_cases(text, stops, expected, match):
    out, tail, found = scan([text], stops)
    assert ("".join(out) + tail, found) == (expected, match)
