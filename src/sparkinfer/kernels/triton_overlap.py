"""Overlap of a kernel with the one before it (programmatic dependent launch).

A kernel that is launched with `overlap=True` may start while the one before it still runs: what it can do before it
needs that one's results (load weights, above all) costs no time. Its contract: it calls `await_inputs` on every path
before it reads what any earlier launch wrote and before it writes anything at all. Every earlier launch has finished
then: each awaits the one before it. `release_next` says that the next launch may start now; called as the first thing
a kernel does.

One exception (experts/triton_few.py): a kernel that releases after its own wait promises the next launch that all that
came before itself is there, so that one may read it, past the first cache, before it waits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def await_inputs():
    if not INTERPRETED:
        gdc_wait()


@triton.jit
def release_next():
    if not INTERPRETED:
        gdc_launch_dependents()
