"""From rounds to medians, same-round ratios and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Round = Mapping[str, Mapping[str, float]]  # label -> measure -> value of that round


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def add_costs(values: dict[str, float]) -> None:
    """Add cost(n)/cost(1) of one round of one side, from its `rows<n>_ms`."""
    if "rows1_ms" not in values:
        return
    for name in [name for name in values if name.startswith("rows") and name.endswith("_ms")]:
        n = name.removeprefix("rows").removesuffix("_ms")
        if n != "1":
            values[f"cost{n}"] = values[name] / values["rows1_ms"]


def speedup(measure: str, ours: float, theirs: float) -> float:
    """How many times faster ours is: rates divide one way, times the other."""
    return theirs / ours if measure.endswith("_ms") else ours / theirs


def summarise(rounds: Sequence[Round], ours: str) -> dict[str, Any]:
    """Per side and measure the spread over rounds; per peer the spread of same-round ratios."""
    labels = list(rounds[0])
    measures = list(rounds[0][ours])
    sides = {
        label: {
            name: spread([turn[label][name] for turn in rounds])
            for name in measures
            if name in rounds[0][label]
        }
        for label in labels
    }
    ratios = {
        label: {
            name: spread([speedup(name, turn[ours][name], turn[label][name]) for turn in rounds])
            for name in sides[label]
            if not name.startswith(("cost", "read_"))
        }
        for label in labels
        if label != ours
    }
    return {"sides": sides, "ratios": ratios}


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def table(summary: Mapping[str, Any], ours: str) -> str:
    """Plain text: one measure a line, medians of each side, ratio median (least to greatest)."""
    sides, ratios = summary["sides"], summary["ratios"]
    peers = [label for label in sides if label != ours]
    head = ["measure", ours]
    for peer in peers:
        head += [peer, f"{ours}/{peer}"]
    lines = [head]
    for name in sides[ours]:
        line = [name, _number(sides[ours][name]["median"])]
        for peer in peers:
            value = sides[peer].get(name)
            ratio = ratios[peer].get(name)
            line.append(_number(value["median"]) if value else "")
            line.append(
                f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f})"
                if ratio
                else ""
            )
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
