"""Charts as SVG text that stands inside a page: colours are the page's CSS variables, hover texts are `<title>`s.

All sizes are in pixels of the view box; a chart is as wide as its place, at most its own width.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from sparkinfer.evaluation.report_facts import clean

WIDTH = 880
PART_CLASSES = ("p1", "p2", "p3", "p4", "p5", "p6")


def element(tag: str, content: str = "", /, **attributes: object) -> str:
    """Return an element; attribute values are cleaned and escaped, `content` is markup already."""
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{shown(_number(value))}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{named}>{content}</{tag}>"


def shown(words: str) -> str:
    """Return plain text, which may come from outside, as markup that shows exactly it."""
    return escape(clean(words))


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "start") -> str:
    return element("text", shown(words), x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def rect(
    x: float, y: float, width: float, height: float, class_: str, title: str = "", radius: float = 0
) -> str:
    inner = element("title", shown(title)) if title else ""
    width, height = max(width, 0.0), max(height, 0.0)
    return element("rect", inner, x=x, y=y, width=width, height=height, rx=radius, class_=class_)


def dot(x: float, y: float, class_: str, title: str, radius: float = 4.5) -> str:
    return element("circle", element("title", shown(title)), cx=x, cy=y, r=radius, class_=class_)


def picture(parts: Sequence[str], height: float, label: str, width: float = WIDTH) -> str:
    """Return the chart with its name for screen readers."""
    return element(
        "svg",
        element("title", shown(label)) + "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_number(float(width))} {_number(float(height))}",
        style=f"max-width:{_number(float(width))}px",
        role="img",
        aria_label=label,
    )


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear scale from values [low, high] to pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int = 8) -> list[float]:
        """Return round values inside the axis, 1, 2 or 5 times a power of ten apart."""
        rough = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * f for f in (1, 2, 5, 10) if power * f >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def axis_over(values: Sequence[float], start: float, end: float, *, least: float = 0.0) -> Axis:
    """Return an axis that shows all `values` with a margin, and at least `least` to both sides of zero where given."""
    inside = [*values, *([-least, least] if least else [])]
    low, high = min(inside), max(inside)
    margin = 0.06 * (high - low) or 0.02 * abs(high) or 0.5
    return Axis(low - margin, high + margin, start, end)


def _margin(names: Iterable[str]) -> float:
    """Return the room that the names of rows need, 12 px type; at most a third of the chart."""
    return min(24 + 6.9 * max(map(len, names), default=0), WIDTH / 3)


def signed(value: float, digits: int = 1) -> str:
    """Return a percentage with its sign and a true minus."""
    rounded = f"{value:+.{digits}f}"
    # What rounds to nothing has no sign.
    told = rounded[1:] if float(rounded) == 0 else rounded
    return told.replace("-", "\u2212") + " %"


def _tick_text(value: float) -> str:
    return f"{value:g}".replace("-", "\u2212")


def paired(
    values: Sequence[tuple[int, float]],
    used: int,
    point: float,
    interval: tuple[float, float] | None,
    delta: float,
    label: str,
) -> str:
    """Draw one dot a block (its number, candidate against base in per cent), the estimate's interval and +-delta.

    Blocks after the first `used` are hollow: the estimate does not rest on them.
    """
    left, right, top, bottom = 52.0, WIDTH - 150.0, 12.0, 172.0
    spread = [*(value for _, value in values), point, *(interval or ())]
    y = axis_over(spread, bottom, top, least=1.5 * delta)
    x = Axis(-0.5, len(values) - 0.5, left, right)
    parts = [rect(left, y(delta), right - left, y(-delta) - y(delta), "band")]
    for tick in y.ticks():
        parts.append(line(left, y(tick), right, y(tick), "grid"))
        parts.append(text(left - 8, y(tick) + 4, _tick_text(tick), "tick", "end"))
    parts.append(line(left, y(0), right, y(0), "zero"))
    if interval is not None:
        low, high = interval
        parts.append(rect(left, y(high), right - left, y(low) - y(high), "interval"))
        told = f"{signed(low)} to {signed(high)}".replace(" % to", " to")
        parts.append(text(right + 10, y(point) + 20, told, "tick"))
    parts.append(line(left, y(point), right, y(point), "estimate"))
    parts.append(text(right + 10, y(point) + 4, signed(point), "value"))
    every = max(1, math.ceil(len(values) / 12))
    for place, (block, value) in enumerate(values):
        unused = "" if place < used else ", not used"
        kind = "candidate" if place < used else "candidate hollow"
        parts.append(dot(x(place), y(value), kind, f"block {block}: {signed(value, 2)}{unused}"))
        if place % every == 0:
            parts.append(text(x(place), bottom + 18, str(block), "tick", "middle"))
    parts.append(text(left, bottom + 36, "block, in the order of the run", "tick"))
    return picture(parts, bottom + 46, label)


@dataclass(frozen=True, slots=True)
class Interval:
    """A row of `forest`, per cent; `state` is a CSS class and a word: better, worse, same, unclear."""

    name: str
    point: float
    ends: tuple[float, float] | None
    state: str


def forest(rows: Sequence[Interval], delta: float, bar: float | None, label: str) -> str:
    """Draw a point with its interval for each row; `bar` (per cent, negative) is the guards' lower limit."""
    left, right, step, top = _margin(row.name for row in rows), WIDTH - 170.0, 26.0, 10.0
    bottom = top + step * len(rows)
    limits = [value for row in rows for value in (row.point, *(row.ends or ()))]
    x = axis_over([*limits, *([bar] if bar is not None else [])], left, right, least=1.5 * delta)
    parts = [rect(x(-delta), top, x(delta) - x(-delta), bottom - top, "band")]
    for tick in x.ticks():
        parts.append(line(x(tick), top, x(tick), bottom, "grid"))
        parts.append(text(x(tick), bottom + 16, _tick_text(tick), "tick", "middle"))
    parts.append(line(x(0), top, x(0), bottom, "zero"))
    if bar is not None:
        parts.append(line(x(bar), top, x(bar), bottom, "bar"))
    for index, row in enumerate(rows):
        y = top + step * (index + 0.5)
        ends = ", ".join(map(signed, row.ends)) if row.ends else "no interval"
        told = f"{signed(row.point)} [{ends}]".replace(" %", "")
        parts.append(text(left - 10, y + 4, row.name, "name", "end"))
        if row.ends:
            parts.append(line(x(row.ends[0]), y, x(row.ends[1]), y, f"whisker {row.state}"))
        parts.append(dot(x(row.point), y, row.state, f"{row.name}: {told} % ({row.state})"))
        parts.append(text(right + 12, y + 4, told, "value"))
    parts.append(text(left, bottom + 34, "per cent, candidate against base", "tick"))
    return picture(parts, bottom + 44, label)


