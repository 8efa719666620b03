"""Greedy text and logits of a hybrid model (qwen35, qwen35moe) in our engine and in llama.cpp.

    python benchmarks/hybrid_agreement.py MODEL.gguf --peer-python PEER_ENV/bin/python

Each side answers every prompt greedily; then each computes the logits of llama.cpp's answers. K formats come with
rounded activations on both sides, each in its own way, so texts part at near-ties. A place is one if both gaps
between the two tokens are at most the largest shift that rounding to int8 gave our engine among the answers' rows.
The second half runs a copy of the file in F32, where nothing is rounded but llama.cpp's 16-bit keys and values.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from agreement import divergence
from numpy.typing import NDArray
from sides.client import Client

from sparkinfer.gguf import Typed, open_gguf, write_gguf
from sparkinfer.quant.formats import QUANT_FORMATS, dequantize

PROMPTS = Path(__file__).parent / "prompts" / "heldout.jsonl"
PEER, INT8, FLOAT = "llama.cpp", "sparkinfer int8", "sparkinfer f32"
Logits = NDArray[np.float32]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="a hybrid model in our engine and in llama.cpp")
    parser.add_argument("model", type=Path, help="GGUF file of architecture qwen35 or qwen35moe")
    parser.add_argument("--peer-python", required=True, help="Python that has llama-cpp-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-file", type=Path, default=PROMPTS, help="JSON lines with prompt")
    parser.add_argument("--every", type=int, default=3, help="take every n-th prompt")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    return parser.parse_args(argv)


@dataclass
class Side:
    """What one engine made of all prompts: its greedy answers, and its logits over llama.cpp's answers."""

    info: dict[str, Any] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)
    margins: list[list[float]] = field(default_factory=list)  # between the two best logits
    rows: list[Logits] = field(default_factory=list)  # [tokens, n_vocab] of each prompt


def run_side(client: Client, prompts: Sequence[list[int]], count: int) -> Side:
    """Greedy answers of `count` tokens."""
    side = Side(info=client.ask("info"))
    for prompt in prompts:
        reply = client.ask("greedy", tokens=prompt, count=count)
        side.answers.append(reply["tokens"])
        side.margins.append(reply["margins"])
    return side


def run_logits(
    client: Client, prompts: Sequence[list[int]], texts: Sequence[list[int]], folder: Path
) -> list[Logits]:
    """The rows that choose each token of `texts`, given the ones before."""
    found = []
    for prompt, text in zip(prompts, texts, strict=True):
        path = folder / "logits.npy"
        client.ask("logits", tokens=prompt + text[:-1], path=str(path))
        found.append(np.load(path)[len(prompt) - 1 :])
    return found


def run_all(args: argparse.Namespace, model: Path, labels: Sequence[str]) -> dict[str, Side]:
    """Every side, one process at a time; llama.cpp is the first and its answers are what all compute logits of."""
    settings = {"model": str(model), "threads": args.threads, "context": 1024}
    lines = [json.loads(line) for line in args.prompt_file.read_text().splitlines()]
    texts = [line["prompt"] for line in lines[:: args.every]]
    with closing(Client(FLOAT, sys.executable, "sparkinfer_side.py", settings)) as client:
        prompts = [client.ask("chat", text=text)["tokens"] for text in texts]
        ours = [client.ask("tokenize", text=text)["tokens"] for text in texts]
    sides: dict[str, Side] = {}
    with tempfile.TemporaryDirectory() as folder:
        for label in labels:
            kind = {} if label == PEER else {"activations": label.split()[-1]}
            script = "llama_cpp_side.py" if label == PEER else "sparkinfer_side.py"
            python = args.peer_python if label == PEER else sys.executable
            with closing(Client(label, python, script, {**settings, **kind})) as client:
                if label == PEER and ours != [
                    client.ask("tokenize", text=text)["tokens"] for text in texts
                ]:
                    raise ValueError("the two tokenizers disagree on the prompts")
                side = sides[label] = run_side(client, prompts, args.tokens)
                side.rows = run_logits(client, prompts, sides[PEER].answers, Path(folder))
            print(f"{model.name}: {label} done", file=sys.stderr)
    return sides


def shifts(exact: Side, other: Side) -> NDArray[np.float64]:
    """How far the gap between the two tokens that are best in `exact` moves in `other`, for every row."""
    found = []
    for reference, rows in zip(exact.rows, other.rows, strict=True):
        first, second = np.argsort(reference, axis=1)[:, :-3:-1].T
        at = np.arange(len(reference))
        gaps = [r[at, first].astype(np.float64) - r[at, second] for r in (reference, rows)]
        found.append(np.abs(gaps[1] - gaps[0]))
    return np.concatenate(found)


