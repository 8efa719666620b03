"""The compiled loop that replays a tape: one call per thread and forward, no GIL, no region per op.

A tape is a list of phases. A phase has jobs, each cut into chunks, and a prologue. Threads claim chunks from a counter,
many neighbours at first and one at a time in the end, and wait until every chunk is done, not until every thread has
arrived: a thread that lost its core delays nothing but the chunks it holds. A late thread claims nothing, neither of an
earlier run (the claim word carries the run's epoch) nor of an earlier phase: whoever claims the last chunk closes the
phase and leaves its number of chunks in the word, because the words that multiply the chunks change from phase to phase
and run to run, and a late thread would count others. A thread runs the prologue after its first claim in a phase: while
it holds a claim, the phase cannot end and its inputs stay.

Memory layout (int64 words):
  control: 0 epoch | 8 tape | 16 stop | 24 idle sleepers | 32 sleepers in a phase | 40 threads
  tape:    number of phases, address of phases, address of counters
  phase:   number of jobs, address of jobs, number of prologue entries, address of the prologue
  job:     function, args, chunks, address of a word that multiplies the chunks (0: none)
  prologue entry: function, args
  counters: per phase a cache line for the claim (epoch << 24 | next chunk, or CLOSED + chunks), one for the chunks done
"""

import platform
import sys

from sparkinfer.backend.compiled import Kernel, inner
from sparkinfer.backend.simd import (
    atomic_add,
    atomic_load,
    atomic_store,
    atomic_swap_if,
    call_job,
    give_way,
    load_i64,
    spin_hint,
    system_call,
)

EPOCH, TAPE, STOP, IDLE, SLEEPERS, THREADS, CONTROL_WORDS = 0, 64, 128, 192, 256, 320, 48
PHASE_WORDS, JOB_WORDS, PROLOGUE_WORDS, COUNTER_WORDS = 4, 4, 2, 16
CHUNK_BITS = 24
CLOSED = 1 << 23
_PHASE_BYTES, _JOB_BYTES, _PROLOGUE_BYTES = 8 * PHASE_WORDS, 8 * JOB_WORDS, 8 * PROLOGUE_WORDS
_COUNTER_BYTES, _DONE = 8 * COUNTER_WORDS, 64
_SPIN = 4000  # pauses before a thread sleeps (about 50 us)
_IDLE_SPIN = 40000  # the same between two runs: waking up takes about as long as the host's part of a speculative step

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
_WAIT, _WAKE = 128, 129  # private futex operations
_EVERYONE = 2**31 - 1

if _FUTEX:

    @inner
    def _sleep(address: int, value: int) -> None:
        """Sleep until woken, unless the low 32 bits at `address` are no longer `value`."""
        system_call(_FUTEX, address, _WAIT, value & 0xFFFFFFFF, 0, 0, 0)

    @inner
    def _wake(address: int) -> None:
        system_call(_FUTEX, address, _WAKE, _EVERYONE, 0, 0, 0)

else:  # no futex: give the core away and look again

    @inner
    def _sleep(address: int, value: int) -> None:
        give_way()

    @inner
    def _wake(address: int) -> None:
        pass


