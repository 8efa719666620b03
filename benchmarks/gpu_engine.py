"""What the GPU engine reaches: load, plain decoding, verify windows, prefill, and DFlash with scripted acceptance.

    python benchmarks/gpu_engine.py MODEL.gguf --draft DRAFT --context 33000 --lengths 128,4096,32768

Times are of whole steps as the engine runs them (host work included), medians over rounds. DFlash's acceptance is an
oracle's: the draft's network runs at its full cost, its proposals are replaced so that exactly the scripted number is
right ("tau 5.333 at depth 5" is the trace the project's predecessor published). One JSON line per figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparkinfer.bench.fixed import Forced
from sparkinfer.decoding import AutoregressiveDecoder
from sparkinfer.dflash.draft import load_draft
from sparkinfer.dflash.loop import DFlashDecoder
from sparkinfer.dflash.scripted import ScriptedDraft, acceptance_script
from sparkinfer.dflash.verify import Paths
from sparkinfer.models import Target, load_target
from sparkinfer.sampling import Sampler, SamplingParams, TokenHistory

TRACES = ((5, 5.333), (3, 3.657), (7, 5.333))  # depth, tokens a step


def main() -> None:
    args = arguments()
    out = Printer(args.json)
    target = loaded(args, out)
    lengths = [n for n in args.lengths if n + 320 <= target.context]
    if "decode" in args.measure:
        decode(target, lengths, args.rounds, out)
    if "verify" in args.measure:
        verify(target, args.widths, lengths[0], args.rounds, out)
    if "prefill" in args.measure:
        prefill(target, lengths, out)
    if args.draft and "dflash" in args.measure:
        dflash(target, args, out)
    target.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--block", choices=("trained", "depth"), default="trained")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-cache", choices=("auto", "f32", "f16", "q8_0"), default="auto")
    parser.add_argument("--context", type=int, default=33_000)
    parser.add_argument("--lengths", type=numbers, default=[128, 512, 4096, 16384, 32768])
    parser.add_argument("--widths", type=numbers, default=[1, 2, 3, 4, 5, 6, 8, 12, 16])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=256, help="of a DFlash run")
    parser.add_argument("--measure", default="decode,verify,prefill,dflash")
    parser.add_argument("--json", type=Path, help="append one line per figure")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


class Printer:
    """A line for people and one for machines."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def __call__(self, what: str, **values: Any) -> None:
        shown = "  ".join(f"{key} {rounded(value)}" for key, value in values.items())
        print(f"{what:28s} {shown}", flush=True)
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps({"figure": what, **values}) + "\n")


