"""Compile kernels with Numba on first use and keep the machine code on disk.

The cache folder's name is a hash of every source file that can reach a kernel and of the CPU, so an edit anywhere
compiles anew while an unchanged second start only loads object code, for which Numba is not even imported.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from itertools import count
from pathlib import Path
from struct import Struct
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend import workers
from sparkinfer.backend.instructions import inner as inner
from sparkinfer.backend.objects import cpu, load
from sparkinfer.backend.sources import hash_sources
from sparkinfer.errors import DeviceError

Origin = tuple[str, str, tuple[Any, ...], int]

_strangers = count()
_DIGEST = 32  # bytes before kept code: its hash
_SEVERAL = 3  # kernels that are worth the start of other processes
_KEEP = 6  # cache folders of other versions kept beside the current one
_root: Path | None = None


def set_cache_root(path: Path) -> None:
    """Folder for compiled code; call before the first kernel is compiled."""
    global _root
    _root = path


@functools.cache
def source_hash() -> str:
    """Hash of what the CPU runs and of its compilers' versions."""
    return hash_sources(f"{version('numba')} {version('llvmlite')}", gpu=False)


@functools.cache
def cache_folder() -> Path | None:
    """The folder in use, created; None when no cache root was set (then every process compiles).

    Raises DeviceError when it cannot be created.
    """
    if _root is None:
        return None
    folder = _root / f"kernels-{source_hash()}-{cpu()}"
    if not folder.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DeviceError(
                f"cannot make a folder for compiled code in {_root} ({error.strerror}); --cache-dir names another"
            ) from error
        old = sorted(_root.glob("kernels-*"), key=lambda p: p.stat().st_mtime)[:-_KEEP]
        for stale in old:
            shutil.rmtree(stale, ignore_errors=True)
    return folder


class Kernel:
    """A function of `n_args` int64 that is compiled to a C entry point when its address is first asked for."""

    def __init__(self, function: Callable[..., None], n_args: int) -> None:
        self.function, self.n_args = function, n_args
        self.name = function.__qualname__
        # Where another process finds it: a module, a name in it, what the function of that name is given, and which
        # of its results this is. None: nowhere, and nobody could tell its code from that of another one.
        self.origin: Origin | None = None
        if self.name.isidentifier() and function.__module__.startswith("sparkinfer."):
            self.origin = (function.__module__, self.name, (), 0)
        self._lock = threading.Lock()
        self.coming: Future[bool] | None = None
        self._address = 0

    @functools.cached_property
    def key(self) -> str:
        """Names its code among all that a process loads."""
        if self.origin is None:
            return f"{self.name}-{next(_strangers)}"
        module, name, given, place = self.origin
        words = [module.removeprefix("sparkinfer."), name, *map(str, given), str(place)]
        return "-".join(words)

    @property
    def address(self) -> int:
        """Address of the machine code; compiles or loads it. The call from Python runs without the GIL."""
        if not self._address:
            with self._lock:
                self._address = self._address or load(self._found(), self.key)
        return self._address

    @property
    def there(self) -> bool:
        """Whether its code need not be compiled any more."""
        path = self._file()
        return bool(self._address) or (path is not None and path.exists())

    def _found(self) -> bytes:
        """Its object code, from wherever it is had first."""
        code = self.code()
        if code is None and workers.running():
            ahead((self,))
        if code is None and self.coming is not None:
            self.coming.result()
            code = self.code()
        return code or self.compile()

    def code(self) -> bytes | None:
        """Its object code, where that is kept already, and whole: a loader would crash over a part."""
        path = self._file()
        try:
            kept = b"" if path is None else path.read_bytes()
        except FileNotFoundError:
            return None
        digest, code = kept[:_DIGEST], kept[_DIGEST:]
        return code if digest == hashlib.sha256(code).digest() else None

    def compile(self) -> bytes:
        """Compile it, and keep the code where that has a place. Raises DeviceError where that cannot be written."""
        code, path = self._compiled(), self._file()
        if path is not None:  # all of it or nothing: another process may look for it
            part = path.with_name(f"{path.name}.{os.getpid()}")
            try:
                part.write_bytes(hashlib.sha256(code).digest() + code)
                part.replace(path)
            except OSError as error:
                with suppress(OSError):
                    part.unlink()
                raise DeviceError(
                    f"cannot keep compiled code in {path.parent} ({error.strerror}); --cache-dir names another"
                ) from error
        return code

    def native(self, n_args: int) -> Callable[..., None]:
        """A Python callable of `n_args` integers that releases the GIL while it runs."""
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * n_args)(self.address)

    def _compiled(self) -> bytes:
        from sparkinfer.backend.frontend import object_code

        return object_code(self.function, self.n_args, self.key)

    def _file(self) -> Path | None:
        folder = cache_folder() if self.origin is not None else None
        return None if folder is None else folder / f"{self.key}.o"


def compile_all(
    kernels: Iterable[Kernel], progress: Callable[[int, int], None] | None = None
) -> None:
    """Compile what is missing, several side by side; `progress(done, total)` after each.

    When it is interrupted, what is being compiled is given up.
    """
    missing = [kernel for kernel in dict.fromkeys(kernels) if not kernel.there]
    if len(missing) >= _SEVERAL:
        ahead(missing)
    try:
        for done, kernel in enumerate(missing, 1):
            _ = kernel.address
            if progress:
                progress(done, len(missing))
    except BaseException:
        workers.abandon()
        raise


