"""Several drafts for one model beside plain decoding, prompt by prompt in turn: tokens a second by domain.

    python benchmarks/compare_drafts.py MODEL.gguf A.gguf B.gguf --prompt-file PROMPTS.jsonl --depths 2 planner

A draft's name may end in "-markov": it is then loaded without its Markov head. Every answer is compared with plain
decoding's; one that differs ends the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sides.probe import machine
from sides.report import spread

from sparkinfer.chat import ChatTemplate
from sparkinfer.decoding import best_rows, picked
from sparkinfer.dflash.build import build_decoder
from sparkinfer.dflash.draft import BlockDraft, load_draft
from sparkinfer.gguf import open_gguf
from sparkinfer.models import Target, load_target
from sparkinfer.options import resolve
from sparkinfer.sampling import Sampler, SamplingParams, TokenHistory
from sparkinfer.tokenizer import Tokenizer

WITHOUT_MARKOV = "-markov"
PLAIN = "plain"


@dataclass
class Side:
    """One way to decode: plain, or a decoder with a draft. Seconds by round and prompt, steps by prompt."""

    name: str
    decoder: Any = None
    seconds: list[dict[int, float]] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("drafts", nargs="+")
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--depths", nargs="+", default=["planner"], help="fixed depths, or planner")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    return parser.parse_args()


def open_draft(name: str, target: Target) -> BlockDraft:
    """Load a draft, perhaps without its Markov head."""
    markov = not name.endswith(WITHOUT_MARKOV)
    return load_draft(name.removesuffix(WITHOUT_MARKOV), target, markov=markov)


def sides(args: argparse.Namespace, target: Target) -> Iterator[Side]:
    """Plain decoding and every draft at every depth; depths of one draft share it."""
    yield Side(PLAIN)
    for name in args.drafts:
        draft = open_draft(name, target)
        for depth in args.depths:
            flags = {} if depth == "planner" else {"dflash_proposals": int(depth)}
            yield Side(f"{Path(name).name} {depth}", build_decoder(target, draft, resolve(flags)))


def plain(
    target: Target, prompt: list[int], count: int, stop: frozenset[int]
) -> tuple[list[int], float]:
    """The greedy answer and the seconds after its first token."""
    state = target.new_state()
    target.set_taps(())
    found = [int(picked(target, target.forward(state, prompt))[0].argmax())]
    start = time.perf_counter()
    while len(found) < count and found[-1] not in stop:
        found.append(int(best_rows(target, state, found[-1:])[0].argmax()))
    return found, time.perf_counter() - start


def drafted(target: Target, side: Side, prompt: list[int], answer: list[int]) -> tuple[float, int]:
    """Seconds and steps after the first token of the same answer. Raises ValueError where another one comes out."""
    state, history = target.new_state(), TokenHistory(prompt)
    sampler = Sampler(SamplingParams(), target.config.n_vocab, seed=0)
    side.decoder.begin(state, prompt, sampler, history)
    found = list(side.decoder.step(1).tokens)
    side.decoder.commit(1)
    start, steps = time.perf_counter(), 0
    while len(found) < len(answer):
        step = side.decoder.step(len(answer) - len(found))
        kept = min(len(step.tokens), len(answer) - len(found))
        side.decoder.commit(kept)
        found += step.tokens[:kept]
        steps += 1
    seconds = time.perf_counter() - start
    if found != answer:
        raise ValueError(f"{side.name} wrote another answer than plain decoding")
    return seconds, steps


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every side on every prompt, in turn, `rounds` times."""
    with open_gguf(args.model) as file:
        tokenizer = Tokenizer.from_gguf(file)
        rows = [json.loads(line) for line in args.prompt_file.read_text().splitlines()]
        rows = rows[:: args.every]
        with closing(ChatTemplate.from_gguf(file, tokenizer)) as template:
            prompts = [template.encode([{"role": "user", "content": r["prompt"]}]) for r in rows]
        target = load_target(file, context=args.context, threads=args.threads)
        stop = frozenset(tokenizer.stop_ids)
        every = list(sides(args, target))
        answers = [plain(target, prompt, args.tokens, stop)[0] for prompt in prompts]
        for number in range(args.rounds):
            for side in every:
                side.seconds.append({})
            for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                for side in every[:: -1 if (place + number) % 2 else 1]:
                    if side.decoder is None:
                        side.seconds[-1][place] = plain(target, prompt, args.tokens, stop)[1]
                    else:
                        side.seconds[-1][place], side.steps[place] = drafted(
                            target, side, prompt, answer
                        )
            print(f"round {number + 1}/{args.rounds}", file=sys.stderr)
        target.close()
    lengths = [len(answer) - 1 for answer in answers]  # the first token is the prompt's
    return {
        "benchmark": "compare_drafts",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": Path(args.model).name,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "machine": machine(),
        "domains": _domains(every, [row["domain"] for row in rows], lengths),
    }


def _domains(every: list[Side], names: list[str], lengths: list[int]) -> dict[str, Any]:
    """Of each domain and side: tokens a second, tokens a step, same-round ratio to plain decoding."""
    found: dict[str, Any] = {}
    for domain in ["all", *dict.fromkeys(names)]:
        places = [p for p, name in enumerate(names) if domain in ("all", name) and lengths[p]]
        tokens = sum(lengths[p] for p in places)
        times = {s.name: [sum(turn[p] for p in places) for turn in s.seconds] for s in every}
        found[domain] = {
            side.name: {
                "tok_s": spread([tokens / seconds for seconds in times[side.name]]),
                "times_plain": spread(
                    [a / b for a, b in zip(times[PLAIN], times[side.name], strict=True)]
                ),
                "tokens_a_step": tokens / sum(side.steps[p] for p in places) if side.steps else 1.0,
            }
            for side in every
        }
    return found


def table(domains: dict[str, Any]) -> str:
    """Times plain decoding (tokens a step) by side and domain."""
    names = list(domains)
    lines = ["side".ljust(36) + "".join(name.rjust(15) for name in names)]
    for side in domains["all"]:
        cells = [domains[name][side] for name in names]
        lines.append(
            side.ljust(36)
            + "".join(
                f"{c['times_plain']['median']:.2f} ({c['tokens_a_step']:.2f})".rjust(15)
                for c in cells
            )
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table and one JSON line."""
    args = arguments()
    result = measure(args)
    print(table(result["domains"]))
    line = json.dumps(result)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    else:
        print(line)


if __name__ == "__main__":
    main()
