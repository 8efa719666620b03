"""Triton's keys, once settled, are the same whichever kernel is asked first."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

MODULE = """
import triton
import triton.language as tl

SIZE = tl.constexpr(16)

@triton.jit
def inner(x):
    return x + SIZE

@triton.jit
def middle(x):
    return inner(x)

@triton.jit
def first_kernel(x):
    tl.store(x, middle(tl.load(x)))

@triton.jit
def second_kernel(x):
    tl.store(x, inner(tl.load(x)))
"""
SCRIPT = """
import sys
import jitted
from sparkinfer.backend.kernel_keys import settle_key

how, *names = sys.argv[1:]
settled = set()
for name in names:
    if how == "settled":
        settle_key(getattr(jitted, name), settled)
    getattr(jitted, name).cache_key
print(jitted.first_kernel.cache_key, jitted.second_kernel.cache_key)
"""


def keys(folder, *words):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "jitted.py").write_text(MODULE)
    return tmp_path


def test_settled_keys_do_not_depend_on_what_was_asked_first(folder):
    found = [
        keys(folder, "settled", *names)
        for names in (
            ["first_kernel", "second_kernel"],
            ["second_kernel", "first_kernel"],
            ["first_kernel"],
        )
    ]
    assert len(found[0]) == 2
    assert found[1] == found[0]
    assert found[2][0] == found[0][0]


def test_settled_keys_are_those_of_functions_asked_from_the_inside_out(folder):
    assert keys(folder, "settled", "first_kernel") == keys(
        folder, "plain", "inner", "middle", "first_kernel"
    )
