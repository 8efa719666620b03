"""The mixers' kernels compiled for an H200 at the real models' shapes: no compile error, no spill beyond what is known.

The compiling runs in a process of its own, because Triton is either the compiler or the interpreter of a process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compile_sm90 import TOOLS

SHARED = 232448  # bytes of shared memory that one program may have
CASES = Path(__file__).with_name("compile_mixers_cases.py")
KNOWN_STACK = {
    "wide_kernel": 448,
    "chunk_kernel": 1024,
    "scan_kernel": 512,
}  # bytes a thread keeps outside its registers


@pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="this Triton carries no ptxas")
def test_every_kernel_compiles_and_fits():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(CASES.parent.parent), *filter(None, [environment.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(CASES)], env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= 20
    for name, resources in found:
        assert resources["STACK"] <= KNOWN_STACK.get(name, 0), (name, resources)
        assert resources["SHARED"] <= SHARED, (name, resources)
        assert resources["UNSET"] == resources["MISLED"] == 0, (name, resources)