def ahead(kernels: Iterable[Kernel]) -> None:
    """Have them compiled by other processes, if they are not there or on their way; `address` waits for each.

    Those of a file share much of what they call, and go to one process.
    """
    groups: dict[Any, list[Kernel]] = {}
    for kernel in kernels:
        new = kernel.coming is None or workers.given_up(kernel.coming)
        if new and kernel.origin is not None and not kernel.there:
            module, _, given, _ = kernel.origin
            groups.setdefault((module, given), []).append(kernel)
    for group in groups.values():
        if _root is not None:
            results = workers.submit([kernel.origin for kernel in group], _root)
            for kernel, result in zip(group, results, strict=False):
                kernel.coming = result


def job(function: Callable[[int, int, int], None]) -> Kernel:
    """Declare a CPU job `f(args, chunk, thread)`: `args` is the address of its int64 arguments.

    Inside a function, that one has to be a `family`: else nobody can tell its jobs apart, and their code is not kept.
    """
    return Kernel(function, 3)


class Routine:
    """A function of arrays and numbers, compiled when it is first bound to its arrays.

    `kinds`: one a parameter, arrays ("vector", "matrix" or "cube" of float64, contiguous) before numbers ("float64" or
    "int64"). The result is one float64. What it calls has to be in its own file: the cache's name tells nothing of
    other folders' sources, its own file's name does.
    """

    def __init__(self, function: Callable[..., Any], kinds: tuple[str, ...]) -> None:
        self.function, self.kinds = function, kinds
        self.kernel = _RoutineKernel(function, kinds)
        self._dims = [DIMENSIONS[kind] for kind in kinds if kind in DIMENSIONS]
        numbers = "".join("d" if kind == "float64" else "q" for kind in kinds[len(self._dims) :])
        self.numbers = Struct(f"={numbers}")

    def bind(self, *arrays: NDArray[np.float64]) -> "Bound":
        """The function of its numbers alone. It writes to the arrays' memory, which it keeps."""
        for array, dimensions in zip(arrays, self._dims, strict=True):
            assert array.dtype == np.float64 and array.flags.c_contiguous, array.dtype
            assert array.ndim == dimensions, array.shape
        return Bound(self, arrays)


class Bound:
    """A routine with its arrays: `call(*numbers)`. A deep copy has the copies of the arrays."""

    def __init__(self, routine: Routine, arrays: tuple[NDArray[np.float64], ...]) -> None:
        self._routine, self._arrays = routine, arrays
        words = [word for array in arrays for word in (array.ctypes.data, *array.shape)]
        place, numbers = 8 * len(words), routine.numbers
        memory = bytearray(np.array(words, np.int64).tobytes() + bytes(numbers.size + 8))
        address = ctypes.c_int64(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        pack, native, result = numbers.pack_into, routine.kernel.native(1), place + numbers.size
        read = Struct("=d").unpack_from

        def call(*numbers: float) -> float:
            pack(memory, place, *numbers)
            native(address)
            value: float = read(memory, result)[0]
            return value

        self.call = call

    def __deepcopy__(self, memo: dict[int, Any]) -> "Bound":
        return self._routine.bind(*(deepcopy(array, memo) for array in self._arrays))


DIMENSIONS = {"vector": 1, "matrix": 2, "cube": 3}


class _RoutineKernel(Kernel):
    """What a routine is to compiled code: one address, of its arrays' addresses and shapes, its numbers, its result."""

    def __init__(self, function: Callable[..., Any], kinds: tuple[str, ...]) -> None:
        super().__init__(function, 1)
        self._kinds = kinds

    @functools.cached_property
    def key(self) -> str:
        """Its own file's sources are not in the folder's name."""
        source = Path(self.function.__code__.co_filename).read_bytes()
        return f"{super().key}-{hashlib.sha256(source).hexdigest()[:8]}"

    def _compiled(self) -> bytes:
        from sparkinfer.backend.frontend import routine_code

        return routine_code(self.function, self._kinds, self.key)


def family(make: Callable[..., Any]) -> Callable[..., Any]:
    """For a function that makes a kernel, or a tuple of them, for the arguments given: made once, and kept by them."""

    @functools.cache
    def made(*given: Any) -> Any:
        kernels = make(*given)
        for place, kernel in enumerate(kernels if isinstance(kernels, tuple) else (kernels,)):
            kernel.origin = (make.__module__, make.__name__, given, place)
        return kernels

    arguments = signature(make)

    @functools.cache
    def of(*given: Any, **named: Any) -> Any:
        bound = arguments.bind(*given, **named)
        bound.apply_defaults()
        return made(*bound.args)

    return of


def kernel_of(origin: "Origin") -> Kernel:
    """The kernel of an origin."""
    module, name, given, place = origin
    known = vars(import_module(module))
    found: Any = known[name]
    if isinstance(found, FunctionType):
        of_it = [k for k in known.values() if isinstance(k, Kernel) and k.function is found]
        found = of_it[0] if of_it else found
    if isinstance(found, Routine):
        found = found.kernel
    if not isinstance(found, Kernel):
        found = found(*given)
        found = found[place] if isinstance(found, tuple) else found
    assert isinstance(found, Kernel) and found.origin == origin, origin
    return found


def routine(*kinds: str) -> Callable[[Callable[..., Any]], Routine]:
    """Declare a `Routine` of these parameters."""
    return lambda function: Routine(function, kinds)
