"""The judge judged: how often does it see a change where there is none, and how often a change that is there?

    python benchmarks/judge_simulation.py --out benchmarks/results/judge_simulation.jsonl

No model runs. Machines are simulated (tests/judge_simulator.py) or replay recorded speeds: `results/noise.jsonl`
(record_noise.py), and the runs of `results/speculation.jsonl` with each prompt's own speed taken out. Evaluations of
two builds that are the same, or differ by a known factor, go through `judge` as records. Parts:

- same: verdicts on `--evaluations` evaluations without any change; the original's rule on the same machines.
- looks: the same at the level of blocks, `--blocks` times, for a closer look at the rate of false alarms.
- found: shares of slow-downs and gains that are found, and what `stats.power` predicts from the noise; a fifth of
  the evaluations for each.
- coverage: how often each kind of 95 % interval holds the truth, by number of blocks.
- mirror: verdicts when the sides are exchanged.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from judge_simulator import (
    FOUND,
    MACHINES,
    SCOPE,
    Machine,
    contrasts,
    found_at_looks,
    original_rule,
    recorded,
    shares,
    simulate,
    swapped,
)

from sparkinfer.evaluation.sequential import plan_looks
from sparkinfer.evaluation.stats import SignFlip, bca_interval, power, student_interval
from sparkinfer.evaluation.verdict import judge

RESULTS = Path(__file__).parent / "results"
EFFECTS = (0.97, 0.99, 1.01, 1.03)
MIRROR = {"BETTER": "WORSE", "WORSE": "BETTER"}
Line = dict[str, Any]


def recordings(noise: Path, speculation: Path) -> dict[str, Machine]:
    """Machines that replay what was recorded."""
    found: dict[str, Machine] = {}
    if noise.exists():
        for text in noise.read_text().splitlines():
            line = json.loads(text)
            name = f"recorded {line['time'][11:16]}, sd {line['deviation']:.1%}"
            found[name] = recorded(line["tok_s"])
    if speculation.exists():
        found["recorded bench --spec"] = recorded(_residual_rates(speculation))
    return found


def _residual_rates(path: Path) -> list[float]:
    """Speeds of the runs of a sweep over their prompt's mean, in order; side by side.

    Two runs a prompt: their deviation from their own mean is smaller by the root of two than that of a run.
    """
    rates = []
    for text in path.read_text().splitlines():
        runs = json.loads(text)["runs"]
        logs = [math.log(run["tokens"] / run["seconds"]) for run in runs]
        tasks = [run["task"] for run in runs]
        for log, task in zip(logs, tasks, strict=True):
            mine = [other for other, name in zip(logs, tasks, strict=True) if name == task]
            rates.append(math.exp(math.sqrt(2) * (log - sum(mine) / len(mine))))
    return rates


def same(machines: dict[str, Machine], evaluations: int) -> Iterator[Line]:
    for number, (name, machine) in enumerate(machines.items()):
        seeds = range(number * evaluations, (number + 1) * evaluations)  # no coins in common
        judged = [judge(simulate(machine, seed)) for seed in seeds]
        verdicts = [judgement.verdict for judgement in judged]
        tiers = [j.label not in (None, "eval-dflash:none") for j in judged]
        original = original_rule(machine, 20 * evaluations)
        yield {
            "part": "same",
            "machine": name,
            "evaluations": evaluations,
            "false_alarms": round(sum(verdict in FOUND for verdict in verdicts) / evaluations, 4),
            "wrong_labels": round(sum(tiers) / evaluations, 4),
            "verdicts": shares(verdicts),
            "original_wins_one_context": round(original.wins_one, 4),
            "original_wins_best_of_five": round(original.wins_best, 4),
            "original_rejects": round(original.rejected, 4),
        }


def looks(machines: dict[str, Machine], count: int) -> Iterator[Line]:
    for declared in ((8,), (8, 12), (8, 12, 16)):
        levels = plan_looks(declared, 0.05)
        for name, machine in machines.items():
            ratios = contrasts(machine, count, declared[-1], seed=len(declared))
            yield {
                "part": "looks",
                "machine": name,
                "looks": list(declared),
                "levels": [round(look.alpha, 4) for look in levels],
                "evaluations": count,
                "false_alarms": round(float(found_at_looks(ratios, levels).mean()), 4),
            }


def found(machines: dict[str, Machine], evaluations: int) -> Iterator[Line]:
    """One look after 12 blocks, so that the prediction is for exactly what was done."""
    single = replace(SCOPE, looks=(12,))
    level = plan_looks(single.looks, single.alpha)[0].alpha
    for name, machine in machines.items():
        spread = float(np.sqrt((contrasts(machine, 2000, 12, seed=9) ** 2).mean()))
        for effect in EFFECTS:
            wanted = "BETTER" if effect > 1 else "WORSE"
            verdicts = [
                judge(simulate(machine, seed, effect=effect, scope_of=single)).verdict
                for seed in range(evaluations)
            ]
            yield {
                "part": "found",
                "machine": name,
                "effect": effect,
                "evaluations": evaluations,
                "block_deviation": round(spread, 5),
                "predicted": round(power(math.log(effect), spread, 12, level), 3),
                "found": verdicts.count(wanted) / evaluations,
                "wrong_way": verdicts.count(MIRROR[wanted]) / evaluations,
                "verdicts": shares(verdicts),
            }


def coverage(machines: dict[str, Machine], count: int) -> Iterator[Line]:
    for name, machine in machines.items():
        for blocks in (6, 8, 12, 16):
            ratios = contrasts(machine, count, blocks, seed=blocks)
            holds = {"sign flip": 0, "t": 0, "bca": 0}
            for row in ratios:
                intervals = {
                    "sign flip": SignFlip.of(row).interval(0.05),
                    "t": student_interval(row),
                    "bca": bca_interval(row, resamples=1000),
                }
                for kind, interval in intervals.items():
                    assert interval is not None
                    holds[kind] += interval[0] <= 0 <= interval[1]
            yield {
                "part": "coverage",
                "machine": name,
                "blocks": blocks,
                "evaluations": count,
                **{kind: round(number / count, 4) for kind, number in holds.items()},
            }


def mirror(machines: dict[str, Machine], evaluations: int) -> Iterator[Line]:
    for name, machine in machines.items():
        wrong = 0
        for seed in range(evaluations):
            # Guards watch the candidate alone, so that they are no part of a mirror.
            plain = replace(SCOPE, guards=())
            record = simulate(machine, seed, effect=1 + 0.02 * (seed % 5 - 2), scope_of=plain)
            verdict, other = judge(record).verdict, judge(swapped(record)).verdict
            wrong += other != MIRROR.get(verdict, verdict)
        yield {"part": "mirror", "machine": name, "evaluations": evaluations, "not_mirrored": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=4000, help="repetitions without records")
    parser.add_argument("--noise", type=Path, default=RESULTS / "noise.jsonl")
    parser.add_argument("--speculation", type=Path, default=RESULTS / "speculation.jsonl")
    parser.add_argument("--parts", default="same,looks,found,coverage,mirror")
    parser.add_argument("--out", type=Path, help="a JSONL file that the lines are added to")
    arguments = parser.parse_args()
    machines = MACHINES | recordings(arguments.noise, arguments.speculation)
    parts = {
        "same": (same, arguments.evaluations),
        "looks": (looks, arguments.blocks),
        "found": (found, arguments.evaluations // 5),
        "coverage": (coverage, arguments.blocks // 8),
        "mirror": (mirror, arguments.evaluations // 10),
    }
    lines = []
    for name in arguments.parts.split(","):
        part, count = parts[name]
        for line in part(machines, count):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if arguments.out:
        with arguments.out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
