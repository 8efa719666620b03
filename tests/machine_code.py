"""Write the machine code (H200) of every launch of the real shapes into a folder, one file each.

    PYTHONPATH=src python tests/machine_code.py FOLDER [NAME...]

NAME: only kernels whose name has it in it. Run it before and after a change that should change nothing and compare the
folders with `diff -rq`: equal files need no GPU. `state_kernel` gets other registers from one compile to the next.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "kernels"))

import compile_mixers_cases as mixers
import compile_products as products
from compile_sm90 import TOOLS, Owner

from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.backend.triton_steps import Launch


def recordings() -> Iterator[tuple[str, CudaRecorder]]:
    for cases in (mixers.attention_cases, mixers.recurrent_cases, mixers.other_cases):
        for number, run in enumerate(cases()):
            yield f"{cases.__name__} {number}", run
    for rows in (1, 6, 2048):
        for name, run in products.recordings(rows):
            yield f"{name} rows {rows}", run
    Owner.warpgroups = True
    for name, run in products.hopper_recordings(2048):
        yield f"hopper {name}", run


def machine_code(launch: Launch) -> str:
    compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = [str(TOOLS / "nvdisasm"), "-c", file.name]
        code = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    return f"{code}\n// grid {launch.grid}, {compiled.metadata.shared} bytes of shared memory\n"


def main() -> None:
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    for name, run in recordings():
        for place, launch in enumerate(run.steps):
            if not isinstance(launch, Launch):
                continue
            kernel = launch.kernel.fn.__name__
            if not wanted or any(part in kernel for part in wanted):
                file = folder / f"{name} {place} {kernel}.sass".replace(" ", "_")
                file.write_text(machine_code(launch))


if __name__ == "__main__":
    main()
