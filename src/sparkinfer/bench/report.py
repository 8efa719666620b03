"""Measurements as a table for a person and as JSON lines that carry all that led to them."""

import json
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from sparkinfer import machine
from sparkinfer.bench.measure import Measurement
from sparkinfer.options import Options

if TYPE_CHECKING:
    from rich.table import Table


def environment() -> dict[str, Any]:
    """Return the machine and software facts of a record; the load is of the minute before."""
    packages = ("numpy", "numba", "llvmlite")
    return {
        "cpu": machine.cpu_model(),
        "cores": machine.allowed_cores(),
        "memory_bytes": machine.memory_total(),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {
            "sparkinfer": machine.own_version(),
            **{name: version(name) for name in packages},
        },
    }


def json_line(
    result: Measurement, model: Mapping[str, Any], plan: Mapping[str, Any], options: Options
) -> str:
    """Return one measurement as a JSON object on one line: rates in tokens per second."""
    work = result.workload
    return json.dumps(
        {
            "test": work.name,
            "kind": work.kind,
            "tokens": work.tokens,
            "depth": work.depth,
            "mean": round(result.mean, 3),
            "sd": round(result.deviation, 3),
            "median": round(result.median, 3),
            "cost": None if result.cost is None else round(result.cost, 4),
            "seconds": [round(seconds, 6) for seconds in result.seconds],
            "model": dict(model),
            "plan": dict(plan),
            "options": options.block(),
            "environment": environment(),
        },
        default=str,
    )


def table(results: Iterable[Measurement]) -> "Table":
    """Return the table: rates (mean, standard deviation, median) and a window's relative cost."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    grid.add_column("test")
    for title in ("tok/s, mean ± sd", "median", "ms a call", "cost(n)/cost(1)"):
        grid.add_column(title, justify="right")
    for result in results:
        rate = f"{result.mean:,.1f} ± {result.deviation:,.1f}"
        milliseconds = f"{1e3 * result.workload.tokens_a_call / result.median:,.2f}"
        cost = "" if result.cost is None else f"{result.cost:.2f}"
        grid.add_row(result.workload.name, rate, f"{result.median:,.1f}", milliseconds, cost)
    return grid
