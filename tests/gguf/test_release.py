"""Memory of a mapped tensor can be given back and comes back from the file."""

from pathlib import Path

import numpy as np
import pytest

from sparkinfer.gguf import open_gguf

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "qwen35-tiny256-Q4_K_M.gguf"


def test_a_released_tensor_reads_as_before():
    with open_gguf(GOLDEN) as file:
        for name in file.tensors:
            before = file.data(name).copy()
            file.release(name)
            assert np.array_equal(file.data(name), before), name


def test_releasing_takes_the_pages_out_of_memory():
    rollup = Path("/proc/self/smaps")
    if not rollup.exists():
        pytest.skip("needs /proc/self/smaps")

    def resident() -> int:
        lines = rollup.read_text().split(GOLDEN.name, 1)[1].splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

    with open_gguf(GOLDEN) as file:
        assert sum(int(file.data(name).sum()) for name in file.tensors) > 0
        touched = resident()
        for name in file.tensors:
            file.release(name)
        assert touched * 1024 > GOLDEN.stat().st_size // 2
        assert resident() < touched // 2
