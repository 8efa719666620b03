"""Greedy text of our engine against llama.cpp on a hybrid model (qwen35, qwen35moe), up to near-ties.

    python benchmarks/hybrid_agreement.py MODEL.gguf --peer-python PEER_ENV/bin/python

Both engines take the same tokens: our engine follows llama.cpp's greedy text, and where it would have chosen another
token, the difference of the two logits is printed. With F32 weights (`--activations f32` and a file of F32 tensors) no
token should differ; with K formats both engines quantise activations in their own way, and near-ties of routers and
logits fall either way.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from sides.client import Client

PROMPTS = Path(__file__).with_name("agreement_prompts.txt")
MARKUP = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="greedy text of a hybrid model against llama.cpp")
    parser.add_argument("model", help="GGUF file of architecture qwen35 or qwen35moe")
    parser.add_argument("--peer-python", required=True, help="Python that has llama-cpp-python")
    parser.add_argument("--activations", choices=("int8", "f32"), default="int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=10, help="use the first N prompts")
    return parser.parse_args(argv)


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """For every prompt: tokens, how many of them our engine would choose too, and the logit gaps of the others."""
    settings = {"model": args.model, "threads": args.threads, "context": 1024}
    texts = [MARKUP.format(line) for line in PROMPTS.read_text().splitlines() if line.strip()]
    results = []
    own = {**settings, "activations": args.activations}
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Client("llama.cpp", args.peer_python, "llama_cpp_side.py", settings)) as peer,
        closing(Client("sparkinfer", sys.executable, "sparkinfer_side.py", own)) as ours,
    ):
        for text in texts[: args.prompts]:
            prompt = peer.ask("tokenize", text=text)["tokens"]
            wanted = peer.ask("greedy", tokens=prompt, count=args.tokens)["tokens"]
            whole = prompt + wanted
            path = Path(folder) / "logits.npy"
            ours.ask("logits", tokens=whole, path=str(path))
            rows = np.load(path)[len(prompt) - 1 : len(whole) - 1]
            best = rows.argmax(1)
            gaps = rows.max(1) - rows[np.arange(len(wanted)), wanted]
            differ = [round(float(gap), 3) for gap in gaps[best != np.array(wanted)]]
            results.append(
                {"tokens": len(wanted), "same": len(wanted) - len(differ), "gaps": differ}
            )
    return results


def main() -> None:
    """Print one line for every prompt and the sums."""
    results = compare(arguments())
    for number, result in enumerate(results):
        print(f"{number:3}  {result['same']}/{result['tokens']} equal; gaps {result['gaps']}")
    tokens, same = (sum(result[key] for result in results) for key in ("tokens", "same"))
    largest = max((gap for result in results for gap in result["gaps"]), default=0.0)
    print(json.dumps({"tokens": tokens, "same": same, "largest_gap": largest}))


if __name__ == "__main__":
    main()
