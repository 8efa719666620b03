"""The replay loop: every chunk exactly once, phases in order, late threads harmless, threads gone after close."""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import golden_models as gm
import numpy as np
import pytest

from sparkinfer.backend.compiled import job, set_cache_root
from sparkinfer.backend.cpu import CpuBackend, Job
from sparkinfer.backend.isa import choose_isa
from sparkinfer.backend.simd import atomic_add, load_i64, store_i64
from sparkinfer.options import resolve

set_cache_root(resolve({}).path("cache_dir"))


@job
def count_chunk(args: int, chunk: int, thread: int) -> None:
    """args: counters of this phase, of the phase before, address of how many of those must be set, errors."""
    atomic_add(load_i64(args) + 8 * chunk, 1)
    before = load_i64(args + 8)
    for i in range(load_i64(load_i64(args + 16))):
        if load_i64(before + 8 * i) == 0:
            atomic_add(load_i64(args + 24), 1)


@job
def set_word(args: int, chunk: int, thread: int) -> None:
    """args: address, value."""
    store_i64(load_i64(args), load_i64(args + 8))


@job
def copy_private(args: int, chunk: int, thread: int) -> None:
    """A prologue. args: source word, copies of the threads, distance."""
    store_i64(load_i64(args + 8) + thread * load_i64(args + 16), load_i64(load_i64(args)))


@job
def add_private(args: int, chunk: int, thread: int) -> None:
    """args: copies of the threads, distance, sum."""
    atomic_add(load_i64(args + 16), load_i64(load_i64(args) + thread * load_i64(args + 8)))


@contextmanager
def backend(threads: int) -> Iterator[CpuBackend]:
    made = CpuBackend(choose_isa(), threads)
    yield made
    made.close()


