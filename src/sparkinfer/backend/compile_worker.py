"""A process that compiles kernels for another one: `main` reads origins, one a line of JSON, and answers each.

The answer is "done" when the code lies in the cache folder, else "failed". It ends with its input.
"""

import json
import os
import sys
from pathlib import Path

from sparkinfer.backend.compiled import kernel_of, set_cache_root


def main() -> None:
    """Serve the other side; its arguments are those of the process: the root of the cache."""
    set_cache_root(Path(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything prints is no answer
    import sparkinfer.backend.frontend  # noqa: F401  before it is needed

    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    while line := requests.readline():
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
