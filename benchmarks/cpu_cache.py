"""Formats of keys and values on the CPU beside each other: time of a run of rows at long contexts, in turns.

    python benchmarks/cpu_cache.py MODEL --lengths 128 4096 16384 --rows 1 6 --threads 2

Prints milliseconds (medians) for each format, and the median ratio of a turn's times to those of the first format.
"""

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkinfer.models import Target, load_target
from sparkinfer.state import Sequence


def timed(target: Target, state: Sequence, rows: int) -> float:
    started = time.perf_counter()
    target.forward(state, [1] * rows, rows="last", verify=True)
    target.wait()
    return 1e3 * (time.perf_counter() - started)


def measure(
    targets: dict[str, Target], length: int, rows: int, turns: int, seconds: float
) -> dict[str, Any]:
    """Milliseconds by format, and ratios to the first: of turns, so that what disturbs one disturbs all."""
    states = {name: target.new_state() for name, target in targets.items()}
    for name, state in states.items():
        state.assume(length)
        timed(targets[name], state, rows)
    times: dict[str, list[float]] = {name: [] for name in targets}
    end = time.monotonic() + seconds
    for turn in range(turns):
        order = list(targets) if turn % 2 else list(targets)[::-1]
        for name in order:
            times[name].append(timed(targets[name], states[name], rows))
        if time.monotonic() > end:
            break
    first = next(iter(times))
    ratios = {
        name: statistics.median(a / b for a, b in zip(found, times[first], strict=True))
        for name, found in times.items()
    }
    return {
        "length": length,
        "rows": rows,
        "turns": len(times[first]),
        "ms": {name: round(statistics.median(found), 3) for name, found in times.items()},
        "ratio": {name: round(ratio, 4) for name, ratio in ratios.items()},
        "cache_MB": {
            name: round(target.state_shape.kv.n_bytes(length) / 1e6, 1)
            for name, target in targets.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--formats", nargs="+", default=["f16", "q8_0"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 4096, 16384])
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=12.0, help="for each length and rows")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON")
    args = parser.parse_args()
    targets = {
        name: load_target(
            args.model, context=max(args.lengths) + max(args.rows), threads=args.threads,
            kv_cache=name, isa=args.isa, device="cpu",
        )
        for name in args.formats
    }  # fmt: skip
    found = []
    for length in args.lengths:
        for rows in args.rows:
            line = measure(targets, length, rows, args.turns, args.seconds)
            found.append(line)
            print(json.dumps(line), flush=True)
    if args.out:
        record = {
            "benchmark": "cpu_cache",
            "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "model": args.model.name,
            "threads": args.threads,
            "plan": {name: dict(target.plan) for name, target in targets.items()},
            "found": found,
        }
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
