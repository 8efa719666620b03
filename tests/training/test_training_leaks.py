"""What a block must not see: other blocks, its own anchor's features, tokens after it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from training_toys import random_draft

from sparkinfer.training.draft import DraftModel
from sparkinfer.training.target import TorchTarget

LENGTH, ANCHORS = 24, (9, 10, 17)
VARIANTS = [
    {},
    {"causal": False},
    {"from_anchor": True, "markov_rank": 8},
    {"window": 6},
    {"window": 6, "causal": False, "vocabulary": 100},
]


def streams(draft: DraftModel, target: TorchTarget, features: Tensor, tokens: Tensor) -> Tensor:
    anchors = torch.tensor([ANCHORS])
    embedded = F.embedding(tokens.gather(1, anchors), target.embedding)
    with torch.no_grad():
        return draft(features, embedded, anchors)[0]  # [blocks, depth, h]


@pytest.fixture
def inputs(target: TorchTarget) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, target.config.n_vocab, (1, LENGTH), generator=random)
    return torch.randn(1, LENGTH, 2 * target.config.n_embd, generator=random), tokens


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_features_from_the_anchor_on_are_not_seen(
    target: TorchTarget, inputs: tuple[Tensor, Tensor], changes: dict[str, object]
) -> None:
    draft, (features, tokens) = random_draft(target, **changes), inputs
    before = streams(draft, target, features, tokens)
    for block, anchor in enumerate(ANCHORS):
        changed = features.clone()
        changed[:, anchor:] += 5
        after = streams(draft, target, changed, tokens)
        assert torch.equal(after[block], before[block])
        nearer = features.clone()
        nearer[:, anchor - 1] += 5
        assert not torch.allclose(streams(draft, target, nearer, tokens)[block], before[block])


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_blocks_do_not_see_each_other(
    target: TorchTarget, inputs: tuple[Tensor, Tensor], changes: dict[str, object]
) -> None:
    draft, (features, tokens) = random_draft(target, **changes), inputs
    before = streams(draft, target, features, tokens)
    for block, anchor in enumerate(ANCHORS):
        changed = tokens.clone()
        changed[0, anchor] = (tokens[0, anchor] + 1) % target.config.n_vocab
        after = streams(draft, target, features, changed)
        for other in range(len(ANCHORS)):
            assert torch.equal(after[other], before[other]) == (other != block)


def test_tokens_between_the_anchors_are_not_an_input(
    target: TorchTarget, inputs: tuple[Tensor, Tensor]
) -> None:
    draft, (features, tokens) = random_draft(target), inputs
    changed = tokens.clone()
    for place in set(range(LENGTH)) - set(ANCHORS):
        changed[0, place] = 1
    got, wanted = (
        streams(draft, target, features, changed),
        streams(draft, target, features, tokens),
    )
    assert torch.equal(got, wanted)


def test_the_window_counts_from_the_slot(
    target: TorchTarget, inputs: tuple[Tensor, Tensor]
) -> None:
    """One layer, slot k at anchor + k: it sees keys nearer than 6 positions, the slot's own place counted."""
    draft, (features, tokens) = random_draft(target, window=6, layers=1), inputs
    before = streams(draft, target, features, tokens)
    anchor = ANCHORS[0]
    for place in range(anchor):
        changed = features.clone()
        changed[:, place] += 5
        after = streams(draft, target, changed, tokens)[0]
        for slot in (1, 2, 3):
            seen = anchor + slot - place < 6
            same = torch.equal(after[slot - 1], before[0, slot - 1])
            assert same != seen, (place, slot)


@pytest.mark.parametrize("from_anchor", [False, True])
def test_a_causal_block_can_be_cut_short(
    target: TorchTarget, inputs: tuple[Tensor, Tensor], from_anchor: bool
) -> None:
    features, tokens = inputs
    long = random_draft(target, block=6, from_anchor=from_anchor)
    short = random_draft(target, block=3, from_anchor=from_anchor)
    whole, part = streams(long, target, features, tokens), streams(short, target, features, tokens)
    assert torch.allclose(whole[:, : part.shape[1]], part, atol=1e-5)
    loose = random_draft(target, block=6, from_anchor=from_anchor, causal=False)
    other = streams(loose, target, features, tokens)[:, : part.shape[1]]
    assert not torch.allclose(other, part, atol=1e-3)


def test_the_target_is_causal(target: TorchTarget, inputs: tuple[Tensor, Tensor]) -> None:
    """Features before the anchor do not depend on tokens from the anchor on."""
    _, tokens = inputs
    changed = tokens.clone()
    changed[:, 9:] = 1
    before, _ = target.features(tokens, (0, 2))
    after, _ = target.features(changed, (0, 2))
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-5)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-3)
