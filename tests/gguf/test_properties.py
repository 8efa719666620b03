"""Row 4 at every cut, and random damage: a file opens or gives one error, in bounded memory."""

import tempfile
import time
import tracemalloc
from pathlib import Path

import pytest
from gguf_bytes import small_model, use
from hypothesis import given, settings
from hypothesis import strategies as st

CONTENT = small_model()
CRASHERS = sorted((Path(__file__).parent.parent / "data" / "crashers").glob("*.bin"))


@pytest.fixture(scope="module")
def path():
    memory = Path("/dev/shm")  # thousands of rewrites: much faster than on a disk
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder) / "m.gguf"


def test_the_whole_file_is_good(path: Path) -> None:
    path.write_bytes(CONTENT)
    assert use(path) is None


def test_row04_every_cut_is_an_error(path: Path) -> None:
    needed = len(CONTENT) - 26  # the padding behind the last tensor is not needed
    for size in range(len(CONTENT)):
        path.write_bytes(CONTENT[:size])
        error = use(path)
        assert (error is None) == (size >= needed), size
        assert error is None or f"{size:,}" in str(error)


def test_every_byte_inverted(path: Path) -> None:
    for place in range(len(CONTENT)):
        damaged = bytearray(CONTENT)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        use(path)


changes = st.lists(
    st.tuples(st.integers(0, len(CONTENT) - 1), st.integers(0, 255)), min_size=1, max_size=8
)
words = st.lists(
    st.tuples(
        st.integers(0, len(CONTENT) - 1),
        st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]),
    ),
    max_size=2,
)


@settings(max_examples=600, deadline=None)
@given(changes=changes, words=words, cut=st.integers(0, len(CONTENT)), extra=st.binary(max_size=40))
def test_random_damage(path: Path, changes: list, words: list, cut: int, extra: bytes) -> None:
    damaged = bytearray(CONTENT)
    for place, value in words:
        damaged[place : place + 8] = value.to_bytes(8, "little")
    for place, byte in changes:
        damaged[place] = byte
    damaged[cut:cut] = extra
    path.write_bytes(damaged)
    tracemalloc.start()
    start = time.process_time()
    use(path)
    seconds = time.process_time() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 1.0 and peak < 16 << 20


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=400))
def test_random_bytes_behind_the_magic(path: Path, content: bytes) -> None:
    path.write_bytes(CONTENT[:8] + content)
    use(path)


@pytest.mark.parametrize("crasher", CRASHERS, ids=lambda crasher: crasher.stem)
def test_small_files_that_broke_a_reader(crasher: Path, path: Path) -> None:
    """Inputs that crash or hang other readers, and whatever fuzzing finds in ours."""
    path.write_bytes(crasher.read_bytes())
    assert use(path) is not None
