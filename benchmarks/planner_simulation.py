"""The planner against plain decoding and the best width in hindsight, on synthetic acceptance with a simulated clock.

    python benchmarks/planner_simulation.py --out benchmarks/results/planner_simulation.jsonl

No model runs and no time is measured: costs are tables, acceptance is drawn from profiles (tests/planner_simulator.py).
Regret is the planner's time over that of the best single width on the same draws, width 1 included, chosen
afterwards for each request; it can be negative where the best width changes within a request.

The second table is about windows cut by what the draft claims, on text where some positions are easy and others are
not: time of a planner whose draft claims nothing over that of one whose draft knows itself, and of one that lies.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from planner_simulator import (
    DRAFTS,
    LIARS,
    PROFILES,
    UNEVEN,
    VERIFY,
    Claims,
    cases,
    mean_regret,
    simulate,
)


def line(verify: str, draft: float, profile: str, tokens: int, seeds: int) -> dict[str, object]:
    outcomes = [
        simulate(PROFILES[profile], VERIFY[verify], draft, seed, tokens) for seed in range(seeds)
    ]
    return {
        "simulated": True,
        "verify": verify,
        "draft": draft,
        "acceptance": profile,
        "tokens": tokens,
        "requests": seeds,
        "best_width": statistics.mode(o.best_width for o in outcomes),
        "speed_up": round(sum(o.tokens for o in outcomes) / sum(o.time for o in outcomes), 4),
        "regret": round(mean_regret(outcomes), 5),
        "worst_regret": round(max(o.regret for o in outcomes), 5),
        "slowest_over_plain": round(max(o.over_plain for o in outcomes), 5),
    }


def claims_line(
    verify: str, draft: float, profile: str, tokens: int, seeds: int
) -> dict[str, object]:
    """Times of a planner whose draft tells nothing, the truth, and lies, on the same draws."""
    rates = UNEVEN[profile]

    def time(claims: Claims | None) -> float:
        found = [
            simulate(rates, VERIFY[verify], draft, seed, tokens, claims) for seed in range(seeds)
        ]
        return sum(o.time for o in found)

    silent = time(None)
    return {
        "simulated": True,
        "verify": verify,
        "draft": draft,
        "acceptance": profile,
        "tokens": tokens,
        "requests": seeds,
        "speed_up": round(seeds * tokens / silent, 4),
        "honest": round(silent / time(rates), 4),
        "liars": {name: round(silent / time(liar), 4) for name, liar in LIARS.items()},
    }


def claims_table(tokens: int, seeds: int) -> list[dict[str, object]]:
    """Print the second table; its lines."""
    lines = []
    print(f"{'verify':7}{'draft':>6}  {'acceptance':24}{'silent':>7}{'honest':>8}  liars")
    for verify, draft, profile in itertools.product(VERIFY, DRAFTS, UNEVEN):
        row = claims_line(verify, draft, profile, tokens, seeds)
        lines.append(row)
        print(
            f"{verify:7}{draft:6.1f}  {profile:24}{row['speed_up']:7.2f}{row['honest']:8.3f}  {row['liars']}",
            flush=True,
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of a request")
    parser.add_argument("--seeds", type=int, default=20, help="requests of each case")
    parser.add_argument("--out", type=Path, help="where the lines go")
    arguments = parser.parse_args()
    lines = []
    print("simulated clock; times against the best width in hindsight and against plain decoding")
    print(
        f"{'verify':7}{'draft':>6}  {'acceptance':24}{'best':>5}{'speed':>7}"
        f"{'regret':>9}{'worst':>8}{'slowest':>9}"
    )
    for verify, draft, profile in cases():
        row = line(verify, draft, profile, arguments.tokens, arguments.seeds)
        lines.append(row)
        print(
            f"{verify:7}{draft:6.1f}  {profile:24}{row['best_width']:5}{row['speed_up']:7.2f}"
            f"{row['regret']:9.2%}{row['worst_regret']:8.1%}{row['slowest_over_plain']:9.3f}",
            flush=True,
        )
    regrets = sorted(float(str(row["regret"])) for row in lines)
    slowest = max(float(str(row["slowest_over_plain"])) for row in lines)
    print(
        f"mean regret {statistics.fmean(regrets):.2%}, worst {regrets[-1]:.2%},"
        f" above 3 % in {sum(r > 0.03 for r in regrets)} of {len(regrets)}; slowest {slowest:.4f} of plain"
    )
    lines += claims_table(arguments.tokens, arguments.seeds)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in lines))


if __name__ == "__main__":
    main()
