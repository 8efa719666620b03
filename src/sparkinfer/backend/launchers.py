"""How Triton's launchers are built: small C extensions, one for each list of argument types.

Triton builds one when a kernel is first loaded, and modules of one name cannot be loaded side by side. So loading takes
turns, but a thread that waits for the C compiler lets others have theirs.
"""

import shutil
import subprocess
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class Turns:
    """A lock that `build` lets go of meanwhile."""

    def __init__(self, compiler: str | None = None) -> None:
        """`compiler`: a C compiler (default: the one that is found)."""
        self._compiler = compiler
        self._lock, self._mine = threading.Lock(), threading.local()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """One thread at a time, but for the time it is in `build`."""
        with self._lock:
            self._mine.held = True
            try:
                yield
            finally:
                self._mine.held = False

    def build(
        self,
        name: str,
        source: str,
        folder: str,
        library_dirs: Sequence[str],
        include_dirs: Sequence[str | None],
        libraries: Sequence[str],
        flags: Sequence[str] = (),
    ) -> str:
        """Build an extension module `name` of a C file in `folder`; its path. What `triton.knobs.build.impl` is called
        with. Raises RuntimeError without a C compiler, CalledProcessError where it fails.
        """
        held = getattr(self._mine, "held", False)
        if held:
            self._lock.release()
        try:
            compiler = self._compiler or shutil.which("gcc") or shutil.which("clang")
            if compiler is None:
                raise RuntimeError("Triton needs a C compiler (gcc or clang), and there is none")
            out = str(Path(folder) / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}")
            headers = [path for path in (folder, _headers(), *include_dirs) if path is not None]
            command = [compiler, source, "-O1", "-shared", "-fPIC", "-Wno-psabi", "-o", out]
            command += [_library_flag(name) for name in libraries]
            command += [f"-L{path}" for path in library_dirs] + [f"-I{path}" for path in headers]
            subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
            return out
        finally:
            if held:
                self._lock.acquire()


def _headers() -> str:
    """Python's. A system's own scheme names a folder for what is installed beside it."""
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]


def _library_flag(name: str) -> str:
    return f"-l:{name}" if ".so" in name or name.endswith(".a") else f"-l{name}"
