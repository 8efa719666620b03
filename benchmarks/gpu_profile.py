"""Where a step's time goes on a GPU: what each kernel takes alone, and what the step would take without it.

python benchmarks/gpu_profile.py MODEL.gguf --widths 1,6 --length 128 --prefill 4096

Launches overlap, so the times a profiler gives them add up to more than the step. Three figures per kernel instead,
each from a CUDA graph: `alone` replays only its launches (weights come from memory: they do not fit the cache), `saved`
is what the whole graph loses without them, `bare` replays as many launches of nothing. A prompt's launches do not
overlap: there the profiler's times stand.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_engine import numbers, tokens
from torch.profiler import ProfilerActivity, profile

from sparkinfer.backend.cuda import CudaTape, Launch
from sparkinfer.kernels.triton_overlap import await_inputs, release_next
from sparkinfer.models import Target, load_target

REPLAYS = 30


@triton.jit
def bare_kernel(x):
    release_next()
    await_inputs()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--context", type=int, default=5000)
    parser.add_argument("--length", type=numbers, default=[128])
    parser.add_argument("--widths", type=numbers, default=[1, 6])
    parser.add_argument("--prefill", type=int, default=0, help="also a prompt of this many tokens")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target = load_target(args.model, context=args.context, device="cuda")
    for length in args.length:
        for width in args.widths:
            title = f"{width} rows after {length}"
            state = target.new_state()
            step_table(title, target, step_tape(target, state, width, length), args.json)
    if args.prefill:
        prefill_table(f"prefill {args.prefill}", prefill_events(target, args.prefill), args.json)
    target.close()


def step_tape(target: Target, state: Any, width: int, length: int) -> CudaTape:
    """The tape of a width, after a step that filled its inputs. It reads `state`, which must outlive it."""
    stream = tokens(target)
    state.assume(length)
    window = [next(stream) for _ in range(width)]
    target.forward(state, window, rows="all", verify=width > 1)
    target.wait()
    return target._tape(width, "all" if width > 1 else "last")


def step_table(title: str, target: Target, tape: CudaTape, out: Path | None) -> None:
    """Microseconds by kernel, most `saved` first."""
    by_kernel: dict[str, list[Launch]] = defaultdict(list)
    for step in tape.steps:
        if isinstance(step, Launch):
            by_kernel[f"{step.kernel.fn.__name__} {step.grid}"].append(step)
    whole = seconds_of(target, tape.steps)
    rows = {}
    for name, launches in by_kernel.items():
        chosen = {id(step) for step in launches}
        rest = [step for step in tape.steps if id(step) not in chosen]
        rows[name] = (
            len(launches),
            1e6 * seconds_of(target, launches),
            1e6 * (whole - seconds_of(target, rest)),
        )
    empty = [bare(target)] * sum(count for count, _, _ in rows.values())
    print(
        f"{title}: {1e6 * whole:.0f} us, {len(empty)} launches; bare {1e6 * seconds_of(target, empty):.0f} us"
    )
    print(f"{'kernel':44s} {'launches':>8s} {'alone':>8s} {'each':>7s} {'saved':>8s} {'each':>7s}")
    for name, (count, alone, saved) in sorted(rows.items(), key=lambda item: -item[1][2]):
        print(
            f"{name:44s} {count:8d} {alone:8.0f} {alone / count:7.2f} {saved:8.0f} {saved / count:7.2f}"
        )
    if out:
        with out.open("a") as file:
            file.write(json.dumps({"title": title, "us": 1e6 * whole, "kernels": rows}) + "\n")


def bare(target: Target) -> Launch:
    options = {"num_warps": 4, "num_stages": 1, "launch_pdl": True}
    return Launch(bare_kernel, (132,), (target.backend.scratch("bare", 4),), options)


def seconds_of(target: Target, steps: list) -> float:
    """Median seconds of a replay of these steps as one graph."""
    tape = CudaTape(target.backend, steps, [], graph=True)
    tape.prepare()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for number in range(REPLAYS + 3):
        start.record()
        tape.replay()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


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


def prefill_table(title: str, events: list, out: Path | None) -> None:
    """Microseconds by kernel, most first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in events:
        entry = sums[event.name.split("(")[0][:60]]
        entry[0] += 1
        entry[1] += event.time_range.elapsed_us()
    first = min(event.time_range.start for event in events)
    last = max(event.time_range.end for event in events)
    busy = sum(total for _, total in sums.values())
    print(f"{title}: {last - first:.0f} us, kernels {busy:.0f} us")
    print(f"{'kernel':60s} {'launches':>8s} {'us':>9s} {'us each':>8s} {'share':>6s}")
    for name, (count, total) in sorted(sums.items(), key=lambda item: -item[1][1]):
        print(f"{name:60s} {count:8d} {total:9.1f} {total / count:8.2f} {total / busy:6.1%}")
    if out:
        with out.open("a") as file:
            file.write(json.dumps({"title": title, "kernels": sums}) + "\n")


if __name__ == "__main__":
    main()
