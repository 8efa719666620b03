"""Rows of an embedding table on the GPU (or under the interpreter) against the formats' own dequantize."""

import gpu_machine as gpu
import numpy as np
import pytest
from kernel_machine import random_blocks

from sparkinfer.kernels.embed import embed
from sparkinfer.kernels.linear import pack_weight
from sparkinfer.kernels.triton_quant import FORMS
from sparkinfer.quant.formats import dequantize


@pytest.mark.parametrize("format_name", FORMS)
def test_rows_are_those_of_dequantize(format_name):
    rows, width = 7, 512
    blocks = random_blocks(format_name, rows * width, 3)
    values = dequantize(format_name, blocks).reshape(rows, width)
    table = pack_weight(gpu.backend(), format_name, blocks, rows, width)
    ids = np.array([[99, 5, 0, 6]], np.int64)
    out, recorder = gpu.blank(3, width), gpu.backend().recorder(3)
    embed(recorder, table, gpu.filled(ids), 1, out, scale=0.5)
    gpu.run(recorder)
    wanted = 0.5 * values[[5, 0, 6]]
    assert np.abs(gpu.host(out) - wanted).max() <= 1e-6 * np.abs(wanted).max()
