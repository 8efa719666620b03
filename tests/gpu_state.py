"""Caches, recurrent states and run parameters on the device of `gpu_machine`, as the CUDA backend lays them out."""

from typing import Any

import gpu_machine as gpu
import numpy as np
import torch

from sparkinfer.backend.base import Buffer, CacheFormat
from sparkinfer.backend.cuda import CudaRecorder, q8_views
from sparkinfer.kernels import run_params as P
from sparkinfer.kernels.shapes import RecurrentShape

RECORDS = ("conv_record", "key_record", "delta_record", "decay_record")


def params(**words: int) -> Buffer:
    """Run parameters by their names in `run_params`, lower case."""
    values = np.zeros((1, P.WORDS), np.int64)
    for name, value in words.items():
        values[0, getattr(P, name.upper()) // 8] = value
    return gpu.filled(values)


def recorder(rows: int, *, cache_format: CacheFormat = "f16") -> CudaRecorder:
    return gpu.backend().recorder(rows, cache_format)


class Cache:
    """Keys and values [layers, kv heads, positions, size]; both start as NaN."""

    def __init__(self, layers: int, kv_heads: int, context: int, size: int, *, wide: bool) -> None:
        kind, device = torch.float32 if wide else torch.float16, gpu.backend().device
        shape = (layers, kv_heads, context, size)
        self.keys = torch.full(shape, float("nan"), dtype=kind, device=device)
        self.values = torch.full(shape, float("nan"), dtype=kind, device=device)
        self.head_bytes = context * size * self.keys.element_size()

    def words(self) -> dict[str, int]:
        return {
            "keys": self.keys.data_ptr(), "values": self.values.data_ptr(), "head_bytes": self.head_bytes,
        }  # fmt: skip


class State:
    """Random live state of the recurrent layers; the records start as NaN."""

    def __init__(self, shape: RecurrentShape, seed: int = 0) -> None:
        rng, device = np.random.default_rng(seed), gpu.backend().device
        layers, window, n = shape.layers, shape.window, shape.head_size
        conv = rng.standard_normal((layers, shape.taps - 1, shape.channels))
        delta = 0.3 * rng.standard_normal((layers, shape.value_heads, n, n))
        self.conv = torch.from_numpy(conv.astype(np.float32)).to(device)
        self.delta = torch.from_numpy(delta.astype(np.float32)).to(device)

        def record(width: int) -> torch.Tensor:
            return torch.full((layers, window, width), float("nan"), device=device)

        self.conv_record = record(shape.channels)
        self.key_record = record(shape.key_heads * n)
        self.delta_record = record(shape.value_heads * n)
        self.decay_record = record(shape.value_heads)

    def host(self, name: str) -> Any:
        return getattr(self, name).cpu().numpy().copy()

    def params(self, **words: int) -> Buffer:
        return params(
            conv=self.conv.data_ptr(), recurrent=self.delta.data_ptr(),
            **{name: getattr(self, name).data_ptr() for name in RECORDS},
            **{"conv_next": self.conv.data_ptr(), "recurrent_next": self.delta.data_ptr(), **words},
        )  # fmt: skip


def assert_quantised(act: Any, x: Any) -> None:
    """The int8 blocks an op wrote are those of the float32 rows `x`, bit for bit."""
    codes, floats = (view.cpu().numpy() for view in q8_views(act.q8))
    wanted_codes, wanted_floats = gpu.int8_blocks(x)
    np.testing.assert_array_equal(codes.view(np.int8), wanted_codes)
    np.testing.assert_array_equal(floats, wanted_floats)
