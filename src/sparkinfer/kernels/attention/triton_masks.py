"""Which positions a row sees, for the Triton forms of `attention`."""

import triton
import triton.language as tl

from sparkinfer.kernels.triton_mixers import WORD_FIRST

LOG2_E = 1.4426950408889634


@triton.jit
def lowest_key(run, query, WINDOW: tl.constexpr):
    """The first position that a row at position `query` sees."""
    lowest = tl.load(run + WORD_FIRST).to(tl.int32) + query * 0
    if WINDOW > 0:
        lowest = tl.maximum(lowest, query - WINDOW + 1)
    return lowest


@triton.jit
def end_key(query, total, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """One past the last position that a row at position `query` sees; `total` is position + rows of the run."""
    if CAUSAL:
        end = query + 1
    else:
        end = query * 0 + total
        if WINDOW > 0:
            end = tl.minimum(end, query + WINDOW)
    return end
