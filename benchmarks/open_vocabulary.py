"""Open a file with a 152k-token vocabulary: our reader against the PyPI package `gguf`.

    python benchmarks/open_vocabulary.py [--tokens 151936] [--merges 150000] [--rounds 5]

Prints one JSON line with the best and the median of the rounds, and the ratio of the medians. The
two readers take turns; `gguf` runs in fewer rounds, since one takes seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sparkinfer.gguf import Typed, open_gguf, write_gguf


def write_vocabulary(path: Path, n_tokens: int, n_merges: int) -> None:
    """Write a file with random tokens of 1 to 12 letters and merges of random pairs."""
    rng = np.random.default_rng(0)
    letters = np.array([*"abcdefghijklmnopqrstuvwxyz", "Ġ", "é", "Ċ"])
    lengths = rng.integers(1, 13, n_tokens)
    text = "".join(letters[rng.integers(0, len(letters), int(lengths.sum()))])
    ends = np.cumsum(lengths)
    tokens = [text[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    pairs = rng.integers(0, n_tokens, (n_merges, 2))
    metadata = {
        "general.architecture": "qwen3",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed([1] * n_tokens, "int32"),
        "tokenizer.ggml.scores": Typed([0.0] * n_tokens, "float32"),
        "tokenizer.ggml.merges": [f"{tokens[left]} {tokens[right]}" for left, right in pairs],
        "tokenizer.ggml.eos_token_id": n_tokens - 1,
    }
    write_gguf(path, metadata, [("output_norm.weight", (1024,), "F32", bytes(4096))])


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=151_936)
    parser.add_argument("--merges", type=int, default=150_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    import gguf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_vocabulary(path, arguments.tokens, arguments.merges)
        ours, theirs = [], []
        for turn in range(arguments.rounds):
            ours.append(seconds(lambda: open_gguf(path)))
            if turn % 2 == 0:
                theirs.append(seconds(lambda: gguf.GGUFReader(path)))
        result = {
            "tokens": arguments.tokens,
            "merges": arguments.merges,
            "file_mb": round(path.stat().st_size / 1e6, 2),
            "sparkinfer_s": {
                "best": round(min(ours), 4),
                "median": round(statistics.median(ours), 4),
            },
            "gguf_s": {
                "best": round(min(theirs), 3),
                "median": round(statistics.median(theirs), 3),
            },
            "ratio": round(statistics.median(theirs) / statistics.median(ours), 1),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
