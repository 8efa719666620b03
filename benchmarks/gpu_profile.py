"""Where a step's time goes on a GPU: time of every kernel in the graph of a width, and what is between them.

python benchmarks/gpu_profile.py MODEL.gguf --widths 1,6 --length 128
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from gpu_engine import numbers, tokens
from torch.profiler import ProfilerActivity, profile

from sparkinfer.models import Target, load_target

STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--context", type=int, default=5000)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--widths", type=numbers, default=[1, 6])
    parser.add_argument("--prefill", type=int, default=0, help="also a prompt of this many tokens")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target = load_target(args.model, context=args.context, device="cuda")
    for width in args.widths:
        table(f"{width} rows", step_events(target, width, args.length), STEPS, args.json)
    if args.prefill:
        table(f"prefill {args.prefill}", prefill_events(target, args.prefill), 1, args.json)
    target.close()


def step_events(target: Target, width: int, length: int) -> list:
    state, stream = target.new_state(), tokens(target)
    state.assume(length)

    def step() -> None:
        window = [next(stream) for _ in range(width)]
        target.forward(state, window, rows="all", verify=width > 1)
        if width > 1:
            state.commit(0)
        target.wait()

    for _ in range(5):
        step()
    return recorded(lambda: [step() for _ in range(STEPS)])


def prefill_events(target: Target, count: int) -> list:
    stream = tokens(target)
    prompt = [next(stream) for _ in range(count)]
    target.prefill(target.new_state(), prompt)
    state = target.new_state()
    return recorded(lambda: (target.prefill(state, prompt), target.wait()))


def recorded(run) -> list:
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return [
        event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def table(title: str, events: list, steps: int, out: Path | None) -> None:
    """Microseconds of a step by kernel, most first; `between` is what no kernel ran in."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in events:
        entry = sums[event.name.split("(")[0][:60]]
        entry[0] += 1
        entry[1] += event.time_range.elapsed_us()
    first = min(event.time_range.start for event in events)
    last = max(event.time_range.end for event in events)
    busy = sum(total for _, total in sums.values())
    print(f"{title}: {(last - first) / steps:.0f} us a step, kernels {busy / steps:.0f} us")
    print(f"{'kernel':60s} {'launches':>8s} {'us':>9s} {'us each':>8s} {'share':>6s}")
    for name, (count, total) in sorted(sums.items(), key=lambda item: -item[1][1]):
        each = total / count
        print(
            f"{name:60s} {count / steps:8.1f} {total / steps:9.1f} {each:8.2f} {total / busy:6.1%}"
        )
    if out:
        rows = {name: (count / steps, total / steps) for name, (count, total) in sums.items()}
        with out.open("a") as file:
            file.write(json.dumps({"title": title, "kernels": rows}) + "\n")


if __name__ == "__main__":
    main()
