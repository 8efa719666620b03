"""Does speculation ever change an output? Many requests, each decoded plainly and with a draft, compared bit by bit.

    python benchmarks/lossless.py --minutes 10                              # the golden models
    python benchmarks/lossless.py --minutes 10 --model SmolLM2.gguf         # a real model, with real prompts
    python benchmarks/lossless.py --minutes 10 --model SmolLM2.gguf --draft DRAFT   # half the pairs with this draft

A pair is a prompt and a setting: a kind of request (greedy, sampled, penalties, stops, ...), a draft (random, oracle,
wrong, adversarial, a real network of random weights), and the steps: verify path and depth, the same for good or
another one each time, or chosen by the planner. Text, tokens, log-probabilities, reason, usage and the final state
must be equal.

Pair i is the same in every run (but for what the planner's clock decides), and a run goes on where the last line of
--out with the same models ended. Each run appends one JSON line; exit code 1 if anything differed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import golden_models  # noqa: E402
from draft_zoo import KINDS, write_block_draft  # noqa: E402
from lossless_cases import (  # noqa: E402
    SETTINGS,
    Outcome,
    ScriptedPolicy,
    check_context,
    draft_for,
    options_of,
    outcome,
    plain_engine,
    plain_outcome,
    random_steps,
    spec_engine,
    step_paths,
)

from sparkinfer.dflash.calibrate import calibrate  # noqa: E402
from sparkinfer.dflash.draft import load_draft  # noqa: E402
from sparkinfer.dflash.planner import POLICIES, Setup  # noqa: E402
from sparkinfer.dflash.verify import Paths  # noqa: E402
from sparkinfer.machine import cpu_model  # noqa: E402
from sparkinfer.models import load_target  # noqa: E402
from sparkinfer.tokenizer import Tokenizer  # noqa: E402

SUITE = 3  # pairs are numbered within a suite; another number gives other pairs
PROMPTS = HERE / "agreement_prompts.txt"
RESULTS = HERE / "results" / "lossless.jsonl"
MARKUP = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SHARED = 3  # settings of a real model that share one plain run
GOOD = (
    "oracle",
    "scripted",
    "late",
    "alternating",
    "ending",
)  # more tokens a second: most pairs of a real model
FULL = [name for name in SETTINGS if name not in ("stop id", "stop string", "two stops", "short")]


class Model:
    """A loaded target with everything its pairs share."""

    def __init__(
        self, name: str, target: Any, folder: Path, prompts: list[str], draft: Path | None = None
    ) -> None:
        """`draft`: a trained one, instead of random weights."""
        self.name, self.target, self.prompts = name, target, prompts
        self.tokenizer = Tokenizer.from_gguf(target.file)
        self.engine = plain_engine(target, self.tokenizer)
        self.trained = draft is not None
        self.block = load_draft(draft or write_block_draft(folder / name, target), target)
        target.set_taps(self.block.taps)
        self.costs = calibrate(target, self.block, Paths(target).order)
        self._plain: tuple[str, Outcome] = ("", None)  # type: ignore[assignment]

    def prompt(self, rng: np.random.Generator) -> list[int]:
        if self.prompts:
            text = MARKUP.format(self.prompts[int(rng.integers(len(self.prompts)))])
            return self.tokenizer.encode(text, parse_special=True)
        return [int(t) for t in rng.integers(0, 280, int(rng.choice([1, 3, 9, 17, 40, 70])))]

    def plain(self, prompt: list[int], options: dict[str, Any]) -> Outcome:
        key = repr((prompt, options))
        if self._plain[0] != key:
            self._plain = (key, plain_outcome(self.engine, prompt, **options))
        return self._plain[1]


class Run:
    """Counts of one run."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.pairs = self.full = self.tokens = self.drafted = self.accepted = 0
        self.steps: Counter[str] = Counter()
        self.widths: Counter[int] = Counter()
        self.by: dict[str, Counter[str]] = {
            name: Counter() for name in ("model", "setting", "draft", "policy")
        }
        self.contexts = 0
        self.differences: list[str] = []

    def pair(self, index: int, model: Model) -> None:
        """Decode pair `index` both ways and compare."""
        share = SHARED if model.prompts else 1
        common = np.random.default_rng([SUITE, index // share])
        rng = np.random.default_rng([SUITE, index, 1])
        prompt = model.prompt(common)
        setting = str(common.choice(FULL if common.random() < 0.8 else SETTINGS))
        free = model.plain(prompt, {"max_tokens": self.count, "ignore_eos": True})
        options = options_of(setting, free, model.target.config.n_vocab, self.count, common)
        if setting == "text end" and model.prompts:
            options["temperature"] = 1.0
        plain = model.plain(prompt, options)
        whole = [*prompt, *plain.tokens]
        usual = GOOD if rng.random() < (0.75 if model.prompts else 0.4) else [*KINDS, "block"]
        kind = "block" if model.trained and rng.random() < 0.5 else str(rng.choice(usual))
        seed = int(rng.integers(2**31))
        draft: Any = model.block
        if kind != "block":
            draft = draft_for(kind, model.target, model.tokenizer, whole, seed)
        policy = self._policy(model, rng, draft.max_depth)
        engine = spec_engine(model.target, model.tokenizer, draft, [], policy=policy)
        try:
            got, result = outcome(engine, prompt, **options)
            wrong = plain.differences(got)
            if draft.gap:
                wrong.append(f"{draft.gap} gap rows")
            if kind != "block" and index % 16 == 0 and not model.prompts:
                wrong += check_context(model.target, draft, whole)
                self.contexts += 1
        except Exception as error:  # a pair that fails is a difference, and the run goes on
            wrong, result = [repr(error)], None
        what = f"{index}: {model.name}, {setting}, draft {kind}, policy {policy.name}"
        if wrong:
            self.differences.append(f"{what}: {', '.join(wrong)}")
            print(self.differences[-1], flush=True)
        self._add(plain, result, [model.name, setting, kind, policy.name])

    def _policy(self, model: Model, rng: np.random.Generator, depth: int) -> Any:
        if rng.random() < 0.75:
            steps = random_steps(rng)
            return ScriptedPolicy([(min(width, depth + 1), path) for width, path in steps])
        name = str(rng.choice(["auto", "always", "fixed"]))
        return POLICIES[name](Setup(model.costs, depth, 16, int(rng.integers(1, depth + 1))))

    def _add(self, plain: Outcome, result: Any, names: list[str]) -> None:
        self.pairs += 1
        self.tokens += len(plain.tokens)
        self.full += len(plain.tokens) == self.count
        for counter, name in zip(self.by.values(), names, strict=True):
            counter[name] += 1
        if result is not None:
            self.steps.update(step_paths(result))
            report = result.speculation
            self.widths.update(report.widths)
            self.drafted += report.drafted
            self.accepted += report.accepted

    def line(self) -> dict[str, Any]:
        return {
            "pairs": self.pairs,
            "full_pairs": self.full,
            "tokens": self.tokens,
            "differences": len(self.differences),
            "what_differs": self.differences[:20],
            "drafted": self.drafted,
            "accepted": self.accepted,
            "steps": dict(sorted(self.steps.items())),
            "steps_by_width": {str(width): n for width, n in sorted(self.widths.items())},
            "contexts_checked": self.contexts,
            **{f"by_{name}": dict(sorted(counter.items())) for name, counter in self.by.items()},
        }


def first_pair(path: Path, suite: str) -> int:
    """Where the last run of these models ended."""
    lines = path.read_text().splitlines() if path.exists() else []
    ends = [record["next"] for record in map(json.loads, lines) if record["suite"] == suite]
    return max(ends, default=0)


def load_models(args: argparse.Namespace, folder: Path) -> list[Model]:
    """The files given, or the golden models with both kinds of activations."""
    if args.model:
        target = load_target(args.model, context=2048, threads=args.threads)
        texts = PROMPTS.read_text().splitlines()
        return [Model(args.model.stem, target, folder, texts, args.draft)]
    return [
        Model(
            f"{name} {activations}",
            golden_models.target(name, activations, args.threads),
            folder,
            [],
        )
        for name in golden_models.MODELS
        for activations in golden_models.ACTIVATIONS
    ]


def _short(argument: str) -> str:
    """Files by their name alone: where they lie here is nobody's concern."""
    return Path(argument).name if "/" in argument else argument


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--model", type=Path, help="a GGUF file with ChatML markup (default: the golden models)"
    )
    parser.add_argument(
        "--draft", type=Path, help="a trained draft of that model, for half of the pairs"
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="stop after this time")
    parser.add_argument("--pairs", type=int, default=10**9, help="stop after so many pairs")
    parser.add_argument("--first", type=int, help="number of the first pair (default: go on)")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of a request")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="append the JSON line to this file"
    )
    args = parser.parse_args()
    names = [path.stem for path in (args.model, args.draft) if path] or ["golden"]
    suite = f"{SUITE}: {' with '.join(names)}, {args.tokens} tokens"
    start = args.first if args.first is not None else first_pair(args.out, suite)
    begun, run, index = time.time(), Run(args.tokens), start
    with tempfile.TemporaryDirectory() as folder:
        models = load_models(args, Path(folder))
        while index < start + args.pairs and time.time() - begun < 60 * args.minutes:
            run.pair(index, models[index % len(models)])
            index += 1
    record = {
        "suite": suite,
        "command": shlex.join(["python", "benchmarks/lossless.py", *map(_short, sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(begun)),
        "cpu": cpu_model(),
        "first": start,
        "next": index,
        "seconds": round(time.time() - begun, 1),
        **run.line(),
    }
    text = json.dumps(record)
    print(text)
    with args.out.open("a") as file:
        file.write(text + "\n")
    return 1 if run.differences else 0


if __name__ == "__main__":
    sys.exit(main())
