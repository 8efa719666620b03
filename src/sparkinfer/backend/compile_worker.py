"""A process that compiles kernels for another one: `main` reads origins, one a line of JSON, and answers each.

The answer is "done" when the code lies in the cache folder, else "failed". It ends with its input, or when nothing was
asked for a while.
"""

import json
import os
import select
import sys
from pathlib import Path

from sparkinfer.backend.compiled import kernel_of, set_cache_root

_PATIENCE = 5.0  # seconds


def main() -> None:
    """Serve the other side; its arguments are those of the process: the root of the cache."""
    set_cache_root(Path(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything prints is no answer
    import sparkinfer.backend.frontend  # noqa: F401  before it is needed

    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    while select.select([requests], [], [], _PATIENCE)[0] and (line := requests.readline()):
        answers.write(f"{_compiled(line)}\n")
        answers.flush()


def _compiled(line: bytes) -> str:
    module, name, given, place = json.loads(line)
    try:
        kernel = kernel_of((module, name, tuple(given), place))
        if kernel.code() is None:
            kernel.compile()
    except Exception:
        return "failed"
    return "done"
