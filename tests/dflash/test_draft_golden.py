"""The draft against an independent program (tests/data/draft/README.md), in float32 and within 1e-4.

The published layouts at reduced width: full, sliding and mixed layers, blocks that are causal or not, old and new keys.
"""

import functools
from pathlib import Path

import golden_models
import numpy as np
import pytest

from sparkinfer.dflash.draft import BlockDraft, load_draft

FOLDER = Path(__file__).parents[1] / "data" / "draft"
SECOND = "dflash2"  # the second generation: only candidates can be proposed
CASES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
CASES.remove(SECOND)
TOLERANCE = 1e-4
CHUNKS = {"one by one": [1], "all at once": [64], "uneven": [5, 16, 2, 17], "sixteen": [16]}


@functools.cache
def draft(name: str) -> BlockDraft:
    return load_draft(FOLDER / name, golden_models.target("llama-tiny-F32", "f32"))


@functools.cache
def head() -> np.ndarray:
    """The target's LM head, float32 [ids, n_embd]."""
    model = golden_models.target("llama-tiny-F32", "f32")
    return model.embedding.take(range(model.config.n_vocab))


def feed(model: BlockDraft, features: np.ndarray, sizes: list[int]) -> None:
    """Features [rows, taps x n_embd] for any tokens, in chunks of these sizes over and over."""
    done, turn = 0, 0
    while done < len(features):
        count = min(sizes[turn % len(sizes)], len(features) - done)
        model.extend([0] * count, features[done : done + count])
        done, turn = done + count, turn + 1


def wanted_logits(model: BlockDraft, hidden: np.ndarray) -> np.ndarray:
    """Logits of the slots from the block's hidden states."""
    config = model.config
    logits = hidden[0 if config.from_anchor else 1 :] @ head().T * config.output_multiplier
    return np.tanh(logits / config.softcap) * config.softcap if config.softcap else logits


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", CASES)
def test_logits_of_every_slot(name: str, chunks: str) -> None:
    model, data = draft(name), np.load(FOLDER / name / "expected.npz")
    features = data["features"].astype(np.float32)
    model.begin([])
    for count, anchor in zip(data["contexts"], data["anchors"], strict=True):
        feed(model, features[model.length : count], CHUNKS[chunks])
        assert (model.length, model.gap) == (count, 0)
        proposals = model.propose(int(anchor), model.max_depth)
        wanted = wanted_logits(model, data[f"hidden_{count}"])
        got = np.stack([proposals.row(slot, int(anchor)) for slot in range(model.max_depth)])
        np.testing.assert_allclose(got, wanted[: model.max_depth], rtol=0, atol=TOLERANCE)
        best = [proposals.best(slot, int(anchor)) for slot in range(model.max_depth)]
        assert best == wanted[: model.max_depth].argmax(axis=1).tolist()
    if "logits" in data:
        np.testing.assert_allclose(got, data["logits"][-model.max_depth :], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_the_second_generation(chunks: str) -> None:
    """Convolutions over the block, and the path that the selector of candidates takes from the anchor."""
    model, data = draft(SECOND), np.load(FOLDER / SECOND / "expected.npz")
    features = data["features"].astype(np.float32)
    model.begin([])
    for count, anchor in zip(data["contexts"], data["anchors"], strict=True):
        feed(model, features[model.length : count], CHUNKS[chunks])
        proposals = model.propose(int(anchor), model.max_depth)
        wanted, previous = wanted_logits(model, data[f"hidden_{count}"]), int(anchor)
        for slot, chosen in enumerate(data[f"path_{count}"]):
            row = proposals.row(slot, previous)
            candidates = np.flatnonzero(row > -1e29)
            assert set(candidates) == set(np.argsort(wanted[slot])[-8:])
            scores = wanted[slot, candidates] + bias(
                model, data[f"hidden_{count}"][slot + 1], previous, candidates
            )
            np.testing.assert_allclose(row[candidates], scores, rtol=0, atol=TOLERANCE)
            previous = proposals.best(slot, previous)
            assert previous == chosen == row.argmax()


def bias(
    model: BlockDraft, hidden: np.ndarray, previous: int, candidates: np.ndarray
) -> np.ndarray:
    """<P[previous] * (W h), S[candidate]> from the stored tensors."""
    from sparkinfer.dflash.checkpoint import open_safetensors

    file = open_safetensors(FOLDER / SECOND)
    names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    before, after, projection = (
        file.table(f"candidate_selector.{name}").take(slice(None)) for name in names
    )
    return after[candidates] @ (before[previous] * (projection @ hidden))
