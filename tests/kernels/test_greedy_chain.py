"""The chain of likeliest tokens against its specification, on one and two threads."""

from collections.abc import Iterator

import numpy as np
import pytest

from sparkinfer.backend.cpu import CpuBackend
from sparkinfer.backend.isa import choose_isa
from sparkinfer.dflash.network import links
from sparkinfer.kernels.greedy_chain import greedy_chain, picks
from sparkinfer.kernels.greedy_chain.reference import greedy_chain as expected
from sparkinfer.kernels.linear import pack_weight
from sparkinfer.quant.encode import quantize
from sparkinfer.quant.formats import dequantize


@pytest.fixture(params=[1, 2])
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    backend = CpuBackend(choose_isa("auto"), request.param)
    yield backend
    backend.close()


def run(
    backend: CpuBackend, raw: np.ndarray, head: tuple[np.ndarray, np.ndarray, np.ndarray] | None
) -> tuple[list[int], list[float]]:
    """`head`: first, before and after; `after` goes in as float32."""
    slots, ids = raw.shape
    logits = backend.buffer(slots, ids)
    logits.array[:] = raw
    chain = None
    if head is not None:
        first, before, after = head
        blocks = np.ascontiguousarray(after, np.float32).view(np.uint8).reshape(-1, 4)
        chain = links(backend, before, pack_weight(backend, "F32", blocks, *after.shape))
        chain.first.array[0] = first
    out = picks(backend, slots + 1, ids)
    recorder = backend.recorder(slots)
    greedy_chain(recorder, logits, ids, chain, out)
    tape = recorder.finish()
    for _ in range(2):
        tape.replay()
    return out.ids.array[0, :slots].tolist(), out.chances.array[0, :slots].tolist()


@pytest.mark.parametrize("ids", [3, 16, 100, 517, 8192])
@pytest.mark.parametrize("rank", [0, 8, 32])
def test_ids_and_probabilities(backend: CpuBackend, ids: int, rank: int) -> None:
    rng = np.random.default_rng(ids + rank)
    raw = rng.normal(0, 3, (5, ids)).astype(np.float32)
    head = None
    if rank:
        sizes = ((rank,), (ids, rank), (ids, rank))
        first, before, after = (rng.normal(0, 1, size).astype(np.float32) for size in sizes)
        head = first, before, after
    found, chances = run(backend, raw, head)
    wanted, likely = expected(raw, *(head or ()))
    assert found == wanted
    np.testing.assert_allclose(chances, likely, rtol=1e-4)


def test_a_quantised_head(backend: CpuBackend) -> None:
    rng = np.random.default_rng(5)
    raw = rng.normal(0, 2, (3, 200)).astype(np.float32)
    before, first = rng.normal(0, 1, (200, 64)).astype(np.float32), np.ones(64, np.float32)
    blocks = quantize("Q8_0", rng.normal(0, 1, (200, 64)).astype(np.float32))
    after = dequantize("Q8_0", blocks.reshape(-1, 34)).reshape(200, 64)
    logits = backend.buffer(3, 200)
    logits.array[:] = raw
    chain = links(backend, before, pack_weight(backend, "Q8_0", blocks, 200, 64))
    chain.first.array[0] = first
    out = picks(backend, 3, 200)
    recorder = backend.recorder(3)
    greedy_chain(recorder, logits, 200, chain, out)
    recorder.finish().replay()
    found, chances = out.ids.array[0].tolist(), out.chances.array[0].tolist()
    wanted, likely = expected(raw, first, before, after)
    assert found == wanted
    np.testing.assert_allclose(chances, likely, rtol=0.2)  # the input is rounded to int8


@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_number_never_wins(backend: CpuBackend, linked: bool) -> None:
    raw = np.full((2, 40), np.nan, np.float32)
    raw[0, 7], raw[0, 9] = 1.0, 1.0
    head = (np.zeros(8), np.zeros((40, 8)), np.zeros((40, 8))) if linked else None
    found, chances = run(backend, raw, head)
    assert found[0] == 7 and chances[0] == pytest.approx(0.5)
    assert 0 <= found[1] < 40 and 0.0 <= chances[1] <= 1.0
