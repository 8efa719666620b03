"""Hashes of the kernels' sources: they name caches and tell records which code ran."""

import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_FOLDERS = ("backend", "kernels", "quant")


def _of_gpu(path: Path) -> bool:
    return path.name.startswith("triton_") or path.name == "cuda.py"


def hash_sources(versions: str, *, gpu: bool) -> str:
    """Hash of every source file that can reach a kernel of the CPU (or of the GPU), and of the compilers' versions.

    Layouts of packed weights are source too: kernels are generated from them.
    """
    digest = hashlib.sha256(versions.encode())
    for folder in _FOLDERS:
        for file in sorted((_PACKAGE / folder).rglob("*.py")):
            if _of_gpu(file) == gpu or file.name in ("__init__.py", "base.py"):
                digest.update(str(file.relative_to(_PACKAGE)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
