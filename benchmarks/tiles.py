"""Speed of the packed dot products alone, one format at a time, warm and cold.

warm: one matrix that stays in cache, one thread, GMAC/s. cold: copies of it, 64 MB per thread, all threads at once,
GB/s of weights; "read" is the rate of a plain read of the same memory by the same threads. Times are the best of
several passes; compare figures of one run only.

    python benchmarks/tiles.py --formats Q4_1 Q8_0 Q4_K Q6_K --rows 1 2 4 6 8
"""

import argparse
import threading
import time
from collections.abc import Callable

import numpy as np
from numba import njit

from sparkinfer.backend.base import Arena
from sparkinfer.backend.compiled import set_cache_root
from sparkinfer.backend.isa import Isa, choose_isa
from sparkinfer.kernels.linear.cpu_tiles import tile_kernel
from sparkinfer.kernels.linear.weights import PackedWeight, pack_weight
from sparkinfer.options import resolve
from sparkinfer.quant.formats import QUANT_FORMATS

COLD_BYTES = 64e6


def random_blocks(name: str, values: int, rng: np.random.Generator) -> np.ndarray:
    """Random bytes as blocks; the scales may be anything, since only time counts (NaN is as fast)."""
    kind = QUANT_FORMATS[name]
    shape = (values // kind.block_size, kind.block_bytes)
    return rng.integers(0, 60, shape, dtype=np.uint8)


def best(run: Callable[[], None], passes: int) -> float:
    times = []
    for _ in range(passes):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@njit(nogil=True)
def read(values: np.ndarray) -> int:
    total = 0
    for i in range(values.size):
        total += values[i]
    return total


def together(run: Callable[[int], None], threads: int) -> Callable[[], None]:
    """run(0) .. run(threads - 1) at once."""

    def start() -> None:
        workers = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return start


def measure(
    weight: PackedWeight, copies: np.ndarray, rows: int, isa: Isa, threads: int
) -> tuple[float, float]:
    """Seconds of one pass over a cached matrix, and of all threads over all their copies."""
    kernel = tile_kernel(weight.format_name, rows, isa.name, isa.lanes).native(7)
    panel = np.ones(weight.blocks * 12 * rows + 16, np.float32)  # scales of 1: no denormal products
    out = np.zeros((threads, rows, weight.padded_outputs), np.float32)
    size, count = weight.n_bytes, copies.size // weight.n_bytes // threads

    def over(thread: int, address: int, times: int, step: int) -> None:
        target = out[thread]
        for i in range(times):
            at, to = address + i * step, target.ctypes.data
            kernel(at, panel.ctypes.data, weight.blocks, to, target.strides[0], weight.tiles, 0)

    warm = best(lambda: over(0, weight.address, 20, 0), 15) / 20
    start = copies.ctypes.data
    cold = best(together(lambda i: over(i, start + i * count * size, count, size), threads), 7)
    return warm, cold


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=["Q4_1", "Q8_0", "Q4_K", "Q6_K"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 6, 8])
    parser.add_argument("--shape", nargs=2, type=int, default=[1024, 768], metavar=("OUT", "IN"))
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    isa = choose_isa(args.isa)
    set_cache_root(resolve({}).path("cache_dir"))
    outputs, inputs = args.shape
    rng = np.random.default_rng(0)
    for name in args.formats:
        blocks = random_blocks(name, outputs * inputs, rng)
        weight = pack_weight(name, blocks, outputs, inputs, isa.lanes, Arena())
        copies = np.tile(weight.array, int(COLD_BYTES // weight.n_bytes) * args.threads)
        words = copies[: copies.size // 8 * 8].view(np.int64)
        parts = np.array_split(words, args.threads)
        reading = best(together(lambda i, parts=parts: read(parts[i]), args.threads), 7)
        line = []
        for rows in args.rows:
            warm, cold = measure(weight, copies, rows, isa, args.threads)
            rate = outputs * inputs * rows / warm / 1e9
            line.append(f"{rows}: {rate:5.1f} GMAC/s {copies.size / cold / 1e9:4.1f} GB/s")
        read_rate = copies.size / reading / 1e9
        print(f"{name:6} {isa.name} read {read_rate:4.1f} GB/s  " + " | ".join(line), flush=True)


if __name__ == "__main__":
    main()