@inner
def _claim(word: int, epoch: int, chunks: int, threads: int) -> tuple[int, int]:
    """Next chunk of the phase and how many to take: a thread's share of what is left, at most 7/8 of its share of all.

    Neighbouring chunks are one stream of weights, which a prefetch runs ahead in and nothing has to begin anew. The
    rest evens out what one thread is slower by.
    Instead of a chunk -1 - (its chunks) when none is left, CLOSED when the run is over.
    """
    while True:
        seen = atomic_load(word)
        if seen >> CHUNK_BITS != epoch:
            return CLOSED, 0
        chunk = seen & ((1 << CHUNK_BITS) - 1)
        if chunk >= CLOSED:
            return CLOSED - chunk - 1, 0
        count = max(1, min(7 * chunks // (8 * threads), (chunks - chunk) // threads))
        closed = (epoch << CHUNK_BITS) + CLOSED + chunks
        after = seen + count if chunk + count < chunks else closed
        if atomic_swap_if(word, seen, after) == seen:
            return (chunk, count) if chunks > 0 else (-1, 0)


@inner
def _wait_done(done: int, chunks: int, control: int, epoch: int) -> None:
    spins = 0
    while atomic_load(done) < chunks and atomic_load(control + EPOCH) == epoch:
        spin_hint(0)
        spins += 1
        if spins > _SPIN:
            atomic_add(control + SLEEPERS, 1)
            value = atomic_load(done)
            if value < chunks and atomic_load(control + EPOCH) == epoch:
                _sleep(done, value)
            atomic_add(control + SLEEPERS, -1)


@inner
def _job_chunks(job: int) -> int:
    factor = load_i64(job + 24)
    return load_i64(job + 16) * (load_i64(factor) if factor != 0 else 1)


@inner
def _run_chunk(phase: int, chunk: int, thread: int) -> None:
    job = load_i64(phase + 8)
    chunks = _job_chunks(job)
    while chunk >= chunks:
        chunk -= chunks
        job += _JOB_BYTES
        chunks = _job_chunks(job)
    call_job(load_i64(job), load_i64(job + 8), chunk, thread)


@inner
def _run_prologue(phase: int, thread: int) -> None:
    entry = load_i64(phase + 24)
    for _ in range(load_i64(phase + 16)):
        call_job(load_i64(entry), load_i64(entry + 8), 0, thread)
        entry += _PROLOGUE_BYTES


@inner
def _run_phase(phase: int, counter: int, control: int, epoch: int, thread: int) -> bool:
    chunks = 0
    job = load_i64(phase + 8)
    for _ in range(load_i64(phase)):
        chunks += _job_chunks(job)
        job += _JOB_BYTES
    first, threads = True, load_i64(control + THREADS)
    while True:
        chunk, count = _claim(counter, epoch, chunks, threads)
        if chunk == CLOSED:
            return False
        if chunk < 0:
            break
        if first:
            _run_prologue(phase, thread)
            first = False
        for next_one in range(chunk, chunk + count):
            _run_chunk(phase, next_one, thread)
        done = atomic_add(counter + _DONE, count) + count
        if done == chunks and atomic_load(control + SLEEPERS) > 0:
            _wake(counter + _DONE)
    _wait_done(counter + _DONE, -1 - chunk, control, epoch)
    return True


@inner
def _run_tape(control: int, tape: int, epoch: int, thread: int) -> None:
    phase, counter = load_i64(tape + 8), load_i64(tape + 16)
    for _ in range(load_i64(tape)):
        if not _run_phase(phase, counter, control, epoch, thread):
            return
        phase += _PHASE_BYTES
        counter += _COUNTER_BYTES


@inner
def _begin(control: int, tape: int) -> None:
    epoch = atomic_load(control + EPOCH) + 1
    counter = load_i64(tape + 16)
    for _ in range(load_i64(tape)):
        atomic_store(counter + _DONE, 0)
        atomic_store(counter, epoch << CHUNK_BITS)
        counter += _COUNTER_BYTES
    atomic_store(control + TAPE, tape)
    atomic_store(control + EPOCH, epoch)
    if atomic_load(control + IDLE) > 0:
        _wake(control + EPOCH)


def _start(control: int, tape: int) -> None:
    """Let the workers begin to replay a tape; every start is followed by a `_join`, before any other."""
    _begin(control, tape)


@inner
def _join_tape(control: int, tape: int) -> None:
    _run_tape(control, tape, atomic_load(control + EPOCH), 0)


def _join(control: int, tape: int) -> None:
    """Help as thread 0 with a tape that was started, and return when its last phase is done."""
    _join_tape(control, tape)


def _run(control: int, tape: int) -> None:
    """Replay a tape as thread 0 and return when its last phase is done."""
    _begin(control, tape)
    _join_tape(control, tape)


def _work(control: int, thread: int) -> None:
    """Life of a worker: wait for a new epoch, help with its tape, until told to stop."""
    seen = 0
    while True:
        spins = 0
        while atomic_load(control + EPOCH) == seen:
            spin_hint(0)
            spins += 1
            if spins > _IDLE_SPIN:
                atomic_add(control + IDLE, 1)
                if atomic_load(control + EPOCH) == seen:
                    _sleep(control + EPOCH, seen)
                atomic_add(control + IDLE, -1)
        seen = atomic_load(control + EPOCH)
        if atomic_load(control + STOP) != 0:
            return
        _run_tape(control, atomic_load(control + TAPE), seen, thread)


def _stop(control: int) -> None:
    """Tell every worker to return."""
    atomic_store(control + STOP, 1)
    atomic_add(control + EPOCH, 1)
    _wake(control + EPOCH)


RUN = Kernel(_run, 2)
START = Kernel(_start, 2)
JOIN = Kernel(_join, 2)
WORK = Kernel(_work, 2)
STOP_ALL = Kernel(_stop, 1)
KERNELS = (RUN, START, JOIN, WORK, STOP_ALL)
