"""A sweep in the lines that scripts look for, as tables for a person, and as JSON lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sparkinfer.bench.answers import PLAIN
from sparkinfer.bench.report import environment
from sparkinfer.bench.sweep import Measured, Task
from sparkinfer.decoding import PREFILL_PATH
from sparkinfer.options import Options

if TYPE_CHECKING:
    from rich.table import Table

PARTS = ("draft", "target", "sample", "commit", "other")


def metric_lines(results: Sequence[Measured], label: str = "") -> list[str]:
    """Return one METRIC line a side; a speed without anything decoded is 0.

    `label` marks measurements that are not of a real draft.
    """
    lines = []
    for result in results:
        speed = result.speed.median if result.speed else 0.0
        if result.side.name == PLAIN:
            line = f"METRIC AR_TPS {speed:.4f}"
        else:
            depth = f"DEPTH {result.side.depth}" if result.side.depth else "PLANNER"
            mean = result.tokens_a_step or 0.0
            line = f"METRIC DFLASH_TPS {speed:.4f}   MEAN_ACCEPT {mean:.4f}   {depth}"
        lines.append(f"{line}   {label}" if label else line)
    return lines


def speed_table(results: Sequence[Measured]) -> "Table":
    """Return speed, gain, tokens a step, and the cost of a step against its parts.

    "pays from" is that cost in plain steps: a side gains once its steps give more tokens.
    """
    titles = ("tok/s", "x plain", "tokens a step", "pays from", "ms a step", *PARTS, "paths")
    grid = _grid("", *titles)
    plain = next(result for result in results if result.side.name == PLAIN).step_parts["step"]
    for result in results:
        parts = result.step_parts
        grid.add_row(
            result.side.name,
            f"{result.speed.median:.1f}" if result.speed else "",
            result.ratio.text() if result.ratio else "",
            _figure(result.tokens_a_step),
            f"{parts['step'] / plain:.2f}" if result.side.name != PLAIN else "",
            *(f"{1e3 * parts[part]:.2f}" for part in ("step", *PARTS)),
            _paths_text(result),
        )
    return grid


def domain_table(results: Sequence[Measured], tasks: Sequence[Task]) -> "Table":
    """Return gain and tokens a step of every side by domain."""
    domains = _domains(tasks)
    grid = _grid("x plain, tokens a step", *domains)
    for result in results:
        if result.side.name == PLAIN:
            continue
        cells = []
        for numbers in domains.values():
            part = result.of_tasks(numbers)
            ratio = f"{part.ratio.median:.2f}" if part.ratio else "-"
            cells.append(f"{ratio}, {_figure(part.tokens_a_step) or '-'}")
        grid.add_row(result.side.name, *cells)
    return grid


def slot_table(result: Measured, tasks: Sequence[Task]) -> "Table":
    """Return how often each slot was kept when it was judged, for all prompts and by domain."""
    count = len(result.slots)
    grid = _grid(f"slot, {result.side.name}", *(str(slot + 1) for slot in range(count)))
    for domain, numbers in {"all": range(len(tasks)), **_domains(tasks)}.items():
        slots = result.of_tasks(numbers).slots
        shares = [f"{kept / seen:.2f}" if seen else "-" for seen, kept in slots]
        grid.add_row(domain, *shares, *["-"] * (count - len(shares)))
    return grid


def planner_line(results: Sequence[Measured]) -> str | None:
    """Return how the planner did against the best fixed depth, round by round; None without either."""
    planner = next((r for r in results if r.side.name != PLAIN and not r.side.depth), None)
    best = best_fixed(results)
    if planner is None or best is None:
        return None
    share = replace(planner, plain=best.runs).ratio
    if share is None:
        return None
    widths = ", ".join(f"{width} x{count}" for width, count in planner.widths.items())
    return f"planner: {share.text()} of the best ({best.side.name}); rows chosen: {widths}"


def best_fixed(results: Sequence[Measured]) -> Measured | None:
    """Return the fastest side that is not the planner, plain decoding included."""
    fixed = [r for r in results if r.speed and (r.side.depth or r.side.name == PLAIN)]
    return max(fixed, key=lambda r: r.speed.median if r.speed else 0.0, default=None)


def json_line(
    result: Measured,
    tasks: Sequence[Task],
    facts: Mapping[str, Any],
    plan: Mapping[str, Any],
    options: Options,
) -> str:
    """Return one side as a JSON object on one line, with all that led to it.

    `facts` are merged in (the model, what is scripted). The cost table is in `planner`.
    """
    report = result.last_report
    record = {
        "test": "speculation",
        "side": result.side.name,
        "depth": result.side.depth,
        "tok_s": result.speed.to_dict() if result.speed else None,
        "ratio": result.ratio.to_dict() if result.ratio else None,
        "mean_accept": result.tokens_a_step,
        "identical": result.identical,
        "step_seconds": result.step_parts,
        "slots": result.slots,
        "widths": result.widths,
        "refusals": result.refusals,
        "paths": {name: _counts(count) for name, count in result.paths.items()},
        "domains": {
            domain: _domain(result.of_tasks(numbers)) for domain, numbers in _domains(tasks).items()
        },
        "runs": [
            {
                "task": run.task,
                "round": run.round,
                "tokens": run.tokens,
                "seconds": round(run.seconds, 6),
            }
            for run in result.runs
        ],
        "planner": dict(report.planner) if report else None,
        "why": report.why if report else None,
        "gap_rows": report.gap_rows if report else 0,
        **facts,
        "plan": dict(plan),
        "options": options.block(),
        "environment": environment(),
    }
    return json.dumps(record, default=str)


def _domain(result: Measured) -> dict[str, Any]:
    return {
        "ratio": result.ratio.to_dict() if result.ratio else None,
        "mean_accept": result.tokens_a_step,
        "slots": result.slots,
    }


def _domains(tasks: Sequence[Task]) -> dict[str, list[int]]:
    """Numbers of the prompts of each domain, in the order of their first prompts."""
    numbers: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        numbers.setdefault(task.domain, []).append(number)
    return numbers


def _counts(count: Any) -> dict[str, int]:
    return asdict(count)


def _paths_text(result: Measured) -> str:
    """Steps by path, the prompt's own token left out."""
    counts = {name: count.steps for name, count in result.paths.items() if name != PREFILL_PATH}
    return ", ".join(f"{name} x{steps}" for name, steps in counts.items())


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _grid(*columns: str) -> "Table":
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        left = index == 0 or column == "paths"
        grid.add_column(column, justify="left" if left else "right")
    return grid
