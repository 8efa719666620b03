"""The second lane of a recording: what waits for what, memory of its own, and that a graph of both gives the same."""

import gpu_machine as gpu
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from sparkinfer.backend.triton_steps import Fork, Join, Launch, Mark

ROWS = 20


@triton.jit
def add_kernel(x, y, out, count, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """out = x + STEPS y, slowly."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < count, other=0.0)
    for _ in range(STEPS):
        value += tl.load(y + i, mask=i < count, other=0.0)
    tl.store(out + i, value, mask=i < count)


def add(recorder, x, y, out, steps=1):
    recorder.launch(
        add_kernel, (8,), x.array, y.array, out.array, 8192, STEPS=steps, BLOCK=1024, overlap=False
    )


def buffers(count):
    return [gpu.filled(np.full((8, 1024), i + 1, np.float32)) for i in range(count)]


def kinds(recorder):
    return ["aside" if getattr(s, "aside", False) else type(s).__name__ for s in recorder.steps]


def test_a_reader_waits():
    recorder, (a, b, c, d) = gpu.backend().recorder(ROWS), buffers(4)
    with recorder.aside(c):
        add(recorder, a, b, c)
    add(recorder, a, b, d)
    add(recorder, c, b, d)
    add(recorder, c, b, d)
    assert kinds(recorder) == ["Fork", "aside", "Mark", "Launch", "Join", "Launch", "Launch"]


def test_a_view_of_a_result_is_one_too():
    recorder, (a, b, c, d) = gpu.backend().recorder(ROWS), buffers(4)
    with recorder.aside(c):
        add(recorder, a, b, c)
    add(recorder, c.part(3, 2), b, d)
    assert kinds(recorder)[-2:] == ["Join", "Launch"]


def test_what_comes_late_starts_at_the_release():
    recorder, (a, b, c, d) = gpu.backend().recorder(ROWS), buffers(4)
    with recorder.aside(c, late=True):
        add(recorder, a, b, c)
    add(recorder, a, b, d)
    recorder.release()
    add(recorder, a, b, d)
    add(recorder, c, b, d)
    assert kinds(recorder) == ["Launch", "Fork", "aside", "Mark", "Launch", "Join", "Launch"]


def test_what_nobody_released_starts_before_its_reader_and_what_nobody_read_is_waited_for():
    recorder, (a, b, c, d) = gpu.backend().recorder(ROWS), buffers(4)
    with recorder.aside(c, late=True):
        add(recorder, a, b, c)
    add(recorder, c, b, d)
    assert kinds(recorder) == ["Fork", "aside", "Mark", "Join", "Launch"]
    with recorder.aside(c, late=True):
        add(recorder, a, b, c)
    assert kinds(gpu_tape(recorder))[-4:] == ["Fork", "aside", "Mark", "Join"]


def gpu_tape(recorder):
    return recorder.finish()


def test_a_later_result_brings_the_earlier_ones():
    recorder, (a, b, c, d) = gpu.backend().recorder(ROWS), buffers(4)
    with recorder.aside(c):
        add(recorder, a, b, c)
    with recorder.aside(d):
        add(recorder, a, b, d)
    add(recorder, d, b, a)
    add(recorder, c, b, a)
    assert kinds(recorder).count("Join") == 1
    assert [s.mark for s in recorder.steps if isinstance(s, Join)] == [
        [s for s in recorder.steps if isinstance(s, Mark)][-1]
    ]


def test_lanes_share_no_scratch_memory():
    recorder, (a,) = gpu.backend().recorder(ROWS), buffers(1)
    first = recorder.scratch("lanes", 8)
    with recorder.aside(a):
        assert recorder.scratch("lanes", 8).data_ptr() != first.data_ptr()
    assert recorder.scratch("lanes", 8).data_ptr() == first.data_ptr()


def test_few_rows_have_one_lane():
    assert not gpu.backend().recorder(16).lanes
    assert gpu.backend().recorder(17).lanes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_graph_of_both_lanes_gives_what_one_lane_gives(monkeypatch):
    """Long launches aside, whose results are read at once, many times."""
    monkeypatch.setattr(gpu.backend(), "chunk", ROWS)
    a, b, c, d, e = buffers(5)
    recorder = gpu.backend().recorder(ROWS)
    for _ in range(20):
        with recorder.aside(c):
            add(recorder, a, b, c, 2000)
        with recorder.aside(d, late=True):
            add(recorder, c, b, d, 2000)
        add(recorder, a, b, e, 10)
        recorder.release()
        add(recorder, e, c, e)
        add(recorder, d, e, a)
    tape = recorder.finish()
    assert [step for step in tape.steps if isinstance(step, Fork)]
    kept = [x.array.clone() for x in (a, b, c, d, e)]
    for step in tape.steps:
        step.run()
    gpu.backend().wait()
    wanted = [x.array.clone() for x in (a, b, c, d, e)]
    for _ in range(3):
        for x, before in zip((a, b, c, d, e), kept, strict=True):
            x.array.copy_(before)
        tape.replay()
        gpu.backend().wait()
        for x, right in zip((a, b, c, d, e), wanted, strict=True):
            assert torch.equal(x.array, right)
    assert all(isinstance(s, Launch | Fork | Mark | Join) for s in tape.steps)
