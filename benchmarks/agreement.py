"""Greedy text and logits of our engine against llama.cpp and float32 transformers.

    python benchmarks/agreement.py MODEL.gguf --peer-python PEER --oracle-python ORACLE

Each side is a process of its own environment and runs alone. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sides.client import Client

PROMPTS = Path(__file__).with_name("agreement_prompts.txt")
ORACLE = "transformers"
MARKUP = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="greedy text and logits against two references")
    parser.add_argument("model", help="GGUF file of architecture llama, ChatML markup")
    parser.add_argument("--peer-python", required=True, help="Python that has llama-cpp-python")
    parser.add_argument("--oracle-python", required=True, help="Python with torch, transformers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=20, help="use the first N prompts")
    parser.add_argument("--without-ours", action="store_true", help="only the references")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    return parser.parse_args(argv)


def places(args: argparse.Namespace) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Label -> Python, script and extra settings of each side; the oracle comes first."""
    found: dict[str, tuple[str, str, dict[str, Any]]] = {
        ORACLE: (args.oracle_python, "transformers_side.py", {}),
        "llama.cpp": (args.peer_python, "llama_cpp_side.py", {}),
    }
    if not args.without_ours:
        for activations in ("int8", "f32"):
            settings = {"activations": activations}
            found[f"sparkinfer {activations}"] = (sys.executable, "sparkinfer_side.py", settings)
    return found


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Row-wise log-probabilities in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(reference || other) of every row, in nats."""
    p, q = log_softmax(reference), log_softmax(other)
    return np.asarray((np.exp(p) * (p - q)).sum(axis=1))


def first_difference(
    ours: dict[str, Any], theirs: dict[str, Any], text: int
) -> dict[str, Any] | None:
    """Where two continuations of one prompt part, and how close the top two were there."""
    for at, (a, b) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
        if a != b:
            return {
                "prompt": text,
                "at": at,
                "tokens": [a, b],
                "margins": [round(ours["margins"][at], 4), round(theirs["margins"][at], 4)],
            }
    return None


class Agreement:
    """Collects every side's answers to every prompt, one side at a time."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.sides = places(args)
        self.info: dict[str, Any] = {}
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.texts = PROMPTS.read_text().splitlines()[: args.prompts]
        self.prompts = self._tokenize()

    def _client(self, label: str) -> Client:
        python, script, extra = self.sides[label]
        settings = {"model": self.args.model, "threads": self.args.threads, "context": 1024}
        return Client(label, python, script, {**settings, **extra})

    def _tokenize(self) -> list[list[int]]:
        """Ids of every prompt; every tokenizer among the sides must give the same."""
        found: list[list[list[int]]] = []
        for label in ("llama.cpp", "sparkinfer int8"):
            if label in self.sides:
                client = self._client(label)
                asked = (client.ask("tokenize", text=MARKUP.format(t)) for t in self.texts)
                found.append([reply["tokens"] for reply in asked])
                client.close()
        if any(other != found[0] for other in found):
            raise ValueError("the sides' tokenizers disagree on the prompts")
        return found[0]

    def _path(self, label: str, index: int) -> Path:
        return self.folder / f"{label.replace(' ', '_')}-{index}.npy"

    def run(self) -> None:
        """Greedy text on each side; then logits over the oracle's text on each side."""
        for label in self.sides:
            client = self._client(label)
            self.info[label] = client.ask("info")
            answers = self.answers[label] = []
            for index, tokens in enumerate(self.prompts):
                answers.append(client.ask("greedy", tokens=tokens, count=self.args.tokens))
                fed = tokens + self.answers[ORACLE][index]["tokens"][:-1]
                client.ask("logits", tokens=fed, path=str(self._path(label, index)))
                print(f"{label}: prompt {index + 1}", file=sys.stderr)
            client.close()

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Every pair of sides whose text is compared."""
        labels = list(self.sides)
        for i, other in enumerate(labels):
            for label in labels[i + 1 :]:
                yield label, other

    def text_report(self) -> dict[str, Any]:
        """Per pair: prompts with equal text and the first difference of the others."""
        report = {}
        for label, other in self.pairs():
            both = zip(self.answers[label], self.answers[other], strict=True)
            found = [first_difference(a, b, i) for i, (a, b) in enumerate(both)]
            different = [difference for difference in found if difference]
            report[f"{label} vs {other}"] = {
                "equal": len(found) - len(different),
                "of": len(found),
                "differences": different,
            }
        return report

    def logit_report(self) -> dict[str, Any]:
        """Per side: KL against the oracle over the answer positions, and equal best tokens."""
        report = {}
        for label in list(self.sides)[1:]:
            values, same = [], []
            for index, prompt in enumerate(self.prompts):
                reference = np.load(self._path(ORACLE, index))[len(prompt) - 1 :]
                other = np.load(self._path(label, index))[len(prompt) - 1 :]
                values.append(divergence(reference, other))
                same.append(reference.argmax(axis=1) == other.argmax(axis=1))
            every = np.concatenate(values)
            report[label] = {
                "mean_kl": float(every.mean()),
                "max_kl": float(every.max()),
                "same_best": float(np.concatenate(same).mean()),
                "positions": int(every.size),
            }
        return report


def describe(result: dict[str, Any]) -> str:
    """The text after a run."""
    lines = ["KL from transformers (float32) over its own answers:"]
    for label, found in result["logits"].items():
        lines.append(
            f"  {label:16} mean {found['mean_kl']:.2e}  max {found['max_kl']:.2e}  "
            f"same best token {found['same_best']:.4f} of {found['positions']} positions"
        )
    for pair, found in result["text"].items():
        lines.append(f"{pair}: {found['equal']}/{found['of']} texts equal; first differences:")
        for row in found["differences"]:
            lines.append(
                f"  prompt {row['prompt'] + 1:2} token {row['at']:3}: {row['tokens'][0]} / "
                f"{row['tokens'][1]}, margins {row['margins'][0]:.4f} / {row['margins'][1]:.4f}"
            )
    return "\n".join(lines)


def main() -> None:
    """Run, print the report and one JSON line."""
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        run = Agreement(args, Path(folder))
        run.run()
        result = {
            "benchmark": "agreement",
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "model": Path(args.model).name,
            "tokens": args.tokens,
            "sides": run.info,
            "text": run.text_report(),
            "logits": run.logit_report(),
        }
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
