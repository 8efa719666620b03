"""Compile Triton kernels for an H200 on a machine without one: what the interpreter accepts, the compiler may not.

Runs in a process of its own, without the interpreter.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from sass import misled_products, unset_registers
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia

from sparkinfer.backend.base import Activation, Buffer, CacheFormat
from sparkinfer.backend.cuda import CudaRecorder

TOOLS = Path(nvidia.__file__).parent / "bin"


class Target:
    """As much of a Triton driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class Owner:
    """As much of a CudaBackend as recording needs. Memory is never read or written."""

    name, sms, interpreted, overlaps = "cuda", 132, False, True
    warpgroups = False  # kernels in Gluon too

    def scratch(self, name: str, count: int, dtype: Any = torch.float32) -> torch.Tensor:
        return torch.empty(64, dtype=dtype)


def recorder(rows: int, *, cache_format: CacheFormat = "f16") -> CudaRecorder:
    triton.runtime.driver.set_active(Target())
    return CudaRecorder(Owner(), rows, cache_format)  # type: ignore[arg-type]


def buffer(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Buffer:
    """A buffer of this shape; what is never touched takes no memory."""
    item = torch.empty(0, dtype=dtype).element_size()
    stride = -(-width * item // 64) * 64
    storage = torch.empty((rows, stride // item), dtype=dtype)
    assert storage.data_ptr() % 16 == 0
    return Buffer(storage[:, :width], storage.data_ptr(), rows, width, stride)


def activation(rows: int, width: int, *, quantised: bool = True) -> Activation:
    q8 = buffer(rows, width + width // 4, torch.uint8) if quantised else None
    return Activation(buffer(rows, width), q8)


def resources(compiled: Any) -> dict[str, int]:
    """Registers, spill stores' bytes on the stack and shared memory of the machine code, as cuobjdump tells; UNSET is
    the number of instructions that read what nothing wrote, MISLED of products with operands from a wrong place.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        out = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        sass = subprocess.run(
            [TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", out)}
    faults = {"UNSET": len(unset_registers(sass)), "MISLED": len(misled_products(sass))}
    return {**found, "SHARED": compiled.metadata.shared, **faults}


def compile_all(recorded: CudaRecorder) -> list[tuple[str, dict[str, int], Any]]:
    """Every launch compiled: name, resources, the compiled kernel."""
    results = []
    for launch in recorded.steps:
        compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)  # type: ignore[union-attr]
        results.append((launch.kernel.fn.__name__, resources(compiled), compiled))  # type: ignore[union-attr]
    return results
