"""What passes between a host and a device, without either: words that are watched, numbers sent in turn, launchers that
are built side by side.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.board import BEST_BITS, Board
from sparkinfer.backend.launchers import Turns
from sparkinfer.backend.mailbox import POSTS, PinnedMailbox


def word(best, finite, serial):
    return serial << BEST_BITS + 1 | finite << BEST_BITS | best


class Words:
    """A board of four rows whose device writes when it is asked whether it still runs."""

    def __init__(self, later):
        self.memory, self.later, self.waits = np.zeros((4, 2), np.int64), later, 0
        buffer = Buffer(self.memory[:, :1], 0, 4, 1, 16)
        self.board = Board(buffer, memoryview(self.memory[:, 0]), self.ended, self.waited)

    def ended(self):
        for row, value in self.later.items():
            self.memory[row, 0] = value
        return True

    def waited(self):
        self.waits += 1


def test_a_board_waits_for_its_serial():
    words = Words({1: word(248319, True, 7), 2: word(0, False, 7)})
    words.memory[1:3, 0] = word(5, True, 6)  # of a replay before
    words.board.wait(range(1, 3), 7)
    assert words.board.rows(1, 2) == [(248319, True), (0, False)]
    assert words.waits == 1


def test_a_device_that_ended_without_a_word_is_an_error():
    words = Words({0: word(1, True, 3)})
    with pytest.raises(RuntimeError, match="replay 4"):
        words.board.wait(range(1), 4)
    assert words.waits == 0


class Row(list):
    """A row of a tensor: slices share nothing, but what is copied is noted."""

    def __init__(self, log):
        super().__init__([0] * 8)
        self.log = log

    def __getitem__(self, part):
        return self

    def copy_(self, source, *, non_blocking):
        assert non_blocking
        self.log.append(source)


class Rows:
    """Pinned rows; what a device reads late is read when `read` is called."""

    def __init__(self):
        self.values = np.zeros((2 * POSTS, 8), np.int64)

    def numpy(self):
        return self.values

    def __getitem__(self, place):
        return place


class Device:
    """A backend that reads nothing before it is waited for."""

    def __init__(self):
        self.waits, self.sent, self.got = 0, [], []
        self.rows = Rows()
        self.box = PinnedMailbox(self, Row(self.sent), self.rows)

    def read(self, count):
        """The oldest messages arrive."""
        for place in self.sent[:count]:
            self.got.append(self.rows.values[place].tolist())
        del self.sent[:count]

    def wait(self):
        self.read(len(self.sent))
        self.waits += 1


def test_numbers_sent_late_arrive_whole():
    """Also where only what was sent first has been waited for."""
    device = Device()
    for number in range(5 * POSTS):
        if number % 3 == 2:  # a wait for one replay: what was sent since may still be on its way
            device.read(len(device.sent) - 1)
            device.waits += 1
        device.box.send([number, -number])
    device.wait()
    assert device.got == [[number, -number] for number in range(5 * POSTS)]


SOURCE = """
#include <Python.h>
static PyObject *number(PyObject *self, PyObject *none) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"number", number, METH_NOARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", 0, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="no C compiler")
def test_launchers_are_built_side_by_side_and_loaded_in_turns(tmp_path, monkeypatch):
    import importlib.util
    import subprocess

    turns, inside, meet = Turns(), 0, Barrier(2, timeout=60)
    run = subprocess.run

    def together(*args, **kwargs):
        meet.wait()  # passed only when both threads are at the compiler
        return run(*args, **kwargs)

    monkeypatch.setattr(subprocess, "run", together)

    def load(number):
        nonlocal inside
        folder = tmp_path / str(number)
        folder.mkdir()
        source = folder / "launcher.c"
        source.write_text(SOURCE.replace("NUMBER", str(number)))
        with turns.taken():
            path = turns.build("launcher", str(source), str(folder), [], [], [])
            inside += 1
            assert inside == 1
            spec = importlib.util.spec_from_file_location("launcher", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            inside -= 1
            return module.number()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(load, (3, 4))) == [3, 4]
    with pytest.raises(subprocess.CalledProcessError):
        monkeypatch.setattr(subprocess, "run", run)
        turns.build("launcher", str(tmp_path / "none.c"), str(tmp_path), [], [], [])
