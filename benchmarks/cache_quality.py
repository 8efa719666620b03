"""What a format of keys and values changes of a model's predictions: perplexity and divergence over a text.

    python benchmarks/cache_quality.py MODEL docs/architecture.md docs/gpu.md --tokens 4096 --windows 4

Each window of the texts runs through the model once for each format. Prints for each: perplexity of the next token,
and beside the first format the mean and largest KL divergence and how often the likeliest token is the same.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.models import Target, load_target
from sparkinfer.tokenizer import Tokenizer

_ROWS = 64  # of a forward that gives all logits


def log_probabilities(target: Target, tokens: list[int], n_vocab: int) -> NDArray[np.float32]:
    """Of the next token after every token, float32 [tokens, vocabulary]."""
    state, parts = target.new_state(), []
    for start in range(0, len(tokens), _ROWS):
        rows = target.forward(state, tokens[start : start + _ROWS], rows="all")
        logits = np.array(rows, np.float32)[:, :n_vocab]
        logits -= logits.max(-1, keepdims=True)
        parts.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    return np.concatenate(parts)


class Tally:
    """Sums over positions of one format."""

    def __init__(self) -> None:
        self.nll: list[float] = []
        self.kl: list[float] = []
        self.same: list[bool] = []

    def add(
        self, own: NDArray[np.float32], first: NDArray[np.float32], tokens: NDArray[np.int64]
    ) -> None:
        self.nll += (-own[np.arange(len(tokens)), tokens]).tolist()
        self.kl += (np.exp(first) * (first - own)).sum(-1).tolist()
        self.same += (own.argmax(-1) == first.argmax(-1)).tolist()

    def result(self) -> dict[str, Any]:
        return {
            "perplexity": round(float(np.exp(np.mean(self.nll))), 4),
            "mean_kl": float(np.mean(self.kl)),
            "largest_kl": float(np.max(self.kl)),
            "same_best": round(float(np.mean(self.same)), 5),
            "positions": len(self.nll),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--formats", nargs="+", default=["f16", "q8_0"])
    parser.add_argument("--tokens", type=int, default=4096, help="of a window")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON")
    args = parser.parse_args()
    targets = {
        name: load_target(
            args.model, context=args.tokens, threads=args.threads, kv_cache=name,
            activations=args.activations, device=args.device,
        )
        for name in args.formats
    }  # fmt: skip
    first = targets[args.formats[0]]
    tokenizer = Tokenizer.from_gguf(first.file)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in args.texts)
    ids = tokenizer.encode(text)
    tallies = {name: Tally() for name in args.formats}
    for window in range(min(args.windows, len(ids) // args.tokens)):
        part = ids[window * args.tokens : (window + 1) * args.tokens]
        wanted = np.array(part[1:], np.int64)
        base = log_probabilities(first, part, tokenizer.n_vocab)[:-1]
        for name, target in targets.items():
            own = base
            if target is not first:
                own = log_probabilities(target, part, tokenizer.n_vocab)[:-1]
            tallies[name].add(own, base, wanted)
        print(window + 1, {name: tally.result() for name, tally in tallies.items()}, flush=True)
    found = {name: tally.result() for name, tally in tallies.items()}
    print(json.dumps(found, indent=1))
    if args.out:
        record = {
            "benchmark": "cache_quality",
            "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "model": args.model.name,
            "texts": [path.name for path in args.texts],
            "tokens": args.tokens,
            "plan": dict(first.plan),
            "found": found,
        }
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