def stacked(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    unit: str,
    label: str,
    *,
    digits: int = 2,
    total: bool = True,
) -> str:
    """Draw one bar for each row, cut into its parts; a part has one colour in all rows. `total`: write the sum."""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    totals = [sum(parts.values()) for _, parts in rows]
    left, right, step, top = _margin(name for name, _ in rows), WIDTH - 90.0, 34.0, 30.0
    bottom = top + step * len(rows)
    x = Axis(0.0, max([*totals, 1e-9]) * 1.001, left, right)
    out = _legend(names, left)
    for index, ((name, parts), whole) in enumerate(zip(rows, totals, strict=True)):
        y = top + step * index + 5
        out.append(text(left - 10, y + 16, name, "name", "end"))
        at = 0.0
        for part in (known for known in names if known in parts):
            value = parts[part]
            class_ = PART_CLASSES[names.index(part) % len(PART_CLASSES)]
            title = f"{name}, {part}: {value:.{digits}f} {unit}"
            # A gap of two pixels keeps neighbours apart without an outline.
            out.append(rect(x(at) + 1, y, x(at + value) - x(at) - 2, step - 10, class_, title, 2))
            told = f"{value:.{digits}f}"
            if x(at + value) - x(at) > 8 * len(told) + 8:
                middle = (x(at) + x(at + value)) / 2
                out.append(text(middle, y + 16, told, "inside", "middle"))
            at += value
        if total:
            out.append(text(x(whole) + 8, y + 16, f"{whole:.{digits}f} {unit}", "value"))
    return picture(out, bottom + 8, label)


def _legend(names: Sequence[str], left: float) -> list[str]:
    out, x = [], left
    for index, name in enumerate(clean(name, 24) for name in names):
        out.append(rect(x, 6, 12, 12, PART_CLASSES[index % len(PART_CLASSES)], radius=2))
        out.append(text(x + 17, 16, name, "tick"))
        x += 17 + 7 * len(name) + 18
    return out


def sides(rows: Sequence[tuple[str, str, Sequence[float]]], unit: str, label: str) -> str:
    """Draw a row for each (side, name, values): one dot a run, the mean as a stroke with its value."""
    left, right, step, top = _margin(name for _, name, _ in rows), WIDTH - 110.0, 30.0, 8.0
    bottom = top + step * len(rows)
    x = axis_over([value for _, _, values in rows for value in values], left, right)
    out = []
    for tick in x.ticks():
        out.append(line(x(tick), top, x(tick), bottom, "grid"))
        out.append(text(x(tick), bottom + 16, _tick_text(tick), "tick", "middle"))
    for index, (side, name, values) in enumerate(rows):
        y = top + step * (index + 0.5)
        out.append(text(left - 10, y + 4, name, "name", "end"))
        for run, value in enumerate(values, 1):
            title = f"{name}, run {run}: {value:.3f} {unit}".rstrip()
            out.append(dot(x(value), y, f"{side} faint", title))
        mean = sum(values) / len(values)
        out.append(line(x(mean), y - 10, x(mean), y + 10, f"mean {side}"))
        out.append(text(right + 12, y + 4, f"{mean:.3f} {unit}".rstrip(), "value"))
    return picture(out, bottom + 24, label)
