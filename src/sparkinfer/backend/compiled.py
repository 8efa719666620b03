"""Compile kernels with Numba on first use and keep the machine code on disk.

The cache folder's name is a hash of every source file that can reach a kernel, so an edit anywhere compiles anew while
an unchanged second start only loads. Numba itself keys each entry by CPU and signature.
"""

import ctypes
import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
from numba import types
from numba.core import config

from sparkinfer.backend.sources import hash_sources
from sparkinfer.errors import OptionError

_KEEP = 6  # cache folders of other versions kept beside the current one
_root: Path | None = None


def set_cache_root(path: Path) -> None:
    """Folder for compiled code; call before the first kernel is compiled."""
    global _root
    _root = path


@functools.cache
def source_hash() -> str:
    """Hash of what the CPU runs and of its compilers' versions."""
    return hash_sources(f"{numba.__version__} {llvmlite.__version__}", gpu=False)


@functools.cache
def cache_folder() -> Path | None:
    """The folder in use, created; None when no cache root was set (then every process compiles).

    Raises OptionError when it cannot be created.
    """
    if _root is None:
        return None
    folder = _root / f"kernels-{source_hash()}"
    if not folder.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"cannot make a folder for compiled code in {_root} ({error.strerror}); --cache-dir names another"
            ) from error
        old = sorted(_root.glob("kernels-*"), key=lambda p: p.stat().st_mtime)[:-_KEEP]
        for stale in old:
            shutil.rmtree(stale, ignore_errors=True)
    return folder


_F = TypeVar("_F", bound=Callable[..., Any])


def inner(function: _F) -> _F:
    """For functions that only compiled code calls: without entry points for Python and C a first start takes a fifth
    less.
    """
    compiled: _F = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(
        function
    )
    return compiled


@contextmanager
def _kept() -> Iterator[bool]:
    """While inside, Numba keeps what it compiles in our folder; False where there is none."""
    folder, before = cache_folder(), config.CACHE_DIR
    config.CACHE_DIR = str(folder or "")
    try:
        yield folder is not None
    finally:
        config.CACHE_DIR = before


class Kernel:
    """A function compiled to a C entry point when its address is first asked for."""

    def __init__(self, function: Callable[..., None], signature: Any) -> None:
        self._function = function
        self._signature = signature
        self.name = function.__qualname__

    @functools.cached_property
    def _compiled(self) -> Any:
        with _kept() as keep:
            decorate = numba.cfunc(self._signature, cache=keep, error_model="numpy")
            return decorate(self._function)

    @functools.cached_property
    def address(self) -> int:
        """Address of the machine code; compiles or loads it. The call from Python runs without the GIL."""
        return int(self._compiled.address)

    def native(self, n_args: int) -> Callable[..., None]:
        """A Python callable of `n_args` integers that releases the GIL while it runs."""
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * n_args)(self.address)


JOB = types.void(types.int64, types.int64, types.int64)
TILES = types.void(*[types.int64] * 7)


def job(function: Callable[[int, int, int], None]) -> Kernel:
    """Declare a CPU job `f(args, chunk, thread)`: `args` is the address of its int64 arguments."""
    return Kernel(function, JOB)


class Routine:
    """A function of arrays and numbers that Python calls, compiled when `call` is first asked for.

    What it calls has to be in its own file: the cache's name tells nothing of other folders' sources, and Numba looks
    at that file only.
    """

    def __init__(self, function: Callable[..., Any], signature: Any) -> None:
        self._function, self._signature = function, signature

    def prepare(self) -> None:
        """Compile or load it now, where that keeps nobody waiting."""
        _ = self.call

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        """The compiled function. Arrays have to be of the signature's kinds and contiguous."""
        with _kept() as keep:
            decorate = numba.njit(
                self._signature, cache=keep, error_model="numpy", no_cfunc_wrapper=True
            )
            compiled: Callable[..., Any] = decorate(self._function)
            return compiled


def routine(signature: Any) -> Callable[[Callable[..., Any]], Routine]:
    """Declare a `Routine` of this signature."""
    return lambda function: Routine(function, signature)


VECTOR, MATRIX, CUBE = (types.Array(types.float64, n, "C") for n in (1, 2, 3))
