"""Which backend a model is loaded on: the GPU where there is one and the means to use it, else the CPU."""

from importlib.util import find_spec
from pathlib import Path
from typing import cast

from sparkinfer.backend.base import Backend
from sparkinfer.errors import DeviceError

_DRIVER = Path("/proc/driver/nvidia/version")


def choose_backend(device: str, *, isa: str, threads: int, cache_dir: Path) -> tuple[Backend, str]:
    """The backend for `device` (auto, cpu, cuda or cuda:N), and why it was taken.

    Raises DeviceError where a GPU is asked for and cannot be had.
    """
    missing = "" if device == "cpu" else why_no_gpu(device)
    if device.startswith("cuda") and missing:
        raise DeviceError(f"device {device} is not usable here: {missing}; device cpu is")
    if device == "cpu" or missing:
        reason = "as asked" if device == "cpu" else missing
        return _cpu(isa, threads, cache_dir), reason
    from sparkinfer.backend.cuda import CudaBackend

    reason = "a GPU is here" if device == "auto" else "as asked"
    name = "cuda" if device == "auto" else device
    return cast(Backend, CudaBackend(name)), reason


def _cpu(isa: str, threads: int, cache_dir: Path) -> Backend:
    """The compiler is only imported for the CPU."""
    from sparkinfer.backend.compiled import set_cache_root
    from sparkinfer.backend.cpu import CpuBackend
    from sparkinfer.backend.isa import choose_isa

    set_cache_root(cache_dir)
    return cast(Backend, CpuBackend(choose_isa(isa), threads))


def why_no_gpu(device: str = "cuda") -> str:
    """What stands between this process and a GPU (cuda:N: that one); empty when nothing does. torch is only imported
    beside a driver.
    """
    if not _DRIVER.exists() and not Path("/dev/nvidiactl").exists():
        return "no NVIDIA driver is running"
    for name in ("torch", "triton"):
        if find_spec(name) is None:
            return f"{name} is not installed (the extra 'cuda' brings it)"
    from sparkinfer.backend.cuda import usable

    return usable(int(device.partition(":")[2] or 0))
