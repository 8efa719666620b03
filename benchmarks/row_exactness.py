"""Row exactness, counted: do rows of wide forwards have the bits of single rows, in every configuration?

    python benchmarks/row_exactness.py                                 # the golden models and one model per format
    python benchmarks/row_exactness.py model.gguf --lengths 0 255 256  # other files

Single rows are run once per model and kind of activation, with one thread and the first instruction set this CPU has.
Every instruction set and number of threads must then give the same bits: windows of 1 to 16 rows after every length,
and prompts in chunks of many sizes. A case is one window or one chunk. One JSON line per model; exit code 1 if a bit
differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparkinfer.backend.isa import choose_isa
from sparkinfer.errors import OptionError
from sparkinfer.gguf import write_gguf
from sparkinfer.models import Target, load_target
from sparkinfer.quant.formats import QUANT_FORMATS
from sparkinfer.quant.tiles import LAYOUTS

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "data" / "golden"
LENGTHS = (
    0,
    1,
    7,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    129,
    240,
    250,
    255,
    256,
    257,
    300,
    500,
    511,
    512,
    513,
)
CHUNKS = (
    1,
    2,
    3,
    5,
    8,
    9,
    15,
    16,
    17,
    24,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    100,
    128,
    129,
    200,
    300,
    512,
)
WIDTHS = range(1, 17)


def random_matrix(name: str, inputs: int, outputs: int, rng: np.random.Generator) -> bytes:
    """Weights of a format: any bits, scales of at most 0.004 (float formats: values of about 0.06)."""
    spec, count = QUANT_FORMATS[name], inputs * outputs
    if LAYOUTS[name].floats:
        values = (rng.standard_normal(count) / 16).astype(np.float32)
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return values.astype(np.float16 if name == "F16" else np.float32).tobytes()
    blocks = rng.integers(0, 256, (count // spec.block_size, spec.block_bytes), np.uint8)
    largest = 0.0002 if LAYOUTS[name].sub_scales else 0.004
    for offset in spec.halves:
        scale = rng.uniform(0.2 * largest, largest, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scale[:, None].view(np.uint8)
    return blocks.tobytes()


def write_model(path: Path, name: str) -> None:
    """A llama of two layers whose matrices all have the format `name`."""
    n, ff, heads, kv_heads, vocabulary = 256, 512, 8, 2, 320
    rng = np.random.default_rng(0)
    ones = np.ones(n, np.float32).tobytes()
    shapes = {"token_embd.weight": (n, vocabulary)}
    tensors: list[Any] = [("output_norm.weight", (n,), "F32", ones)]
    for layer in range(2):
        for part, outputs in (
            ("q", n),
            ("k", n * kv_heads // heads),
            ("v", n * kv_heads // heads),
            ("output", n),
        ):
            shapes[f"blk.{layer}.attn_{part}.weight"] = (n, outputs)
        shapes |= {f"blk.{layer}.ffn_{part}.weight": (n, ff) for part in ("gate", "up")}
        shapes[f"blk.{layer}.ffn_down.weight"] = (ff, n)
        tensors += [
            (f"blk.{layer}.{norm}_norm.weight", (n,), "F32", ones) for norm in ("attn", "ffn")
        ]
    tensors += [
        (key, shape, name, random_matrix(name, *shape, rng)) for key, shape in shapes.items()
    ]
    metadata = {
        "general.architecture": "llama",
        "general.name": f"random {name}",
        "llama.block_count": 2,
        "llama.context_length": 4096,
        "llama.embedding_length": n,
        "llama.feed_forward_length": ff,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    write_gguf(path, metadata, tensors)


def available() -> list[str]:
    """Instruction sets of this CPU, best first."""
    found = []
    for isa in ("vnni512", "avx2", "portable"):
        try:
            found.append(choose_isa(isa).name)
        except OptionError:
            continue
    return found


def single_rows(target: Target, tokens: Sequence[int]) -> np.ndarray:
    state = target.new_state()
    return np.stack([target.forward(state, [token])[0].copy() for token in tokens])


def windows(
    target: Target, tokens: Sequence[int], lengths: Sequence[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """First position and logits of every verified window."""
    state = target.new_state()
    for length in sorted(lengths):
        if length > state.length:
            target.forward(state, tokens[state.length : length], rows="none")
        for width in WIDTHS:
            yield (
                length,
                target.forward(state, tokens[length : length + width], rows="all", verify=True),
            )


def prompts(
    target: Target, tokens: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """First position and logits of every chunk of the whole text, for every chunk size."""
    for size in sizes:
        state = target.new_state()
        for start in range(0, len(tokens), size):
            yield start, target.forward(state, tokens[start : start + size], rows="all")


def check(
    path: Path,
    activations: str,
    lengths: Sequence[int],
    chunks: Sequence[int],
    threads: Sequence[int],
) -> dict[str, Any]:
    """Counts for one file and kind of activation over all instruction sets and numbers of threads."""
    count = max(lengths) + max(WIDTHS)
    result: dict[str, Any] = {
        "model": path.stem,
        "activations": activations,
        "cases": 0,
        "rows": 0,
        "different_rows": 0,
    }
    alone: np.ndarray | None = None
    configurations = [(isa, n) for isa in available() for n in threads]
    for isa, n_threads in [(available()[0], 1), *configurations]:
        target = load_target(
            path, context=count, threads=n_threads, activations=activations, isa=isa
        )  # type: ignore[arg-type]
        tokens = [
            int(t) for t in np.random.default_rng(7).integers(0, target.config.n_vocab, count)
        ]
        if alone is None:
            alone = single_rows(target, tokens)
            target.close()
            continue
        for source in (windows(target, tokens, lengths), prompts(target, tokens, chunks)):
            for first, rows in source:
                wanted = alone[first : first + len(rows)]
                result["cases"] += 1
                result["rows"] += len(rows)
                result["different_rows"] += int(
                    (rows.view(np.uint32) != wanted.view(np.uint32)).any(axis=1).sum()
                )
        target.close()
    assert alone is not None
    return result | {
        "configurations": [f"{isa} x {n}" for isa, n in configurations],
        "finite": bool(np.isfinite(alone).all()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "models",
        type=Path,
        nargs="*",
        help="GGUF files (default: the golden models and one per format)",
    )
    parser.add_argument(
        "--activations", nargs="+", default=["int8", "f32"], choices=["int8", "f32"]
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--chunks", type=int, nargs="+", default=list(CHUNKS))
    arguments = parser.parse_args()
    total = {"cases": 0, "rows": 0, "different_rows": 0}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        models = list(arguments.models)
        if not models:
            models = sorted(GOLDEN.glob("*.gguf"))
            for name in LAYOUTS:
                models.append(Path(folder) / f"random-{name}.gguf")
                write_model(models[-1], name)
        for model in models:
            for activations in arguments.activations:
                result = check(
                    model, activations, arguments.lengths, arguments.chunks, arguments.threads
                )
                print(json.dumps(result), flush=True)
                total = {key: total[key] + result[key] for key in total}
    print(
        json.dumps(
            {
                "total": total,
                "models": len(models),
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
    )
    return 1 if total["different_rows"] else 0


if __name__ == "__main__":
    sys.exit(main())
