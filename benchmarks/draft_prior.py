"""Measure how often a draft's slots are right and what its claims are worth, and write that into its GGUF file.

    python benchmarks/draft_prior.py MODEL.gguf DRAFT.gguf --prompts 48 --write

Prompts are random complete ones of the kind that `sparkinfer train` asks (another seed than its), or those of a file.
Every answer is decoded greedily with windows of full width. The planner starts from these numbers instead of guesses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from sparkinfer.chat import ChatTemplate
from sparkinfer.dflash.costs import Observed
from sparkinfer.dflash.draft import load_draft
from sparkinfer.dflash.loop import DFlashDecoder
from sparkinfer.dflash.policy import Decision
from sparkinfer.dflash.prior import ACCEPTANCE, CLAIMS, Tally, checked_prior
from sparkinfer.dflash.verify import Paths
from sparkinfer.gguf import Typed, open_gguf, write_gguf
from sparkinfer.models import load_target
from sparkinfer.sampling import Sampler, SamplingParams, TokenHistory
from sparkinfer.tokenizer import Tokenizer
from sparkinfer.training.prompts import random_turns, read_prompts, vocabulary_words

_SEED = 20_240_731


class Watching:
    """A policy of full windows that tallies what becomes of them."""

    name = "watching"

    def __init__(self, slots: int) -> None:
        self.slots, self.tally = slots, Tally(slots)
        self._chosen = Decision(1, "ar", "")

    def begin(self, length: int, *, usual: bool = True) -> None:
        """Nothing changes between requests."""

    def choose(self, length: int, limit: int) -> Decision:
        width = min(self.slots + 1, limit)
        self._chosen = Decision(width, "window" if width > 1 else "ar", "all slots", self)
        return self._chosen

    def more(self, claims: Sequence[float]) -> bool:
        return True

    def cut(self, claims: Sequence[float]) -> Decision:
        return self._chosen

    def observe(self, step: Observed) -> None:
        if step.claims:
            self.tally.add(step.claims, step.accepted, min(step.drafted, step.accepted + 1))

    def expected_speedup(self) -> float:
        return 1.0

    def plain_seconds(self, length: int) -> float:
        return 0.0

    def report(self) -> dict[str, Any]:
        return {}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("draft", type=Path)
    parser.add_argument("--prompts", type=int, default=48, help="random ones")
    parser.add_argument("--prompt-file", type=Path, help="these instead")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--write", action="store_true", help="write the numbers into the draft's file"
    )
    return parser.parse_args()


def measure(args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Acceptance by slot and means of claims."""
    with open_gguf(args.model) as file:
        tokenizer = Tokenizer.from_gguf(file)
        if args.prompt_file:
            texts = [prompt.text for prompt in read_prompts(args.prompt_file)]
        else:
            turns = random_turns(8 * args.prompts, _SEED, words=vocabulary_words(tokenizer))
            texts = [turn.text for turn in turns if turn.complete][: args.prompts]
        with closing(ChatTemplate.from_gguf(file, tokenizer)) as template:
            prompts = [template.encode([{"role": "user", "content": text}]) for text in texts]
        target = load_target(file, context=args.context)
        draft = load_draft(args.draft, target)
        policy = Watching(draft.max_depth)
        decoder = DFlashDecoder(target, draft, policy, Paths(target))
        stop = frozenset(tokenizer.stop_ids)
        for prompt in prompts:
            sampler = Sampler(SamplingParams(), target.config.n_vocab, seed=0, stop_ids=stop)
            decoder.begin(target.new_state(), prompt, sampler, TokenHistory(prompt))
            left = args.tokens
            while left > 0:
                tokens = decoder.step(left).tokens
                decoder.commit(len(tokens))
                left = 0 if stop & {*tokens} else left - len(tokens)
        target.close()
    return policy.tally.numbers


def write(path: Path, acceptance: list[float], claims: list[float]) -> None:
    """Replace what the file tells; its tensors stay as they are, byte for byte."""
    with open_gguf(path) as file:
        kept: dict[str, Any] = {}
        for key, value in file.metadata.items():
            if not key.endswith((ACCEPTANCE, CLAIMS)):
                kept[key] = Typed(value, file.type_name(key).removeprefix("array of "))
        prefix = "dflash." if file.architecture == "dflash" else f"{file.architecture}.dflash."
        kept[prefix + ACCEPTANCE] = Typed(acceptance, "float32")
        kept[prefix + CLAIMS] = Typed(claims, "float32")
        tensors = [
            (name, info.shape, info.type_name, bytes(file.data(name)))
            for name, info in file.tensors.items()
        ]
    write_gguf(path, kept, tensors)


def main() -> None:
    """Measure, print, and write if asked."""
    args = arguments()
    acceptance, claims = measure(args)
    checked_prior(acceptance, claims)
    print(json.dumps({"draft": args.draft.name, "acceptance": acceptance, "claims": claims}))
    if args.write:
        write(args.draft, acceptance, claims)


if __name__ == "__main__":
    main()
