"""What a model takes of memory: reckoned before loading, one line where it does not fit, never less than it takes."""

import re

import golden_models as gm
import numpy as np
import pytest

from sparkinfer.backend.cpu import CpuBackend
from sparkinfer.errors import MemoryLimitError
from sparkinfer.gguf import open_gguf
from sparkinfer.models import load_target


def load(name, **options):
    return load_target(gm.FOLDER / f"{name}.gguf", device="cpu", threads=1, **options)


@pytest.mark.parametrize("name", gm.MODELS)
def test_buffers_and_state_are_what_was_planned(monkeypatch, name):
    """The plan may say up to twice what a model takes: it is made before the formats of products are known."""
    taken, buffer = [], CpuBackend.buffer

    def counting(self, rows, width, dtype=np.float32, **named):
        taken.append(rows * width * np.dtype(dtype).itemsize)
        return buffer(self, rows, width, dtype, **named)

    monkeypatch.setattr(CpuBackend, "buffer", counting)
    model = load(name, context=512)
    try:
        plan, state = model.plan["memory_bytes"], model.new_state()
        weights = sum(info.n_bytes for info in model.file.tensors.values())
        vectors = sum(i.n_values * 4 for i in model.file.tensors.values() if len(i.shape) == 1)
        table = 512 * model.config.rotated * 4
        buffers = sum(taken) - vectors - table
        assert weights < plan["weights"] < 1.2 * weights
        assert plan["cache"] == model.state_shape.kv.n_bytes(512) + table
        assert buffers <= plan["buffers"] + 2**16 and plan["buffers"] < 3 * buffers
        assert (plan["state"] > 0) == (state.recurrent is not None)
        assert plan["total"] == sum(plan[part] for part in list(plan)[:5])
    finally:
        model.close()


def test_a_model_that_does_not_fit_is_refused_in_one_line_with_a_context_that_fits(monkeypatch):
    name = "qwen35-tiny256-Q4_K_M"
    model = load(name, context=4096)
    plan = model.plan["memory_bytes"]
    model.close()
    monkeypatch.setattr(CpuBackend, "memory", lambda _self: plan["total"] - plan["cache"] // 2)
    with pytest.raises(MemoryLimitError) as raised:
        load(name, context=4096)
    line = str(raised.value)
    assert "\n" not in line
    for part in ("weights", "cache", "state", "buffers", "context of 4096", "are free"):
        assert part in line
    fits = int(re.search(r"; -c (\d+) fits$", line)[1])
    assert 1900 < fits <= 2048
    load(name, context=fits).close()
    with pytest.raises(MemoryLimitError):
        load(name, context=fits + 32)


def test_where_no_context_fits_the_advice_is_a_smaller_file(monkeypatch):
    monkeypatch.setattr(CpuBackend, "memory", lambda _self: 1000)
    with pytest.raises(MemoryLimitError, match="no context fits: take a smaller file"):
        load("llama-tiny-F32", context=64)
    assert open_gguf(gm.FOLDER / "llama-tiny-F32.gguf").tensors  # the file is as it was


def test_a_cache_of_8_bits_takes_17_bytes_where_float16_takes_32(monkeypatch):
    name = "qwen35-tiny256-Q4_K_M"
    plans = {}
    for cache in ("f16", "q8_0"):
        model = load(name, context=4096, kv_cache=cache)
        plans[cache], kv = model.plan["memory_bytes"], model.state_shape.kv
        assert model.new_state().kv._keys.nbytes == kv.n_bytes(4096) // 2
        table = 4096 * model.config.rotated * 4
        assert plans[cache]["cache"] == kv.n_bytes(4096) + table
        model.close()
    small, large = (plans[cache]["cache"] - table for cache in ("q8_0", "f16"))
    assert small * 32 == large * 17
    monkeypatch.setattr(CpuBackend, "memory", lambda _self: plans["f16"]["total"] - 1)
    with pytest.raises(MemoryLimitError, match="fits, or --kv-cache q8_0, which takes about half"):
        load(name, context=4096)
    load(name, context=4096, kv_cache="q8_0").close()
