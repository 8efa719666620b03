"""Passes of a greedy step with and without screening of the head, in turns: milliseconds by rows, and their ratio.

    python benchmarks/head_screen.py MODEL.gguf --prompt-file benchmarks/prompts/heldout.jsonl --every 9

Windows are the model's own answers, verified at every position. The largest logits of both are compared each time; one
that differs ends the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from sides.probe import machine
from sides.report import spread

from sparkinfer.chat import ChatTemplate
from sparkinfer.gguf import open_gguf
from sparkinfer.models import Target, load_target
from sparkinfer.tokenizer import Tokenizer

Times = dict[tuple[int, bool], list[float]]  # rows, screened -> seconds


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--every", type=int, default=9, help="take every n-th prompt")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    return parser.parse_args()


def timed(target: Target, state: Any, window: list[int], screened: bool) -> tuple[list[int], float]:
    """The tokens after a window's rows, and the seconds of its pass."""
    started = time.perf_counter()
    if screened:
        rows = target.best(state, window, rows="all", verify=True)
        return [row.best for row in rows], time.perf_counter() - started
    rows = target.picked(target.forward(state, window, rows="all", verify=True))
    return [row.best for row in rows], time.perf_counter() - started


def answer(
    target: Target, prompt: list[int], count: int, widths: list[int], seconds: Times
) -> None:
    """Every width at every position of one answer, both ways. Raises ValueError where they differ."""
    state = target.new_state()
    found = [int(target.forward(state, prompt)[0].argmax())]
    while len(found) < count + max(widths):
        found.append(target.best(state, found[-1:])[0].best)
    state.rewind(len(prompt))
    for place in range(count):
        for width in widths:
            window = found[place : place + width]
            order = (True, False) if place % 2 else (False, True)
            results = {}
            for screened in order:
                results[screened], elapsed = timed(target, state, window, screened)
                seconds.setdefault((width, screened), []).append(elapsed)
            if results[True] != results[False]:
                raise ValueError(f"rows of {window} at {state.length} differ: {results}")
        target.forward(state, found[place : place + 1], rows="none")


def main() -> None:
    """Measure, print the table and one JSON line."""
    args = arguments()
    with open_gguf(args.model) as file:
        tokenizer = Tokenizer.from_gguf(file)
        lines = args.prompt_file.read_text(encoding="utf-8").splitlines()[:: args.every]
        with closing(ChatTemplate.from_gguf(file, tokenizer)) as template:
            prompts = [
                template.encode([{"role": "user", "content": json.loads(line)["prompt"]}])
                for line in lines
            ]
        target = load_target(file, context=1024, threads=args.threads)
        if target.screened is None:
            sys.exit(f"the head is not screened: {target.plan['head_screen']}")
        answer(target, prompts[0], 2, args.rows, {})  # warms up
        seconds: Times = {}
        for prompt in prompts:
            answer(target, prompt, args.tokens, args.rows, seconds)
        counts = target.screened
        target.close()
    result = {}
    print("rows   whole head, ms   screened, ms   screened / whole")
    for width in args.rows:
        pair = [np.array(seconds[width, screened]) * 1e3 for screened in (False, True)]
        whole, screened = (spread(list(values)) for values in pair)
        ratio = spread(list(pair[1] / pair[0]))
        result[width] = {"whole_ms": whole, "screened_ms": screened, "ratio": ratio}
        print(f"{width:4}{whole['median']:17.3f}{screened['median']:15.3f}{ratio['median']:19.3f}")
    record = {
        "benchmark": "head_screen",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": Path(args.model).name,
        "machine": machine(),
        "exact_share": counts["exact_share"],
        "rows": result,
    }
    line = json.dumps(record)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
    else:
        print(line)


if __name__ == "__main__":
    main()
