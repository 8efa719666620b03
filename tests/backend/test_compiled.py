"""The cache of compiled code: a second process loads, a changed source compiles anew, a bad folder is one line."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sparkinfer
from sparkinfer.backend.simd import store_i64
from sparkinfer.errors import DeviceError

PACKAGE = Path(sparkinfer.__file__).parent
COMPILE = """
import sys, time
from pathlib import Path
from sparkinfer.backend.compiled import cache_folder, set_cache_root
set_cache_root(Path(sys.argv[1]))
from sparkinfer.backend.isa import choose_isa
from sparkinfer.backend.executor import RUN
from sparkinfer.kernels.linear.cpu_tiles import tile_kernel
isa = choose_isa(sys.argv[2])
for name in ("F32", "Q8_0"):
    for rows in (1, 2):
        assert tile_kernel(name, rows, isa.name, isa.lanes).address
assert RUN.address
print(cache_folder())
"""


def compile_in(
    root: Path, package: Path = PACKAGE, isa: str = "auto", program: str = COMPILE
) -> Path:
    """Compile a few kernels in a new process; the cache folder it used."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(root), isa],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below with its size and time of change."""
    found = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in found}


def copy_of(package: Path, target: Path) -> Path:
    shutil.copytree(package, target / "sparkinfer", ignore=shutil.ignore_patterns("__pycache__"))
    return target / "sparkinfer"


def test_a_second_process_compiles_nothing(tmp_path):
    first = compile_in(tmp_path)
    before = files(first)
    assert len(before) == 5 and all(name.endswith(".o") for name in before)
    assert compile_in(tmp_path) == first
    assert files(first) == before


ROUTINE = """
import sys
from pathlib import Path
import numpy as np
from sparkinfer.backend.compiled import cache_folder, set_cache_root
set_cache_root(Path(sys.argv[1]))
from sparkinfer.dflash.acceptance import Acceptance
acceptance = Acceptance(3)
acceptance.observe(3, 2)
assert 1.0 < acceptance.expected(1) < 2.0
print(cache_folder())
"""


def test_what_python_calls_is_kept_beside_the_kernels(tmp_path):
    first = compile_in(tmp_path, program=ROUTINE)
    before = files(first)
    assert [name for name in before if name.endswith(".o") and "acceptance" in name]
    assert compile_in(tmp_path, program=ROUTINE) == first
    assert files(first) == before


def test_instruction_sets_share_a_folder_and_no_code(tmp_path):
    first = compile_in(tmp_path, isa="portable")
    kept = files(first)
    assert compile_in(tmp_path, isa="auto") == first
    after = files(first)
    assert {name: after[name] for name in kept} == kept
    assert len(after) > len(kept)


HASHES = """
import sys
from pathlib import Path
from sparkinfer.backend.compiled import source_hash
package = Path(sys.argv[1])
print(source_hash.__wrapped__())
for name in sys.argv[2:]:
    with (package / name).open("a") as file:
        file.write("# changed")
    print(source_hash.__wrapped__())
"""


def test_a_changed_source_uses_another_folder(tmp_path):
    """The layout of packed weights is source too: kernels are generated from it."""
    package = copy_of(PACKAGE, tmp_path / "source")
    changed = ["kernels/rope/cpu_impl.py", "backend/simd.py", "quant/tiles.py"]
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        [sys.executable, "-c", HASHES, str(package), *changed],
        env=environment, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert len(set(done.stdout.split())) == 4


def test_only_the_newest_other_folders_are_kept(tmp_path, monkeypatch):
    from sparkinfer.backend import compiled

    for age in range(9):
        folder = tmp_path / f"kernels-{age}"
        folder.mkdir()
        os.utime(folder, (1000 + age, 1000 + age))
    (tmp_path / "costs.json").write_text("{}")
    monkeypatch.setattr(compiled, "_root", tmp_path)
    made = compiled.cache_folder.__wrapped__()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {made.name, "costs.json", *(f"kernels-{age}" for age in (4, 5, 6, 7, 8))}


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    from sparkinfer.backend import compiled

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compiled, "_root", tmp_path / "file")
    with pytest.raises(DeviceError, match="--cache-dir"):
        compiled.cache_folder.__wrapped__()


