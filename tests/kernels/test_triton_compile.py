"""The matrix products' kernels compile for an H200, stay in registers and use the instructions they are for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "compile_products.py"
SPILL = 64  # bytes of stack that no loop touches
HOPPER_SPILL = 512


def compiled(part):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, part], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kernels_in_gluon_compile():
    """They may put on the stack what no product reads (addresses, mostly): `HOPPER_SPILL` bytes."""
    records = compiled("hopper")
    wanted = {"left_hidden_kernel", "left_out_kernel", "hopper_chunk_kernel", "state_kernel"}
    assert wanted <= {r["kernel"] for r in records}
    gluon = [r for r in records if r["kernel"] in wanted]
    assert not [r for r in gluon if r["STACK"] > HOPPER_SPILL or r["LOCAL"] or not r["wgmma"]]
    assert not [r for r in records if r["UNSET"] or r["MISLED"]]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["decode", "wide"])
def test_kernels_compile_without_spills(part):
    records = compiled(part)
    spilling = [r for r in records if r["STACK"] > SPILL or r["LOCAL"]]
    assert not spilling
    assert not [r for r in records if r["UNSET"] or r["MISLED"]]
    products = {
        "decode": (
            "linear_kernel",
            "gated_kernel",
            "router_gated_kernel",
            "few_hidden_kernel",
            "few_out_kernel",
        ),
        "wide": (
            "wide_kernel",
            "wide_gated_kernel",
            "halves_kernel",
            "halves_gated_kernel",
            "wide_hidden_kernel",
            "wide_out_kernel",
            "large_hidden_kernel",
            "large_out_kernel",
        ),
    }[part]
    assert set(products) <= {r["kernel"] for r in records}
    for r in records:
        if r["kernel"] in products and "F" not in r["shape"]:
            assert r["wgmma" if part == "wide" else "dp4a"], r
            assert part == "wide" or r["wide loads"], r