@contextmanager
def busy_core(count: int = 1) -> Iterator[None]:
    """Python threads that take the GIL and a core, so that workers lose theirs at any point."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(500))

    threads = [threading.Thread(target=spin) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class Counted:
    """A tape of phases that count their chunks; the number of chunks of phase i is words[i]."""

    def __init__(self, owner: CpuBackend, phases: int, most: int) -> None:
        self.words = np.ones(phases + 1, np.int64)
        self.counts = np.zeros((phases + 1, most), np.int64)
        self.errors = np.zeros(1, np.int64)
        recorder = owner.recorder(1)
        for i in range(1, phases + 1):
            args = (self.at(self.counts, i), self.at(self.counts, i - 1), self.at(self.words, i - 1),
                    self.at(self.errors, 0))  # fmt: skip
            recorder.phase([Job(count_chunk, args, 1, self.at(self.words, i))])
        self.tape = recorder.finish()

    @staticmethod
    def at(array: np.ndarray, index: int) -> int:
        return int(array.ctypes.data) + index * array.strides[0]

    def run(self, chunks: list[int]) -> None:
        self.expect(chunks)
        self.tape.replay()
        self.check()

    def expect(self, chunks: list[int]) -> None:
        self.counts[:] = 0
        self.counts[0, 0] = self.words[0] = 1
        self.words[1:] = chunks

    def check(self) -> None:
        wanted = np.arange(self.counts.shape[1]) < self.words[:, None]
        np.testing.assert_array_equal(self.counts, wanted)
        assert self.errors[0] == 0, "a chunk ran before the phase before it was done"


@pytest.mark.parametrize("threads", [1, 2, 4, 9])
def test_every_chunk_runs_once_and_after_the_phase_before(threads):
    rng = np.random.default_rng(threads)
    with backend(threads) as owner:
        counted = Counted(owner, phases=12, most=300)
        for _ in range(300):
            counted.run(rng.choice([0, 1, 2, 3, 7, 40, 300], 12).tolist())


def test_a_tape_without_phases_and_one_without_chunks_return():
    with backend(2) as owner:
        owner.recorder(1).finish().replay()
        Counted(owner, phases=3, most=1).run([0, 0, 0])


@pytest.mark.parametrize("threads", [2, 4])
def test_counts_that_change_between_runs_and_phases_never_mislead_a_late_thread(threads):
    """Two tapes in turn on busy cores, one counter word for all phases: a late thread would see a larger count."""
    with backend(threads) as owner, busy_core(2):
        word, total = np.zeros(1, np.int64), np.zeros(64, np.int64)
        none = np.zeros(1, np.int64)
        sizes = ([1, 40, 2, 33, 1, 64], [50, 1, 30, 2])
        tapes = []
        for counts in sizes:
            recorder = owner.recorder(1)
            for count in counts:
                recorder.phase([Job(set_word, (Counted.at(word, 0), count), 1)])
                args = (Counted.at(total, 0), 0, Counted.at(none, 0), 0)
                recorder.phase([Job(count_chunk, args, 1, Counted.at(word, 0))])
            tapes.append(recorder.finish())
        wanted = np.zeros(64, np.int64)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            for counts, tape in zip(sizes, tapes, strict=True):
                tape.replay()
                word[0] = 64  # what the parameters of the next run do
                for count in counts:
                    wanted[:count] += 1
        np.testing.assert_array_equal(total, wanted)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_prologue_runs_in_every_thread_that_takes_part(threads):
    with backend(threads) as owner, busy_core():
        source, copies = np.zeros(1, np.int64), np.zeros((threads, 8), np.int64)
        result = np.zeros(1, np.int64)
        recorder = owner.recorder(1)
        recorder.prologue(Job(copy_private, (Counted.at(source, 0), Counted.at(copies, 0), 64), 1))
        recorder.phase([Job(add_private, (Counted.at(copies, 0), 64, Counted.at(result, 0)), 37)])
        tape = recorder.finish()
        for value in range(1, 2000):
            source[0], result[0] = value, 0
            tape.replay()
            assert result[0] == 37 * value


def test_joined_phases_are_one_and_a_prologue_needs_a_phase():
    with backend(1) as owner:
        recorder = owner.recorder(1)
        zero = Job(set_word, (Counted.at(np.zeros(2, np.int64), 0), 1), 1)
        with recorder.together():
            recorder.phase([zero])
            recorder.phase([zero])
        assert recorder.finish().n_phases == 1
        recorder.prologue(zero)
        with pytest.raises(AssertionError, match="without a phase"):
            recorder.finish()


def test_close_joins_the_threads_and_may_be_called_again():
    before = threading.active_count()
    owner = CpuBackend(choose_isa(), 4)
    workers = list(owner._workers)
    Counted(owner, phases=3, most=9).run([9, 9, 9])
    assert threading.active_count() == before + 3
    owner.close()
    owner.close()
    assert threading.active_count() == before and not any(w.is_alive() for w in workers)


def test_a_backend_that_nobody_closed_leaves_no_thread_in_freed_memory():
    owner = CpuBackend(choose_isa(), 3)
    workers = list(owner._workers)
    counted = Counted(owner, phases=3, most=9)
    counted.run([9, 9, 9])
    del owner, counted
    gc.collect()
    for worker in workers:
        worker.join(5)
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("name", ["qwen3-tiny-Q8_0", "qwen35moe-tiny-F32"])
@pytest.mark.parametrize("threads", [2, 4])
def test_thousands_of_replays_on_busy_cores_give_the_same_bits(name, threads):
    """Windows and chunks of mixed widths: each width is a tape of its own with other chunk counts."""
    model, rng = gm.target(name, threads=threads), np.random.default_rng(threads)
    alone = gm.single_rows(name, "int8", 560)
    end = time.monotonic() + 1.5
    with busy_core():
        while time.monotonic() < end:
            state = model.new_state()
            while state.length < 490:
                width, verify = int(rng.choice([1, 3, 8, 16, 64])), bool(rng.integers(2))
                verify &= width <= model.max_width
                start = state.length
                window = gm.tokens(560)[start : start + width]
                rows = model.forward(state, window, rows="all", verify=verify)
                gm.assert_same_bits(rows, alone[start : start + width], f"{width} after {start}")
                if verify:
                    state.commit(width)


def test_two_targets_in_two_threads_do_not_disturb_each_other():
    names = ("llama-tiny-F32", "qwen35moe-tiny-F32")
    wanted = {name: gm.single_rows(name, "int8", 100) for name in names}
    failures: list[BaseException] = []

    def run(name: str) -> None:
        try:
            model = gm.target(name)
            for _ in range(10):
                state = model.new_state()
                for start in range(0, 100, 5):
                    part = gm.tokens(100)[start : start + 5]
                    rows = model.forward(state, part, rows="all")
                    gm.assert_same_bits(rows, wanted[name][start : start + 5], name)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_is_started_runs_to_its_end_before_anything_else(threads):
    """Started and waited for, started twice, or started and followed by a replay."""
    rng = np.random.default_rng(threads)
    with backend(threads) as owner:
        first, second = Counted(owner, phases=5, most=40), Counted(owner, phases=3, most=40)
        for turn in range(300):
            for counted, phases in ((first, 5), (second, 3)):
                counted.expect(rng.choice([0, 1, 2, 7, 40], phases).tolist())
            first.tape.start()
            if turn % 3 == 0:
                owner.wait()
                owner.wait()
                first.check()
                second.tape.replay()
            elif turn % 3 == 1:
                second.tape.replay()
            else:
                second.tape.start()
                owner.wait()
            first.check()
            second.check()


def test_close_while_something_was_started():
    owner = CpuBackend(choose_isa(), 2)
    counted = Counted(owner, phases=50, most=200)
    counted.expect([200] * 50)
    counted.tape.start()
    owner.close()
    owner.wait()
    assert not any(worker.is_alive() for worker in owner._workers)