VNNI = """
import os, sys
os.environ["NUMBA_CPU_NAME"] = "icelake-server"
os.environ["NUMBA_CPU_FEATURES"] = "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni"
from sparkinfer.backend.frontend import assembly
from sparkinfer.backend.isa import choose_isa
from sparkinfer.kernels.linear.cpu_tiles import tile_kernel
isa = choose_isa("auto")
assert (isa.name, isa.lanes) == ("vnni512", 16), isa
for name in sys.argv[1:]:
    for rows in (1, 8):
        kernel = tile_kernel(name, rows, isa.name, isa.lanes)
        text = assembly(kernel.function, kernel.n_args)
        print(name, rows, text.count("vpdpbusd"), text.count("zmm") > 0)
"""


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="x86 code")
def test_the_vnni_form_compiles_for_a_cpu_that_has_it():
    """Compiled for another CPU, not run: every dot product of four codes is one instruction."""
    done = subprocess.run(
        [sys.executable, "-c", VNNI, "Q4_0", "Q8_0", "Q4_K"], capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [(name, int(n), zmm) for name, _, n, zmm in rows if int(n) < 8] == []
    assert [int(n) >= 8 * int(count) and zmm == "True" for _, count, n, zmm in rows] == [True] * 6


SEVERAL = """
import sys
from pathlib import Path
from sparkinfer.backend import workers
from sparkinfer.backend.compiled import cache_folder, compile_all, set_cache_root
from sparkinfer.backend.executor import STOP_ALL
from sparkinfer.dflash import drift
from sparkinfer.kernels.linear.cpu_tiles import tile_kernel
workers.default_threads = lambda: 2
exec(sys.argv[2].removeprefix("auto"))
set_cache_root(Path(sys.argv[1]))
wanted = [STOP_ALL, drift.KERNEL, tile_kernel("F32", 1, "portable", 16)]
seen = []
compile_all([*wanted, wanted[0]], lambda done, total: seen.append((done, total)))
assert seen == [(1, 3), (2, 3), (3, 3)], seen
assert all(kernel.address for kernel in wanted)
print("numba" in sys.modules, file=sys.stderr)
print(cache_folder())
"""


@pytest.mark.parametrize(
    ("change", "alone"),
    [
        ("auto", False),
        ("workers.sys.executable = 'no such program'", True),
        ("workers._PROGRAM = 'raise SystemExit'", True),
        ("workers._PROGRAM = 'import time; input(); print(\"failed\"); time.sleep(1)'", True),
        ("workers.default_threads = lambda: 1", True),
    ],
)
def test_several_are_compiled_by_other_processes_or_here(tmp_path, change, alone):
    """Whatever becomes of the other processes, all kernels are there; `alone`: this one had to compile them."""
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, str(tmp_path), change],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == str(alone)
    assert len(files(Path(done.stdout.strip()))) == 3


GIVEN_UP = """
import sys, time
from concurrent.futures import CancelledError
from pathlib import Path
from sparkinfer.backend import workers
from sparkinfer.backend.compiled import ahead, compile_all, set_cache_root
from sparkinfer.backend.executor import STOP_ALL
from sparkinfer.kernels.linear.cpu_tiles import tile_kernel
workers.default_threads = lambda: 2
set_cache_root(Path(sys.argv[1]))
wanted = [STOP_ALL, tile_kernel("F32", 1, "portable", 16)]
good, workers._PROGRAM = workers._PROGRAM, "import time; time.sleep(1000)"
ahead(wanted)
while len(workers._all) < 2:
    time.sleep(0.01)
stuck = list(workers._all)
workers.abandon()
for kernel in wanted:
    assert isinstance(kernel.coming.exception(), CancelledError)
assert [process.wait() for process in stuck] == [-9, -9]
workers._PROGRAM = good
compile_all(wanted * 2)
ahead(wanted)
assert all(kernel.address for kernel in wanted)
print(sys.argv[1])
"""


def test_what_is_given_up_ends_at_once_and_can_be_asked_for_again(tmp_path):
    compile_in(tmp_path, program=GIVEN_UP)
    assert len(list(tmp_path.rglob("*.o"))) == 2


IDLE = """
import os, sys, time
from pathlib import Path
from sparkinfer.backend import workers
from sparkinfer.backend.compiled import ahead, set_cache_root
from sparkinfer.kernels.linear.cpu_tiles import tile_kernel
workers.default_threads, workers._PATIENCE = (lambda: 2), 0.05
set_cache_root(Path(sys.argv[1]))
for rows in (1, 2):
    kernel = tile_kernel("F32", rows, "portable", 16)
    ahead([kernel])
    assert kernel.coming.result() and "numba" not in sys.modules
    while workers._all:
        time.sleep(0.01)
    try:
        print("left:", os.waitpid(-1, os.WNOHANG), file=sys.stderr)
        raise SystemExit(1)
    except ChildProcessError:
        pass
print(sys.argv[1])
"""


def test_an_idle_compiling_process_is_ended_and_reaped(tmp_path):
    """No child is left, not even one that only waits to be asked for its end."""
    compile_in(tmp_path, program=IDLE)


