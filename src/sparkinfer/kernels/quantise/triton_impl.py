"""GPU form of `quantise`: a program takes up to 2048 columns of a row."""

import triton
import triton.language as tl

from sparkinfer.backend.base import Activation
from sparkinfer.backend.cuda import CudaRecorder, q8_views
from sparkinfer.kernels.triton_overlap import await_inputs, release_next
from sparkinfer.kernels.triton_quant import store_blocks

_COLUMNS = 2048
_EXACT = {"enable_fp_fusion": False}


@triton.jit
def quantise_kernel(x, x_stride, codes, floats, q_stride, groups, BLOCKS: tl.constexpr):
    release_next()
    await_inputs()
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live = block < groups
    at = x + row * x_stride + block[:, None] * 32 + tl.arange(0, 32)[None, :]
    y = tl.load(at, mask=live[:, None], other=0.0)
    store_blocks(codes, floats, q_stride, groups, tl.zeros_like(block) + row, block, y, live)


def record(recorder: CudaRecorder, x: Activation) -> None:
    """Pinned: blocks are independent of each other."""
    assert x.q8 is not None and x.f32.width % 32 == 0, x
    codes, floats = q8_views(x.q8)
    groups = x.f32.width // 32
    blocks = min(triton.next_power_of_2(groups), _COLUMNS // 32)
    recorder.launch(
        quantise_kernel, (recorder.rows, -(-groups // blocks)),
        x.f32.array, x.f32.array.stride(0), codes, floats, codes.stride(0), groups, BLOCKS=blocks,
        num_warps=4, overlap=True, **_EXACT,
    )  # fmt: skip
