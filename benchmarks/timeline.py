"""Where the time of a pass goes on the CPU, phase by phase: every job of a tape is clocked in the thread that runs it.

    python benchmarks/timeline.py MODEL.gguf --rows 1 2 3 4 --position 100
    python benchmarks/timeline.py MODEL.gguf --rows 3 --draft DRAFT.gguf --depths 1 2 3

With a draft also its context rows and its blocks, each after a pass of the target of that many rows.

Microseconds of a pass (medians of `--passes`), summed over the layers: what a thread spends in prologues, in chunks,
between the end of the phase before and its first job ("late"), and waiting for the other ("wait"); these four add up to
the time of the phase. GB/s are the weights that the chunks read over the time of the phase. Clocking itself costs two
reads of a counter a job, some 2 % of a pass.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from sparkinfer.backend.base import aligned
from sparkinfer.backend.compiled import Kernel, job
from sparkinfer.backend.cpu import CpuRecorder, CpuTape, Job
from sparkinfer.backend.instructions import WORD, instruction
from sparkinfer.backend.simd import I64, call_job, call_llvm, load_i64, store_i64
from sparkinfer.dflash.draft import load_draft
from sparkinfer.models import Target, load_target
from sparkinfer.state import Sequence

ENTRY, HEAD = 32, 64  # bytes of a record; of its thread's counter
ROOM = 1 << 15  # records a thread
WORDS = list(range(1000, 1016))  # a window's tokens
Run = Callable[[], None]


@instruction(WORD)
def cycles(builder):
    """The processor's counter."""
    return call_llvm(builder, "llvm.readcyclecounter", I64, [])


@job
def clocked_job(args: int, chunk: int, thread: int) -> None:
    """Run the job described at `args` and note its number and when it began and ended."""
    log = load_i64(args + 16) + thread * load_i64(args + 24)
    count = load_i64(log)
    begin = cycles()
    call_job(load_i64(args), load_i64(args + 8), chunk, thread)
    at = log + HEAD + ENTRY * count
    store_i64(at, load_i64(args + 32))
    store_i64(at + 8, begin)
    store_i64(at + 16, cycles())
    store_i64(log, count + 1)


@dataclass
class Clock:
    """Records of a backend's threads; number 2 p + 1 is the prologue of phase p, 2 p one of its jobs."""

    threads: int
    keep: list[np.ndarray] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stride = HEAD + ENTRY * ROOM
        self.log = aligned(self.stride * self.threads).view(np.int64)

    def wrap(self, of: Job, number: int) -> Job:
        """`of` with a clock."""
        arguments = np.array([*of.args, 0], np.int64)
        self.keep.append(arguments)
        args = (
            of.kernel.address, arguments.ctypes.data, self.log.ctypes.data, self.stride, number,
        )  # fmt: skip
        return replace(of, kernel=clocked_job, args=args)

    def take(self) -> list[np.ndarray]:
        """[records, 4] of each thread since the last call."""
        found = []
        for rows in self.log.reshape(self.threads, -1):
            count = int(rows[0])
            found.append(rows[HEAD // 8 :].reshape(-1, ENTRY // 8)[:count].copy())
            rows[0] = 0
        return found


def weight_bytes(of: Job) -> int:
    """Bytes of weights that all chunks of a job read; 0 for jobs that are no products."""
    args = of.args
    if of.kernel.name == "linear_job":
        return args[1] * args[8]
    if of.kernel.name == "gated_job":
        return args[10] * (args[14] * args[18] + args[20] * args[24])
    if (
        of.kernel.name == "piece_job" and len(args) == 9 and args[0]
    ):  # of `argmax`, with its product
        inner = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * 10).from_address(args[0]))
        return int(inner[1] * inner[8])
    return 0


@contextmanager
def clocked(clock: Clock) -> Iterator[None]:
    """Tapes recorded inside are clocked; the clock's names are those of the last one."""
    plain = CpuRecorder.finish

    def finish(recorder: CpuRecorder) -> CpuTape:
        clock.names, clock.bytes = [], []
        for place, (jobs, prologue) in enumerate(recorder.phases):
            names = [j.kernel.name.removesuffix("_job") for j in [*prologue, *jobs]]
            clock.names.append(" ".join(dict.fromkeys(names)))
            clock.bytes.append(sum(weight_bytes(j) for j in jobs))
            recorder.phases[place] = (
                [clock.wrap(j, 2 * place) for j in jobs],
                [clock.wrap(j, 2 * place + 1) for j in prologue],
            )
        return plain(recorder)

    CpuRecorder.finish = finish
    try:
        yield
    finally:
        CpuRecorder.finish = plain


def split(records: list[np.ndarray], phases: int) -> np.ndarray:
    """[phases, threads, 4]: late, prologue, chunks and wait, in counts, of one pass."""
    begin = min(int(r[0, 1]) for r in records if len(r))
    out = np.zeros((phases, len(records), 4))
    for phase in range(phases):
        mine = [r[r[:, 0] >> 1 == phase] for r in records]
        end = max(int(m[-1, 2]) for m in mine if len(m))
        for thread, m in enumerate(mine):
            spent = m[:, 2] - m[:, 1]
            ahead = spent[m[:, 0] & 1 == 1].sum()
            work = spent[m[:, 0] & 1 == 0].sum()
            late = int(m[0, 1]) - begin if len(m) else 0
            out[phase, thread] = late, ahead, work, end - begin - late - ahead - work
        begin = end
    return out


