"""Choose the instruction set of the CPU kernels, before anything compiles: LLVM aborts on a foreign intrinsic."""

import platform
from dataclasses import dataclass

from sparkinfer.backend.objects import features
from sparkinfer.errors import OptionError


@dataclass(frozen=True)
class Isa:
    """Instruction set of the integer dot products: `lanes` output rows per weight tile, and why it was chosen."""

    name: str
    lanes: int
    reason: str


_NEEDS = {"vnni512": ("avx512f", "avx512bw", "avx512vnni"), "avx2": ("avx2",), "portable": ()}
_LANES = {"vnni512": 16, "avx2": 8, "portable": 16}


def cpu_features() -> frozenset[str]:
    """Features LLVM will compile for: the host's, or those of NUMBA_CPU_FEATURES."""
    return frozenset(f[1:] for f in features().split(",") if f.startswith("+"))


def choose_isa(wanted: str = "auto") -> Isa:
    """Resolve `wanted` (auto, vnni512, avx2 or portable). Raises OptionError for one this CPU cannot run."""
    present = cpu_features()
    if wanted == "auto":
        for name, needs in _NEEDS.items():
            if present.issuperset(needs):
                found = ", ".join(needs) or "no x86 vector extension found"
                return Isa(name, _LANES[name], f"{platform.machine()}: {found}")
    if wanted not in _NEEDS:
        raise OptionError(
            f"unknown instruction set '{wanted}'; accepted: auto, {', '.join(_NEEDS)}"
        )
    missing = [f for f in _NEEDS[wanted] if f not in present]
    if missing:
        raise OptionError(
            f"instruction set '{wanted}' needs {', '.join(missing)}, which this CPU does not have"
        )
    return Isa(wanted, _LANES[wanted], "forced by the option isa")
