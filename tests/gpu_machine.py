"""A CUDA backend for tests: on a GPU where there is one, else the same kernels under Triton's interpreter."""

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaBackend, CudaRecorder, q8_views

Floats = NDArray[np.float32]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@functools.cache
def backend() -> CudaBackend:
    return CudaBackend(DEVICE)


def filled(values: Any) -> Buffer:
    """A buffer that holds `values`, at least two-dimensional."""
    values = np.atleast_2d(values)
    buffer = backend().buffer(*values.shape, values.dtype)
    backend().upload(buffer, values)
    return buffer


def blank(rows: int, width: int) -> Buffer:
    """A buffer of NaN: what an op does not write shows."""
    return filled(np.full((rows, width), np.nan, np.float32))


def blank_activation(rows: int, width: int, *, quantised: bool) -> Activation:
    act = backend().activation(rows, width, quantised=quantised)
    act.f32.array.fill_(float("nan"))
    if act.q8 is not None:
        act.q8.array.fill_(255)
    return act


def activation(x: Floats, *, quantised: bool) -> Activation:
    """What a product reads: float rows and, written here by numpy, their int8 blocks."""
    act = blank_activation(*x.shape, quantised=quantised)
    backend().upload(act.f32, x)
    if act.q8 is not None:
        codes, floats = int8_blocks(x)
        code_view, float_view = q8_views(act.q8)
        code_view.copy_(torch.from_numpy(codes.view(np.int32)))
        float_view.copy_(torch.from_numpy(floats))
    return act


def int8_blocks(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Codes [rows, n] (columns 0-15 of every block, then 16-31) and floats [rows, 2 x n / 32] (scales, then scale x sum
    of codes) of quantised rows.
    """
    rows, n = x.shape
    blocks = x.reshape(rows, n // 32, 32)
    scale = (np.abs(blocks).max(-1) / np.float32(127)).astype(np.float32)
    safe = np.where(scale > 0, scale, 1).astype(np.float32)
    codes = np.where(scale[..., None] > 0, np.rint(blocks / safe[..., None]), 0).astype(np.int8)
    sums = (scale * codes.astype(np.int32).sum(-1)).astype(np.float32)
    codes = np.ascontiguousarray(codes.reshape(rows, n // 32, 2, 16).swapaxes(1, 2))
    return codes.reshape(rows, n), np.concatenate([scale, sums], 1)


def run(recorder: CudaRecorder) -> None:
    """Replay what was recorded, to its end."""
    recorder.finish().replay()
    backend().wait()


def host(buffer: Buffer) -> NDArray[Any]:
    values: NDArray[Any] = buffer.array.cpu().numpy()
    return values
