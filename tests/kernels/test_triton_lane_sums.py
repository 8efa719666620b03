"""Sums of several values that share a warp's steps."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from gpu_machine import backend

from sparkinfer.kernels.triton_quant import lane_sums, lane_values


@triton.jit
def lane_sums_kernel(x, out, COUNT: tl.constexpr):
    lane = tl.arange(0, 32)
    values = ()
    for index in tl.static_range(COUNT):
        values = values + (tl.load(x + index * 32 + lane),)  # noqa: RUF005
    tl.store(out + lane, lane_sums(values, COUNT))


@triton.jit
def lane_values_kernel(x, out, B: tl.constexpr):
    lane, b = tl.arange(0, 32)[:, None], tl.arange(0, B)[None, :]
    values = lane_values(tl.load(x + lane * B + b), 32, B)
    for index in tl.static_range(B):
        tl.store(out + index * 32 + tl.arange(0, 32), values[index])


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_values_of_a_tile_come_in_order(count):
    x = torch.arange(32.0 * count, device=backend().device)
    out = torch.zeros(count * 32, device=x.device)
    lane_values_kernel[(1,)](x, out, B=count, num_warps=1)
    assert out.reshape(count, 32).T.flatten().tolist() == x.tolist()


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_sums_that_share_a_warp_are_added_as_one_alone_is(count):
    """Each in the tree of lanes 16, 8, 4, 2, 1 apart, which numpy takes here step by step."""
    values = np.random.default_rng(count).standard_normal((count, 32), dtype=np.float32)
    device = backend().device
    out = torch.zeros(32, device=device)
    lane_sums_kernel[(1,)](torch.from_numpy(values).to(device), out, COUNT=count, num_warps=1)
    tree = values
    while tree.shape[1] > 1:
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    wanted = np.repeat(tree[:, 0], 32 // count)
    assert out.cpu().numpy().view(np.int32).tolist() == wanted.view(np.int32).tolist()
