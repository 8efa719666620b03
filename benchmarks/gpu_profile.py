"""Where a step's time goes on a GPU: what each kernel takes alone, and what the step would take without it.

python benchmarks/gpu_profile.py MODEL.gguf --widths 1,6 --length 128 --prefill 4096
python benchmarks/gpu_profile.py MODEL.gguf --widths 6 --draft DRAFT --depth 5

Launches overlap, so the times a profiler gives them add up to more than the step. Three figures per kernel instead,
each from a CUDA graph: `alone` replays only its launches (weights come from memory: they do not fit the cache), `saved`
is what the whole graph loses without them, `bare` replays as many launches of nothing. A prompt's launches run in two
lanes: there the profiler's times stand, which add up to more than the whole. With a draft: its tapes, the commit's, and
the wall time of a step's parts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_engine import numbers, tokens
from torch.profiler import ProfilerActivity, profile

from sparkinfer.backend.cuda import CudaTape, Launch
from sparkinfer.dflash.draft import BlockDraft, load_draft
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
    parser.add_argument(
        "--draft", type=Path, help="also the parts of a DFlash step with this draft"
    )
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--block", choices=("trained", "depth"), default="trained")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target = load_target(args.model, context=args.context, device="cuda")
    for length in args.length:
        for width in args.widths:
            title = f"{width} rows after {length}"
            state = target.new_state()
            step_table(title, target, step_tape(target, state, width, length), args.json)
    if args.draft:
        draft = load_draft(args.draft, target, shorten=args.block == "depth")
        for length in args.length:
            draft_tables(target, draft, length, args.depth, args.json)
            host_table(target, draft, length, args.depth, args.json)
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


def draft_tables(
    target: Target, draft: BlockDraft, length: int, depth: int, out: Path | None
) -> None:
    """The tapes that a DFlash step replays beside the target's."""
    rows = draft._block_rows(depth)
    draft.assume(length)
    draft.propose(1, depth)
    title = f"draft's block, depth {depth} ({rows} rows) after {length}"
    step_table(title, target, draft.tapes.block(rows, draft._first, depth), out)
    title = f"draft's context, {depth + 1} rows after {length}"
    step_table(title, target, draft.tapes.context(depth + 1), out)
    if target.state_shape.recurrent is not None:
        state = target.new_state()
        state.assume(length)
        target.forward(state, [1] * (depth + 1), rows="all", verify=True)
        state.commit(depth + 1)
        step_table(f"commit of {depth + 1} rows", target, target._commit_tape(), out)


def host_table(
    target: Target, draft: BlockDraft, length: int, depth: int, out: Path | None
) -> None:
    """Median microseconds of a step's parts as the loop calls them: until they return, and until the device is done."""
    state, stream = target.new_state(), tokens(target, 5)
    state.assume(length)
    draft.assume(length)
    target.set_taps(draft.taps)
    window = [next(stream) for _ in range(depth + 1)]

    parts: dict[str, Callable[[], Any]] = {
        "propose": lambda: draft.propose(window[0], depth).best(0, window[0]),
        "verify": lambda: target.forward(state, window, rows="all", verify=True),
        "commit": lambda: state.commit(depth + 1),
        "extend": lambda: draft.extend(window, target.tapped(depth + 1)),
    }
    taken: dict[str, list[tuple[float, float]]] = defaultdict(list)
    whole = []
    for number in range(2 * REPLAYS):
        waits = number % 2 == 0
        target.wait()
        began = time.perf_counter()
        for name, part in parts.items():
            entered = time.perf_counter()
            part()
            left = time.perf_counter()
            if waits:
                target.wait()
                taken[name].append((left - entered, time.perf_counter() - entered))
        target.wait()
        if not waits:
            whole.append(time.perf_counter() - began)
    medians = {
        name: tuple(1e6 * statistics.median(column) for column in zip(*pairs[3:], strict=True))
        for name, pairs in taken.items()
    }
    total = 1e6 * statistics.median(whole[3:])
    print(f"a step of {depth + 1} rows after {length}: {total:.0f} us; its parts, each waited for:")
    print(f"{'part':20s} {'returns':>9s} {'done':>9s}")
    for name, (returns, done) in medians.items():
        print(f"{name:20s} {returns:9.1f} {done:9.1f}")
    if out:
        with out.open("a") as file:
            line = {"title": f"step after {length}", "us": total, "parts": medians}
            file.write(json.dumps(line) + "\n")


def bare(target: Target) -> Launch:
    options = {"num_warps": 4, "num_stages": 1, "launch_pdl": True}
    return Launch(bare_kernel, (132,), (target.backend.scratch("bare", 4),), options)


def seconds_of(target: Target, steps: list) -> float:
    """Median seconds of a replay of these steps as one graph, each with the parameters that are there now: a run of one
    row leaves those of the next, whose position would soon be past the context.
    """
    tape = CudaTape(target.backend, steps, [], graph=True)
    tape.prepare()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    params = target._intake.params.array
    words, found = params.clone(), []
    for number in range(REPLAYS + 3):
        params.copy_(words)
        start.record()
        tape.replay()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            found.append(start.elapsed_time(end) / 1e3)
    params.copy_(words)
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