def rounded(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def loaded(args: argparse.Namespace, out: Printer) -> Target:
    """Load the model twice timed: weights, then kernels and graphs."""
    began, compiled = time.perf_counter(), None

    def progress(label: str, _done: int, _total: int) -> None:
        nonlocal compiled
        if label == "compile" and compiled is None:
            compiled = time.perf_counter()

    target = load_target(
        args.model,
        context=args.context,
        device=args.device,
        kv_cache=args.kv_cache,
        progress=progress,
    )
    ended = time.perf_counter()
    ready = compiled or ended
    gigabytes = args.model.stat().st_size / 1e9
    out("load", gb=gigabytes, seconds=ready - began, gb_a_second=gigabytes / (ready - began))
    out("kernels and graphs", seconds=ended - ready)
    out("plan", **{key: str(value) for key, value in target.plan.items()})
    return target


def tokens(target: Target, seed: int = 0) -> Iterator[int]:
    """Random tokens: neighbours of a window must not share their experts by chance of being equal."""
    rng = np.random.default_rng(seed)
    while True:
        yield from (int(t) for t in rng.integers(0, target.config.n_vocab, 512))


def timed(target: Target, run: Callable[[], Any], rounds: int) -> float:
    """Median seconds of a run, after three warm ones."""
    seconds = []
    for number in range(rounds + 3):
        target.wait()
        began = time.perf_counter()
        run()
        target.wait()
        if number >= 3:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def decode(target: Target, lengths: list[int], rounds: int, out: Printer) -> None:
    """Plain greedy decoding after `length` tokens (a cache of zeros: the same work), as the engine runs it; `alone_ms`:
    a forward whose token the host gives and whose result it awaits; `graph_ms`: its graph and a wait.
    """
    state, stream, first = target.new_state(), tokens(target), None
    for length in lengths:
        seconds = steps(target, state, length, rounds)
        first = first or seconds
        state.assume(length)
        alone = timed(target, lambda: target.forward(state, [next(stream)])[0].argmax(), rounds)
        graph = timed(target, target._tape(1, "last").replay, rounds)
        out(
            f"decode at {length}",
            ms=1e3 * seconds,
            tok_s=1 / seconds,
            of_first=first / seconds,
            alone_ms=1e3 * alone,
            graph_ms=1e3 * graph,
        )


def steps(target: Target, state: Any, length: int, rounds: int) -> float:
    """Mean seconds of a step of plain decoding, the last one's end included."""
    state.assume(length)
    decoder, history = AutoregressiveDecoder(target), TokenHistory([0] * length)
    sampler = Sampler(SamplingParams(temperature=0.0), target.config.n_vocab, seed=0)
    decoder.begin(state, [next(tokens(target))], sampler, history)
    count, warm, began = rounds + 4, 4, 0.0
    for number in range(count):
        if number == warm:
            began = time.perf_counter()
        decoder.step(count - number)
        decoder.commit(1)
    target.wait()
    return (time.perf_counter() - began) / rounds


def verify(target: Target, widths: list[int], length: int, rounds: int, out: Printer) -> None:
    state, stream, one = target.new_state(), tokens(target, 1), None
    state.assume(length)
    for width in widths:

        def run(width: int = width) -> None:
            window = [next(stream) for _ in range(width)]
            target.forward(state, window, rows="all", verify=True)
            state.commit(0)

        seconds = timed(target, run, rounds)
        one = one or seconds
        out(f"verify {width} rows", ms=1e3 * seconds, of_one=seconds / one)


def prefill(target: Target, lengths: list[int], out: Printer) -> None:
    stream = tokens(target, 2)
    for length in lengths:
        prompt = [next(stream) for _ in range(length)]
        seconds = []
        for _ in range(3):
            state = target.new_state()
            target.wait()
            began = time.perf_counter()
            target.prefill(state, prompt)
            target.wait()
            seconds.append(time.perf_counter() - began)
        best = min(seconds[1:])
        out(f"prefill {length}", ms=1e3 * best, tok_s=length / best, first_ms=1e3 * seconds[0])


def greedy(decoder: Any, target: Target, prompt: list[int], count: int) -> tuple[list[int], float]:
    """`count` tokens and the seconds of the steps after the prompt's."""
    state = target.new_state()
    sampler = Sampler(SamplingParams(temperature=0.0), target.config.n_vocab, seed=0)
    history = TokenHistory(prompt)
    decoder.begin(state, prompt, sampler, history)
    began, first = 0.0, True
    while len(history.output) < count:
        left = count - len(history.output)
        result = decoder.step(left)
        decoder.commit(min(len(result.tokens), left))
        if first:
            target.wait()
            began, first = time.perf_counter(), False
    target.wait()
    return list(history.output), time.perf_counter() - began


def dflash(target: Target, args: argparse.Namespace, out: Printer) -> None:
    """DFlash and plain decoding in turn on one prompt; outputs must be equal."""
    began = time.perf_counter()
    draft = load_draft(args.draft, target, shorten=args.block == "depth")
    out("draft load", rows=draft.plan["rows"], seconds=time.perf_counter() - began)
    stream = tokens(target, 3)
    prompt = [next(stream) for _ in range(args.lengths[0])]
    plain = AutoregressiveDecoder(target)
    wanted, _ = greedy(plain, target, prompt, args.tokens)
    for depth, tau in TRACES:
        script = acceptance_script(tau - 1, depth)
        oracle = ScriptedDraft(
            [*prompt, *wanted], script, target.config.n_vocab, inner=draft, max_depth=depth
        )
        decoder = DFlashDecoder(
            target, oracle, Forced("fixed", [(depth + 1, "window")]), Paths(target)
        )
        speculative, alone, parts = [], [], {}
        for number in range(5):
            oracle.step = 0
            got, seconds = greedy(decoder, target, prompt, args.tokens)
            if got != wanted:
                sys.exit(f"depth {depth}: the output differs from plain decoding's")
            _, other = greedy(plain, target, prompt, args.tokens)
            if number:
                speculative.append(seconds)
                alone.append(other)
        parts = step_parts(decoder, target, oracle, prompt, args.tokens)
        count = args.tokens - 1
        fast, slow = count / statistics.median(speculative), count / statistics.median(alone)
        measured = decoder.report().tau
        out(f"dflash depth {depth}", tau=measured, tok_s=fast, plain_tok_s=slow, gain=fast / slow)
        out(f"  step of depth {depth}", **parts)


def step_parts(
    decoder: DFlashDecoder, target: Target, oracle: ScriptedDraft, prompt: list[int], count: int
) -> dict[str, float]:
    """Mean milliseconds of the parts of a step."""
    sums: dict[str, float] = {}
    steps, step = 0, decoder.step

    def noted(limit: int) -> Any:
        nonlocal steps
        result = step(limit)
        if result.drafted:
            steps += 1
            for part, seconds in result.seconds.items():
                sums[part] = sums.get(part, 0.0) + 1e3 * seconds
        return result

    oracle.step = 0
    decoder.step = noted  # type: ignore[method-assign]
    greedy(decoder, target, prompt, count)
    decoder.step = step  # type: ignore[method-assign]
    return {f"{part}_ms": total / max(1, steps) for part, total in sums.items()}


if __name__ == "__main__":
    main()