def test_no_part_of_code_is_left_where_it_cannot_be_kept(tmp_path, monkeypatch):
    from sparkinfer.backend import compiled
    from sparkinfer.kernels.linear.cpu_tiles import tile_kernel

    def full(self: Path, _target: Path) -> None:
        raise OSError(28, "No space left on device")

    kernel = compiled.kernel_of(tile_kernel("F32", 1, "portable", 16).origin)
    monkeypatch.setattr(compiled.Kernel, "_file", lambda _: tmp_path / "code.o")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(DeviceError, match="No space left"):
        kernel.compile()
    assert list(tmp_path.iterdir()) == []


def test_origins_lead_back_to_their_kernels():
    from sparkinfer.backend.compiled import kernel_of
    from sparkinfer.backend.executor import KERNELS
    from sparkinfer.dflash import acceptance
    from sparkinfer.kernels.linear.cpu_tiles import tile_kernel
    from sparkinfer.kernels.rope.cpu_impl import rope_jobs

    tiles = tile_kernel("Q4_0", 3, "avx2", 8), tile_kernel("Q4_0", 3, "avx2", 8, reuse=True)
    for kernel in (*KERNELS, acceptance.KERNEL, *tiles, *rope_jobs("f16")):
        assert kernel_of(kernel.origin) is kernel
    assert len({kernel.key for kernel in (*KERNELS, *tiles, *rope_jobs("f16"))}) == 9


def test_a_function_of_a_function_is_not_kept(tmp_path, monkeypatch):
    """Nobody could tell its code from that of another one of the same name."""
    from sparkinfer.backend import compiled

    def made(value: int) -> compiled.Kernel:
        def write(target):
            store_i64(target, value)

        return compiled.Kernel(write, 1)

    monkeypatch.setattr(compiled, "_root", tmp_path)
    compiled.cache_folder.cache_clear()
    try:
        found = np.zeros(2, np.int64)
        for place, value in enumerate((7, 8)):
            made(value).native(1)(found.ctypes.data + 8 * place)
        assert found.tolist() == [7, 8]
        assert not list(tmp_path.rglob("*.o"))
    finally:
        compiled.cache_folder.cache_clear()


APART = """
import sys
from pathlib import Path
from sparkinfer.backend.compiled import set_cache_root
set_cache_root(Path(sys.argv[1]))
from sparkinfer.kernels.linear.cpu_tiles import tile_kernel
for rows in map(int, sys.argv[2].removeprefix("auto").split()):
    assert tile_kernel("F32", rows, "portable", 16).address
print(sys.argv[1])
"""


def test_code_of_different_processes_goes_together(tmp_path):
    """Numba numbers functions anew in each process: of two that are numbered alike a loader would take the first."""
    from sparkinfer.backend.objects import load

    for rows in (1, 2, 3):
        compile_in(tmp_path, isa=str(rows), program=APART)
    found = {path.stem: path.read_bytes()[32:] for path in tmp_path.rglob("*.o")}
    assert len(found) == 3
    weight = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    x = np.eye(3, 64, dtype=np.float32)
    for name, code in sorted(found.items()):
        rows, out = int(name.split("-")[3]), np.full((3, 16), -1.0, np.float32)
        kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)(load(code, name))
        kernel(weight.ctypes.data, x.ctypes.data, 64, out.ctypes.data, 64, 1, 0)
        assert (out[:rows] == weight[:rows]).all() and (out[rows:] == -1.0).all(), name


def test_code_shows_others_nothing_but_its_own_name():
    """Numba's names are unique in one process, code of many is loaded side by side."""
    from sparkinfer.backend.frontend import _kernel, _routine
    from sparkinfer.dflash.acceptance import _learn
    from sparkinfer.kernels.screen.cpu_impl import exact_job

    kernel = _kernel(exact_job.function, exact_job.n_args, "kernel")
    for module in (kernel, _routine(_learn.function, _learn.kinds, "kernel")):
        parts = [*module.functions, *module.global_variables]
        own = [part for part in parts if not part.is_declaration]
        assert [part.name for part in own if part.linkage.name != "internal"] == ["kernel"]
    assert len([f for f in kernel.functions if not f.is_declaration]) > 1


@pytest.mark.parametrize(
    "damage", [lambda kept: kept[:-100], lambda _: b"", lambda kept: kept[::-1]]
)
def test_damaged_code_is_compiled_anew(tmp_path, damage):
    first = compile_in(tmp_path, isa="1", program=APART)
    (path,) = first.rglob("*.o")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    compile_in(tmp_path, isa="1", program=APART)
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    from sparkinfer.backend import compiled
    from sparkinfer.kernels.linear.cpu_tiles import tile_kernel

    kernel = compiled.kernel_of(tile_kernel("F32", 1, "portable", 16).origin)
    monkeypatch.setattr(compiled.Kernel, "_file", lambda _: tmp_path / "nowhere" / "code.o")
    with pytest.raises(DeviceError, match="--cache-dir"):
        kernel.compile()
