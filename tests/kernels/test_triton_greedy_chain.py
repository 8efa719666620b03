"""The chain of likeliest tokens on a GPU (or under the interpreter) against its specification, and rows that change."""

import gpu_machine as gpu
import numpy as np
import pytest
from kernel_machine import random_blocks

from sparkinfer.backend.base import Buffer
from sparkinfer.kernels.embed import embed
from sparkinfer.kernels.exchange_rows import exchange_rows
from sparkinfer.kernels.exchange_rows.reference import exchange_rows as exchanged
from sparkinfer.kernels.greedy_chain import TokenLinks, TokenPicks, greedy_chain
from sparkinfer.kernels.greedy_chain.reference import greedy_chain as expected
from sparkinfer.kernels.linear import pack_weight
from sparkinfer.quant.formats import dequantize

VOCABULARY = 400


def empty(*shape: int) -> Buffer:
    return gpu.filled(np.full(shape, -7, np.int64))


def weight(values, name="F16"):
    """A weight of floats."""
    item = np.dtype({"F16": np.float16, "F32": np.float32}[name])
    blocks = np.ascontiguousarray(values, item).view(np.uint8).reshape(-1, item.itemsize)
    return pack_weight(gpu.backend(), name, blocks, *values.shape)


def run(raw, links, known=None):
    """Tokens, probabilities and what was left for the target."""
    slots, ids = raw.shape
    out, tokens = empty(slots + 1, 2), empty(1, slots + 3)
    given = None if known is None else gpu.filled(known)
    recorder = gpu.backend().recorder(slots)
    picks = TokenPicks(out, given, (tokens, 2))
    greedy_chain(recorder, gpu.filled(raw), ids, links, picks)
    tape = recorder.finish()
    for _ in range(2):
        tape.replay()
    gpu.backend().wait()
    found, left = gpu.host(out), gpu.host(tokens)[0]
    assert (found[slots] == -7).all() and left[:2].tolist() == [-7, -7] and left[-1] == -7
    chances = found[:slots, 1].astype(np.int32).view(np.float32)
    return found[:slots, 0].tolist(), chances.tolist(), left[2:-1].tolist()


@pytest.mark.parametrize("ids", [517, 3, 16, 100, 9000])
@pytest.mark.parametrize(
    ("rank", "name"), [(64, "F16"), (0, ""), (40, "F32"), (8, "F16"), (256, "F16")]
)
def test_tokens_and_probabilities(ids, rank, name):
    rng = np.random.default_rng(ids + rank)
    raw = rng.normal(0, 3, (4, ids)).astype(np.float32)
    known = rng.permutation(2 * ids)[:ids]
    links, head = None, ()
    if rank:
        before = rng.normal(0, 1, (2 * ids, rank)).astype(np.float32)
        after = rng.normal(0, 1, (ids, rank)).astype(np.float16).astype(np.float32)
        anchor = int(rng.integers(2 * ids))
        run_words = gpu.filled(np.array([[5, anchor, 9]], np.int64))
        links = TokenLinks(gpu.filled(before), weight(after, name), (run_words, 1))
        head = before[anchor], before[known], after
    tokens, chances, left = run(raw, links, known)
    wanted, likely = expected(raw, *head)
    assert tokens == left == [int(known[index]) for index in wanted]
    np.testing.assert_allclose(chances, likely, rtol=1e-4)


@pytest.mark.parametrize("linked", [False, True])
def test_ties_and_what_is_no_number(linked):
    raw = np.full((3, 140), np.nan, np.float32)
    raw[0, 71], raw[0, 139] = 1.0, 1.0
    raw[2, 5] = np.inf
    links = None
    if linked:
        zeros = np.zeros((140, 8), np.float32)
        links = TokenLinks(gpu.filled(zeros), weight(zeros), (empty(1, 1), 0))
        gpu.backend().upload(links.anchor[0], np.zeros((1, 1), np.int64))
    tokens, chances, left = run(raw, links)
    assert tokens == left == [71, 0, 5]
    assert chances[0] == pytest.approx(0.5)
    assert all(0.0 <= chance <= 1.0 for chance in chances)


def test_numbers_change_places():
    rng = np.random.default_rng(3)
    arrays = [(rng.integers(0, 2**60, 9), rng.integers(0, 2**60, 30)) for _ in range(2)]
    changes = np.array([[3, 4, 29, 0, 7, 8, 7, 2, 2]], np.int64)
    there = [(gpu.filled(target), gpu.filled(source)) for target, source in arrays]
    recorder = gpu.backend().recorder(1)
    exchange_rows(recorder, gpu.filled(changes), 4, there)
    gpu.run(recorder)
    exchanged(changes[0], arrays)
    for (found, _), (wanted, _) in zip(there, arrays, strict=True):
        assert np.array_equal(gpu.host(found)[0], wanted)


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "F16", "F32", "Q4_K", "Q6_K"])
def test_a_weight_with_other_rows_is_that_weight(name):
    blocks = random_blocks(name, 20 * 256, 3).reshape(20, -1)
    rows = np.arange(12)
    size = random_blocks(name, 256, 3).shape[-1]

    def packed(numbers):
        return pack_weight(
            gpu.backend(), name, blocks[numbers].reshape(-1, size), len(numbers), 256
        )

    part, whole = packed(rows), packed(np.arange(20))
    rows[[3, 11]] = 17, 4
    recorder = gpu.backend().recorder(1)
    changes = gpu.filled(np.array([[2, 3, 17, 11, 4]], np.int64))
    exchange_rows(recorder, changes, 2, [(part, whole)])
    gpu.run(recorder)
    assert bool((part.words == packed(rows).words).all())


@pytest.mark.parametrize(("name", "width"), [("Q4_1", 96), ("F16", 1100)])
def test_masked_rows_are_the_mask(name, width):
    blocks = random_blocks(name, 7 * width, 3)
    values = dequantize(name, blocks).reshape(7, width)
    mask = np.random.default_rng(1).normal(0, 1, (1, width)).astype(np.float32)
    table = pack_weight(gpu.backend(), name, blocks, 7, width)
    ids = np.array([[99, 5, -1, 0, -1]], np.int64)
    out, recorder = gpu.blank(4, width), gpu.backend().recorder(4)
    embed(recorder, table, gpu.filled(ids), 1, out, scale=0.5, mask=gpu.filled(mask))
    gpu.run(recorder)
    wanted = 0.5 * np.stack([values[5], mask[0], values[0], mask[0]])
    np.testing.assert_allclose(gpu.host(out), wanted, rtol=1e-6, atol=1e-6)
