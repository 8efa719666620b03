"""Our engine against llama.cpp on the same file: interleaved rounds in one run.

    python benchmarks/peer_llama_cpp.py MODEL.gguf --peer-python PEER_ENV/bin/python

See benchmarks/README.md for what each measure is and how to read the table.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from sides.client import Client, IdleWatch, hogs, once
from sides.intervals import shown, speedup_interval
from sides.load import ForeignLoad
from sides.probe import ReadProbe, machine
from sides.report import add_costs, spread, summarise, table

OURS = "sparkinfer"
PEER = "llama.cpp"
BEST = "llama.cpp-best"
SCRIPTS = {"sparkinfer": "sparkinfer_side.py", "llama.cpp": "llama_cpp_side.py"}
MEASURES = ("read", "decode", "prompt", "rows", "speculate", "start")
START_TEXT = "The capital of France is a city of many bridges. Which river do they cross, and why?"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", help="GGUF file both engines run")
    parser.add_argument("--peer-python", required=True, help="Python that has llama-cpp-python")
    parser.add_argument("--best-model", help="also run llama.cpp on this copy (its best format)")
    parser.add_argument("--ours", choices=SCRIPTS, default="sparkinfer", help="llama.cpp: A/A test")
    parser.add_argument("--activations", choices=("int8", "f32"), default="int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--measures",
        nargs="+",
        choices=MEASURES,
        default=["read", "decode", "prompt", "rows", "start"],
    )
    parser.add_argument("--depths", nargs="+", type=int, default=[0, 1024])
    parser.add_argument("--decode-tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--row-depth", type=int, default=128)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 6, 8, 16])
    parser.add_argument("--row-repeats", type=int, default=5, help="forwards of a width per round")
    parser.add_argument("--draft", help="speculate: our draft (a folder or GGUF file)")
    parser.add_argument(
        "--tokens-a-step", nargs="+", type=float, help="speculate: script these, network or none"
    )
    parser.add_argument("--answer-tokens", type=int, default=128, help="speculate: tokens decoded")
    parser.add_argument("--text", nargs="+", default=[START_TEXT], help="speculate: the prompts")
    parser.add_argument(
        "--prompt-file", type=Path, help="speculate: prompts of this JSONL file, by its domains"
    )
    parser.add_argument("--start-rounds", type=int, default=3)
    parser.add_argument(
        "--cache-option", default="SPARKINFER_CACHE_DIR", help="kernel cache folder"
    )
    parser.add_argument("--hog", type=int, default=0, metavar="N", help="busy loops on one core")
    parser.add_argument("--quiet", type=float, default=0.15, help="cores others may use")
    parser.add_argument("--patience", type=float, default=20, help="seconds to wait for quiet")
    parser.add_argument("--retries", type=int, default=3, help="of a disturbed measurement")
    parser.add_argument("--minutes", type=float, default=60, help="start no round after this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    return parser.parse_args(argv)


class Comparison:
    """The sides of one run and its rounds."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack, hog_ids: list[int]) -> None:
        self.args = args
        self.hog_ids = hog_ids
        wanted = [*args.depths, args.row_depth, args.prompt]
        context = max(wanted) + max(args.decode_tokens, args.answer_tokens + 16, *args.rows)
        self.settings: dict[str, Any] = {
            "threads": args.threads,
            "context": -(-context // 256) * 256,
            "activations": args.activations,
        }
        self.places = {OURS: (sys.executable, SCRIPTS[args.ours], args.model)}
        if args.ours == "llama.cpp":
            self.places[OURS] = (args.peer_python, SCRIPTS["llama.cpp"], args.model)
        self.places[PEER] = (args.peer_python, SCRIPTS["llama.cpp"], args.model)
        if args.best_model:
            self.places[BEST] = (args.peer_python, SCRIPTS["llama.cpp"], args.best_model)
        self.clients = {}
        for label, (python, script, model) in self.places.items():
            client = Client(label, python, script, {**self.settings, "model": model})
            stack.callback(client.close)
            self.clients[label] = client
        self.info = {label: client.ask("info") for label, client in self.clients.items()}
        sizes = {info["n_vocab"] for info in self.info.values()}
        if len(sizes) != 1:
            raise ValueError(f"the sides see vocabularies of different sizes: {sizes}")
        self.n_vocab = sizes.pop()
        self.watch = IdleWatch(list(self.clients.values()))
        own = [client.process.pid for client in self.clients.values()]
        self.foreign = ForeignLoad([*own, *hog_ids])
        self.disturbed = {"repeated": 0, "kept": 0}
        self.answers = list(self._answers()) if "speculate" in args.measures else []
        self.counts: dict[str, dict[str, int]] = {}  # of a file: domain -> prompt -> tokens
        for number, (_, tokens, domain) in enumerate(self.answers if args.prompt_file else []):
            self.counts.setdefault(domain, {})[str(number)] = len(tokens)
        self.steps: dict[str, list[float]] = {}  # tokens a step of ours
        self.agree: dict[str, list[float]] = {}

    def tokens(self, count: int, salt: int) -> list[int]:
        """Random ids, the same for every side and round."""
        rng = random.Random(f"{self.args.seed}/{salt}")
        return [rng.randrange(self.n_vocab) for _ in range(count)]

    def _steps(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Name, command and arguments of everything that is timed in a round."""
        args = self.args
        if "decode" in args.measures:
            for depth in args.depths:
                fed = {
                    "context": self.tokens(depth, 1),
                    "tokens": self.tokens(args.decode_tokens, 2),
                }
                yield f"decode_d{depth}_tok_s", "decode", fed
        if "prompt" in args.measures:
            yield f"prompt{args.prompt}_tok_s", "prompt", {"tokens": self.tokens(args.prompt, 3)}
        if "rows" in args.measures:
            context = self.tokens(args.row_depth, 4)
            for n in args.rows:
                fed = {"context": context, "tokens": self.tokens(n, 5)}
                yield f"rows{n}_ms", "rows", {**fed, "repeats": args.row_repeats}

        for number, (context, tokens, _) in enumerate(self.answers):
            for script in args.tokens_a_step or [None]:
                name = f"speculate{number}_{'draft' if script is None else script}_tok_s"
                fed = {"context": context, "tokens": tokens, "draft": args.draft}
                yield name, "speculate", {**fed, "tokens_a_step": script}
                last = script == (args.tokens_a_step or [None])[-1]
                if (number == 0 or args.prompt_file) and last:
                    plain = {"context": context[:-1], "tokens": context[-1:] + tokens[:-1]}
                    yield f"plain{number}_tok_s", "decode", plain

    def _answers(self) -> Iterator[tuple[list[int], list[int], str]]:
        """The prompts in the model's chat form, our plain greedy answers up to their ends, and the domains."""
        ours, texts = self.clients[OURS], [(text, "") for text in self.args.text]
        if self.args.prompt_file:
            lines = self.args.prompt_file.read_text().splitlines()
            texts = [(row["prompt"], row["domain"]) for row in map(json.loads, lines)]
        for text, domain in texts:
            asked = ours.ask("chat", text=text)
            prompt, stop = asked["tokens"], set(asked["stop_ids"])
            found = ours.ask("greedy", tokens=prompt, count=self.args.answer_tokens)["tokens"]
            if self.args.prompt_file:
                ends = [place for place, token in enumerate(found) if token in stop]
                found = found[: ends[0] + 1] if ends else found
            yield prompt, found, domain

    @staticmethod
    def _value(op: str, asked: dict[str, Any], reply: dict[str, Any]) -> float:
        if op == "rows":
            return 1e3 * float(median(reply["seconds"]))
        return float(len(asked["tokens"]) / reply["seconds"])

    def _step(self, labels: list[str], op: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Measure on every side; again if other programs took processor time meanwhile."""
        tries: list[tuple[float, dict[str, Any]]] = []
        while True:
            self.foreign.wait_quiet(self.args.quiet, self.args.patience)
            replies = {label: self.watch.ask(self.clients[label], op, **asked) for label in labels}
            tries.append((self.foreign.read(), replies))
            if tries[-1][0] <= self.args.quiet:
                return replies
            if len(tries) > self.args.retries:
                self.disturbed["kept"] += 1
                return min(tries, key=lambda attempt: attempt[0])[1]
            self.disturbed["repeated"] += 1

    def round(self, reverse: bool) -> dict[str, dict[str, float]]:
        """One value of each measure on each side; sides alternate within a measure."""
        labels = list(self.clients)[:: -1 if reverse else 1]
        values: dict[str, dict[str, float]] = {label: {} for label in self.clients}
        for name, op, asked in self._steps():
            # The peer's plain decoding of a prompt was timed beside our drafting already.
            own = self.args.prompt_file is not None and name.startswith("plain")
            replies = self._step([OURS] if own else labels, op, asked)
            for label, reply in replies.items():
                values[label][name] = self._value(op, asked, reply)
            if op == "speculate":
                self.steps.setdefault(name, []).append(replies[OURS]["tokens_a_step"])
            if PEER in replies:
                same = np.equal(replies[OURS]["argmax"], replies[PEER]["argmax"])
                self.agree.setdefault(name, []).append(float(same.mean()))
        for side in values.values():
            add_costs(side)
        return values

    def warm_up(self) -> None:
        """A little of every measure, untimed: compiles, fills caches, computes states at depth."""
        for _, op, asked in self._steps():
            little = dict(asked)
            if op == "rows":
                little["repeats"] = 1
            elif op == "decode":
                little["tokens"] = asked["tokens"][:4]
            for client in self.clients.values():
                client.ask(op, **little)
        print("warm", file=sys.stderr)

    def _once(self, label: str, cache: str) -> dict[str, Any]:
        """One whole process; Python's own bytecode cache is on for every side."""
        python, script, model = self.places[label]
        env = {"PYTHONDONTWRITEBYTECODE": ""}
        if script == SCRIPTS["sparkinfer"]:
            env[self.args.cache_option] = cache
        return once(python, script, {**self.settings, "model": model}, START_TEXT, env)

    def starts(self) -> list[dict[str, dict[str, Any]]]:
        """Whole processes to their first token: ours with an empty and a filled kernel cache."""
        kinds = [(f"{OURS} cold", OURS), (f"{OURS} cached", OURS)]
        kinds += [(label, label) for label in self.places if label != OURS]
        rounds = []
        foreign = ForeignLoad(self.hog_ids)
        for number in range(self.args.start_rounds + 1):
            turn = {}
            with tempfile.TemporaryDirectory() as cache:
                for name, label in kinds:
                    foreign.wait_quiet(self.args.quiet, self.args.patience)
                    turn[name] = self._once(label, cache)
            if number:  # the first turn only fills file and bytecode caches
                rounds.append(turn)
        return rounds


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything; returns what the JSON line holds."""
    with ExitStack() as stack:
        hog_ids = stack.enter_context(hogs(args.hog))
        result: dict[str, Any] = {
            "benchmark": "peer_llama_cpp",
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "model": Path(args.model).name,
            "arguments": {
                k: str(v) if isinstance(v, Path) else v
                for k, v in vars(args).items()
                if k not in ("out", "peer_python")
            },
            "machine": machine(),
        }
        result["arguments"]["model"] = Path(args.model).name
        if args.best_model:
            result["arguments"]["best_model"] = Path(args.best_model).name
        run = Comparison(args, stack, hog_ids)
        result["sides"] = run.info
        run.warm_up()
        probe = ReadProbe(args.threads) if "read" in args.measures else None
        rounds = []
        end = time.monotonic() + 60 * args.minutes
        for number in range(args.rounds):
            if rounds and time.monotonic() > end:
                break
            values = run.round(reverse=number % 2 == 1)
            if probe:
                add_read_rate(values, probe.bytes_per_second(), run.info)
            rounds.append(values)
            print(f"round {number + 1}/{args.rounds}: {run.disturbed}", file=sys.stderr)
        result |= {
            "rounds": rounds,
            "disturbed": run.disturbed,
            "idle_core_share": run.watch.shares(),
            "tokens_a_step": {name: median(steps) for name, steps in run.steps.items()},
            "same_argmax": {name: median(shares) for name, shares in run.agree.items()},
            "peak_rss": {label: client.peak_rss for label, client in run.clients.items()},
            "summary": summarise(rounds, OURS),
        }
        if run.counts:
            label = (args.tokens_a_step or ["draft"])[-1]
            result["domains"] = by_domain(rounds, run.counts, label, result["tokens_a_step"])
        for client in run.clients.values():
            client.close()
        if "start" in args.measures:
            result["starts"] = run.starts()
        return result


def by_domain(
    rounds: list[dict[str, dict[str, float]]],
    counts: dict[str, dict[str, int]],
    script: object,
    steps: dict[str, float],
) -> dict[str, dict[str, Any]]:
    """Tokens a second over all prompts of a domain, and same-round ratios with their intervals: drafting to our and to
    the peer's plain.
    """
    everything = {number: count for some in counts.values() for number, count in some.items()}
    found: dict[str, dict[str, Any]] = {}
    for domain, some in {"all": everything, **counts}.items():
        kinds = {
            "draft": (OURS, f"speculate{{}}_{script}_tok_s"),
            "plain": (OURS, "plain{}_tok_s"),
            "peer": (PEER, f"speculate{{}}_{script}_tok_s"),
        }
        seconds = {
            kind: [[n / turn[side][name.format(p)] for p, n in some.items()] for turn in rounds]
            for kind, (side, name) in kinds.items()
        }
        rates = {
            kind: [sum(some.values()) / sum(turn) for turn in turns]
            for kind, turns in seconds.items()
        }
        made = sum((n - 1) / steps[kinds["draft"][1].format(p)] for p, n in some.items() if n > 1)
        found[domain] = {
            "prompts": len(some),
            "tokens": sum(some.values()),
            "tokens_a_step": sum(n - 1 for n in some.values()) / max(made, 1),
            **{f"{kind}_tok_s": spread(values) for kind, values in rates.items()},
            **{
                f"draft/{kind}": {
                    **spread([a / b for a, b in zip(rates["draft"], rates[kind], strict=True)]),
                    **speedup_interval(seconds["draft"], seconds[kind]),
                }
                for kind in ("plain", "peer")
            },
        }
    return found


def domain_table(domains: dict[str, dict[str, Any]]) -> str:
    """One domain a line: medians over rounds, and ratios with intervals over prompts and rounds."""
    head = (
        "domain",
        "prompts",
        "tokens",
        "a step",
        "draft",
        "plain",
        "llama.cpp",
        "draft/plain",
        "draft/llama.cpp",
    )
    rows = [head]
    for name, row in domains.items():
        rates = [f"{row[f'{kind}_tok_s']['median']:.0f}" for kind in ("draft", "plain", "peer")]
        ratios = [shown(row[f"draft/{kind}"]) for kind in ("plain", "peer")]
        counts = (str(row["prompts"]), str(row["tokens"]), f"{row['tokens_a_step']:.2f}")
        rows.append((name, *counts, *rates, *ratios))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    for kind, name in (("plain", "plain"), ("peer", "llama.cpp")):
        turns = ", ".join(f"{ratio:.2f}" for ratio in domains["all"][f"draft/{kind}"]["rounds"])
        lines.append(f"draft/{name} of each round: {turns}")
    if len(domains["all"]["draft/plain"]["rounds"]) == 1:
        lines.append("one round tells nothing of the next: intervals are over prompts alone")
    return "\n".join(lines)


def add_read_rate(
    values: dict[str, dict[str, float]], rate: float, info: dict[str, dict[str, Any]]
) -> None:
    """Add this round's memory-read rate and the share of it that our decode reaches."""
    values[OURS]["read_GB_s"] = rate / 1e9
    weights = info[OURS]["weight_bytes_per_token"]
    for name in [name for name in values[OURS] if name.startswith("decode")]:
        if weights:
            depth = name.split("_")[1]
            values[OURS][f"read_share_{depth}"] = values[OURS][name] * weights / rate


def describe(result: dict[str, Any]) -> str:
    """The text after a run."""
    by_domains = result.get("domains")
    lines = [domain_table(by_domains) if by_domains else table(result["summary"], OURS), ""]
    lines.append(f"idle use of a core: {result['idle_core_share']}")
    lines.append(f"measurements disturbed by other programs: {result['disturbed']}")
    if not by_domains:
        lines.append(f"same argmax: {result['same_argmax']}")
    if result["tokens_a_step"] and not by_domains:
        lines.append(f"tokens a step: {result['tokens_a_step']}")
    peaks = {label: f"{peak / 1e6:.0f} MB" for label, peak in result["peak_rss"].items()}
    lines.append(f"peak memory of the rounds: {peaks}")
    for label in result["starts"][0] if result.get("starts") else ():
        turns = [turn[label] for turn in result["starts"]]
        first = [turn["first_token_s"] for turn in turns]
        peak = max(turn["peak_rss"] for turn in turns) / 1e6
        spread = f"{median(first):.2f} s ({min(first):.2f} to {max(first):.2f})"
        lines.append(f"first token of a new process, {label}: {spread}, peak {peak:.0f} MB")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table and one JSON line."""
    args = arguments()
    result = measure(args)
    print(describe(result))
    line = json.dumps(result)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    else:
        print(line)


if __name__ == "__main__":
    main()