def compare(ours: Side, theirs: Side, exact: Side | None, limit: float) -> dict[str, Any]:
    """Texts up to their first difference, which is a near-tie where both gaps are at most `limit`."""
    differences = []
    same = 0
    for number, (a, b) in enumerate(zip(ours.answers, theirs.answers, strict=True)):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        same += at
        if at == len(a):
            continue
        pair = [a[at], b[at]]
        own, other = (
            float(abs(side.rows[number][at, pair[0]] - side.rows[number][at, pair[1]]))
            for side in (ours, theirs)
        )
        gaps = [own, max(other, theirs.margins[number][at])]  # of one row alone, and in a batch
        found = {"prompt": number, "at": at, "tokens": pair, "gaps": gaps}
        if exact is not None:
            found["exact_gap"] = float(np.subtract(*exact.rows[number][at, pair]))
        differences.append(found | {"near_tie": max(gaps) <= limit})
    return {
        "texts": len(ours.answers),
        "equal": len(ours.answers) - len(differences),
        "tokens_before_a_difference": same,
        "limit": limit,
        "differences": differences,
    }


def forced(exact: Side, other: Side) -> dict[str, Any]:
    """Logits over the same text: KL divergence from `exact`, best tokens, shifts of the gap of the best two."""
    pairs = list(zip(exact.rows, other.rows, strict=True))
    kl = np.concatenate([divergence(a, b) for a, b in pairs])
    moved = shifts(exact, other)
    return {
        "rows": int(kl.size),
        "mean_kl": float(kl.mean()),
        "max_kl": float(kl.max()),
        "same_best": float(np.mean(np.concatenate([a.argmax(1) == b.argmax(1) for a, b in pairs]))),
        "largest_difference": max(float(np.abs(a - b).max()) for a, b in pairs),
        "shift_median": float(np.median(moved)),
        "shift_p99": float(np.percentile(moved, 99)),
        "shift_max": float(moved.max()),
    }


def as_float32(source: Path, written: Path) -> None:
    """A copy with every tensor in F32 and all metadata but the file type."""
    with open_gguf(source) as file:
        metadata: dict[str, Any] = {
            key: Typed(value, file.type_name(key).removeprefix("array of "))
            for key, value in file.metadata.items()
        }
        metadata["general.file_type"] = 0
        rows = []
        for tensor in file.tensors.values():
            blocks = file.data(tensor.name).view(np.uint8).reshape(-1)
            size = QUANT_FORMATS[tensor.type_name].block_bytes
            values = dequantize(tensor.type_name, blocks.reshape(-1, size)).astype(np.float32)
            rows.append((tensor.name, tensor.shape, "F32", values))
        write_gguf(written, metadata, rows)


def describe(title: str, part: Mapping[str, Any]) -> str:
    """The text of one half."""
    text = part["text"]
    lines = [
        f"{title}: {text['equal']}/{text['texts']} texts equal, {text['tokens_before_a_difference']} tokens"
        f" before a first difference; a near-tie is a gap up to {text['limit']:.4f}"
    ]
    for row in text["differences"]:
        exact = f", exact {row['exact_gap']:+.4f}" if "exact_gap" in row else ""
        verdict = "near-tie" if row["near_tie"] else "NOT A NEAR-TIE"
        lines.append(
            f"  prompt {row['prompt'] + 1:2} token {row['at']:3}: {row['tokens'][0]} / {row['tokens'][1]},"
            f" gaps {row['gaps'][0]:.4f} / {row['gaps'][1]:.4f}{exact}: {verdict}"
        )
    for label, found in part["logits"].items():
        lines.append(
            f"  {label:16} from sparkinfer f32 over {found['rows']} rows: KL mean {found['mean_kl']:.2e}"
            f" max {found['max_kl']:.2e}, best token equal {found['same_best']:.4f}, gap of the best two moves by"
            f" {found['shift_median']:.4f} (median) {found['shift_p99']:.4f} (99 %) {found['shift_max']:.4f} (most)"
        )
    return "\n".join(lines)


def main() -> int:
    """Run both halves, print them and one JSON line; 1 where a first difference is no near-tie."""
    args = arguments()
    sides = run_all(args, args.model, (PEER, INT8, FLOAT))
    limit = float(shifts(sides[FLOAT], sides[INT8]).max())
    rounded = {
        "text": compare(sides[INT8], sides[PEER], sides[FLOAT], limit),
        "logits": {label: forced(sides[FLOAT], sides[label]) for label in (INT8, PEER)},
    }
    info = {label: side.info for label, side in sides.items()}
    print(describe("as it is, int8 against llama.cpp", rounded), flush=True)
    sides.clear()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"{args.model.stem}-f32.gguf"
        as_float32(args.model, copy)
        sides = run_all(args, copy, (PEER, FLOAT))
    logits = forced(sides[FLOAT], sides[PEER])
    exact = {
        "text": compare(sides[FLOAT], sides[PEER], None, logits["shift_max"]),
        "logits": {PEER: logits},
    }
    print(describe("as F32, against llama.cpp", exact))
    record = {
        "benchmark": "hybrid_agreement",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": args.model.name,
        "tokens": args.tokens,
        "sides": info,
        "as_it_is": rounded,
        "as_float32": exact,
    }
    if args.out:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    else:
        print(json.dumps(record))
    parts = [row for half in (rounded, exact) for row in half["text"]["differences"]]
    return 0 if all(row["near_tie"] for row in parts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
