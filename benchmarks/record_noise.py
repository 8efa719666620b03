"""How steady is this machine? Short stretches of plain decoding, one after the other, each with its speed.

    python benchmarks/record_noise.py MODEL.gguf --minutes 3 --out benchmarks/results/noise.jsonl

Nothing changes from one stretch to the next but the machine. `judge_simulation.py` builds evaluations from the lines.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from sparkinfer.gguf import open_gguf
from sparkinfer.machine import cpu_model
from sparkinfer.models import load_target

CONTEXT = 64  # tokens before each stretch, the same every time


def record(model: Path, minutes: float, seconds: float, rest: float, threads: int) -> list[float]:
    """Tokens a second of each stretch of about `seconds`; the first ones, until it is warm, are left out."""
    target = load_target(open_gguf(model), context=1024, threads=threads)
    state = target.new_state(1024)
    target.forward(state, list(range(CONTEXT)), rows="none")
    start = state.snapshot()
    tokens = 16
    rates: list[float] = []
    end = time.perf_counter() + 60 * minutes
    warm = 5
    while time.perf_counter() < end:
        begin = time.perf_counter()
        for token in range(tokens):
            target.forward(state, [token])
        took = time.perf_counter() - begin
        state.restore(start)
        if warm:
            warm -= 1
            tokens = max(4, round(tokens * seconds / took)) if warm == 2 else tokens
            continue
        rates.append(tokens / took)
        time.sleep(rest)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a stretch")
    parser.add_argument("--rest", type=float, default=0.05, help="seconds between stretches")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--note", default="", help="what else the machine was doing")
    parser.add_argument("--out", type=Path, help="a JSONL file that a line is added to")
    arguments = parser.parse_args()
    begin = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    rates = record(
        arguments.model,
        arguments.minutes,
        arguments.seconds,
        arguments.rest,
        arguments.threads,
    )
    middle = statistics.median(rates)
    line: dict[str, Any] = {
        "benchmark": "record_noise",
        "time": begin,
        "cpu": cpu_model(),
        "model": arguments.model.name,
        "threads": arguments.threads,
        "note": arguments.note,
        "stretches": len(rates),
        "median": round(middle, 2),
        "deviation": round(statistics.stdev(rates) / middle, 4),
        "tok_s": [round(rate, 3) for rate in rates],
    }
    if arguments.out:
        with arguments.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    print({name: value for name, value in line.items() if name != "tok_s"})


if __name__ == "__main__":
    main()
