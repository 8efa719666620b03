"""Load object code that was compiled before: LLVM's loader alone, without Numba."""

import functools
import hashlib
import threading
from typing import Any

import llvmlite.binding as llvm

from sparkinfer.options import compiler_setting

_lock = threading.Lock()
_kept: list[Any] = []  # object files that the loader still refers to


@functools.cache
def _engine() -> Any:
    """LLVM's loader. It is never freed: code that it loaded may run in any thread."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    machine = target.create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


@functools.cache
def features() -> str:
    """What code may use of the CPU, as LLVM writes it: the host's, or those of NUMBA_CPU_FEATURES."""
    return compiler_setting("CPU_FEATURES") or str(llvm.get_host_cpu_features().flatten())


@functools.cache
def cpu() -> str:
    """A short name of the CPU that code is compiled for, with what it has and has not."""
    name = compiler_setting("CPU_NAME") or llvm.get_host_cpu_name()
    return hashlib.sha256(f"{name} {features()}".encode()).hexdigest()[:8]


def load(code: bytes, symbol: str) -> int:
    """The address of the function `symbol` of object code. Names must differ between all that a process loads."""
    with _lock:
        file = llvm.ObjectFileRef.from_data(code)
        _engine().add_object_file(file)
        _engine().finalize_object()
        _kept.append(file)
        return int(_engine().get_function_address(symbol))