def table(clock: Clock, parts: np.ndarray, rate: float) -> str:
    """Parts [phases, threads, 4] summed over phases of one name; `rate` counts a microsecond."""
    lines = [
        f"{'phase':32}{'n':>4}{'us':>8}{'late':>14}{'prologue':>14}{'chunks':>14}{'wait':>14}{'GB/s':>7}"
    ]
    whole, names = parts / rate, clock.names
    for name in dict.fromkeys(names):
        at = [i for i, n in enumerate(names) if n == name]
        of = whole[at].sum(axis=0)
        total = of[0].sum()
        size = sum(clock.bytes[i] for i in at)
        cells = "".join(" ".join(f"{v:6.0f}" for v in of[:, c]).rjust(14) for c in range(4))
        lines.append(f"{name:32}{len(at):4}{total:8.0f}{cells}{size / total / 1e3:7.1f}")
    of = whole.sum(axis=0)
    cells = "".join(" ".join(f"{v:6.0f}" for v in of[:, c]).rjust(14) for c in range(4))
    lines.append(
        f"{'all':32}{len(names):4}{of[0].sum():8.0f}{cells}{sum(clock.bytes) / of[0].sum() / 1e3:7.1f}"
    )
    return "\n".join(lines)


def counts_a_microsecond() -> float:
    """The counter's rate."""
    cycles_now()
    at, start = cycles_now(), time.perf_counter()
    time.sleep(0.2)
    return (cycles_now() - at) / (time.perf_counter() - start) / 1e6


def _write_cycles(target: int) -> None:
    store_i64(target, cycles())


@functools.cache
def _counter() -> Callable[[int], None]:
    return Kernel(_write_cycles, 1).native(1)


def cycles_now() -> int:
    now = np.empty(1, np.int64)
    _counter()(now.ctypes.data)
    return int(now[0])


def show(title: str, clock: Clock, threads: int, passes: int, rate: float, run: Run) -> None:
    """Print the table of `run`, which replays a clocked tape and gives its records by `clock.take`."""
    found = []
    for _ in range(passes):
        run()
        found.append(split(clock.take(), len(clock.names)))
    whole = np.array([p.sum(axis=(0, 2))[0] for p in found])
    middle = np.argsort(whole)[len(whole) // 4 : 3 * len(whole) // 4 + 1]
    print(f"\n{title}")
    print(table(clock, np.mean([found[i] for i in middle], axis=0), rate), flush=True)


def target_passes(args: argparse.Namespace, target: Target, state: Sequence, rate: float) -> None:
    """Passes of several rows at the end of `state`."""
    for rows in args.rows:
        clock = Clock(args.threads)
        window = WORDS[:rows]

        def run(window: list[int] = window) -> None:
            target.forward(state, window, rows="all", verify=True)

        run()
        bare = []
        for _ in range(args.passes):
            start = time.perf_counter()
            run()
            bare.append(time.perf_counter() - start)
        target._tapes.clear()
        with clocked(clock):
            run()
        clock.take()
        title = f"{rows} rows: {np.median(bare) * 1e6:.0f} us not clocked"
        show(title, clock, args.threads, args.passes, rate, run)
        target._tapes.clear()


def draft_passes(args: argparse.Namespace, target: Target, state: Sequence, rate: float) -> None:
    """Context rows and blocks of the draft, with a pass of the target before each."""
    draft = load_draft(args.draft, target)
    draft.assume(args.position)
    tapes = draft.tapes
    for rows in args.rows:
        tapes.intake.send(draft._words(rows))
        clock = Clock(args.threads)
        tapes._contexts.clear()
        with clocked(clock):
            tape = tapes.context(rows)

        def run(tape: CpuTape = tape, clock: Clock = clock, rows: int = rows) -> None:
            target.forward(state, WORDS[:rows], rows="all", verify=True)
            clock.take()
            tape.replay()

        show(f"{rows} context rows", clock, args.threads, args.passes, rate, run)
    for depth in args.depths:
        draft.propose(WORDS[0], depth)
        tapes._blocks.clear()
        clock = Clock(args.threads)
        with clocked(clock):
            draft.propose(WORDS[0], depth)

        def run(depth: int = depth, clock: Clock = clock) -> None:
            target.forward(state, WORDS[: args.rows[-1]], rows="all", verify=True)
            clock.take()
            draft.propose(WORDS[0], depth)

        show(f"a block of depth {depth}", clock, args.threads, args.passes, rate, run)
        tapes._blocks.clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--position", type=int, default=100)
    parser.add_argument("--passes", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft")
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 2, 3])
    args = parser.parse_args()
    target = load_target(args.model, context=1024, threads=args.threads)
    rng = np.random.default_rng(1)
    state = target.new_state()
    target.forward(state, rng.integers(100, target.config.n_vocab, args.position).tolist())
    passes = draft_passes if args.draft else target_passes
    passes(args, target, state, counts_a_microsecond())
    target.close()


if __name__ == "__main__":
    main()
