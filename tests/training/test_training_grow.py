"""Drafts that start from smaller ones: the same proposals, and what cannot be."""

import pytest
import torch
from training_toys import LLAMA, random_draft, tiny_shape

from sparkinfer.errors import RequestError
from sparkinfer.gguf import open_gguf
from sparkinfer.training.draft import DraftModel
from sparkinfer.training.evaluate import claimed_slots, right_slots
from sparkinfer.training.grow import grow
from sparkinfer.training.target import TorchTarget, load_torch_target
from sparkinfer.training.trainer import output_head


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    with open_gguf(LLAMA) as file:
        return load_torch_target(file, torch.device("cpu"), torch.float32)


OLD_IDS = torch.tensor([2, 3, 5, 8, 13, 21])


def logits_of(draft: DraftModel, target: TorchTarget, taps: tuple[int, ...]) -> torch.Tensor:
    tokens = torch.arange(40).view(2, 20) % target.config.n_vocab
    anchors = torch.tensor([[3, 9], [5, 12]])
    features, _ = target.features(tokens, taps)
    embedded = target.embedding[tokens.gather(1, anchors)]
    previous = torch.full((2, 2, draft.shape.depth), 4)
    return draft.logits(draft(features, embedded, anchors), previous, target.head)


def test_a_grown_draft_proposes_what_it_did(target: TorchTarget) -> None:
    heads = target.config.heads
    old = random_draft(target, kv_heads=1, vocabulary=6, markov_rank=8, own_head=True)
    ids = torch.tensor([3, 1, 13, 2, 5, 8, 21, 30]).sort().values
    taps = tuple(range(target.config.n_layers))
    shape = tiny_shape(
        target, layers=3, kv_heads=heads, vocabulary=8, markov_rank=8, own_head=True, taps=taps
    )
    new = grow(old, OLD_IDS, shape, ids, target.head)
    before, after = logits_of(old, target, old.shape.taps), logits_of(new, target, taps)
    shared = torch.isin(ids, OLD_IDS)
    assert torch.allclose(after[..., shared], before, atol=1e-5)
    streams = torch.randn(1, shape.n_embd)
    fresh = new.logits(streams, torch.tensor([4]), target.head)[..., ~shared]
    assert torch.allclose(fresh, streams @ target.head[ids[~shared]].float().T, atol=1e-5)


def test_a_draft_without_a_head_of_its_own_gets_the_targets(target: TorchTarget) -> None:
    old = random_draft(target)
    new = grow(old, None, tiny_shape(target, own_head=True), None, target.head)
    assert torch.allclose(
        logits_of(new, target, old.shape.taps), logits_of(old, target, old.shape.taps), atol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block": 5}, "block"),
        ({"layers": 1}, "2 layers"),
        ({"taps": (1,)}, "taps"),
        ({"n_ff": 32}, "n_ff"),
    ],
)
def test_what_cannot_grow(target: TorchTarget, changes: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        grow(random_draft(target), None, tiny_shape(target, **changes), None, target.head)


def test_outputs_after_the_active_ones_are_proposed_once_they_occurred(target: TorchTarget) -> None:
    """Two drafts with equal weights, one of which proposes all its tokens at once."""
    ids = torch.arange(0, 60, 2)
    whole = random_draft(target, vocabulary=30, own_head=True)
    part = DraftModel(tiny_shape(target, vocabulary=30, own_head=True, active=10))
    part.load_state_dict(whole.state_dict())
    tokens = torch.randint(0, 30, (4, 24), generator=torch.Generator().manual_seed(3)) * 2
    tokens[:, 12:] = tokens[:, :12]  # whatever is said there has occurred
    answers = torch.ones_like(tokens, dtype=torch.bool)
    head, index = output_head(target, ids)
    claims, allowed = [], []
    for draft in (whole, part):
        claims.append(claimed_slots(draft, target, head, index, tokens, answers)[1])
    assert (claims[1] > claims[0] + 1e-6).any()  # fewer tokens share the probability
    right = [right_slots(d, target, head, index, tokens, answers) for d in (whole, part)]
    for row in range(4):
        for place in range(23):
            token = int(tokens[row, place + 1])
            may = token < 20 or token in tokens[row, : place + 1].tolist()
            allowed.append(may)
            assert may or not right[1][row, place, 0]
            assert not may or right[1][row, place, 0] >= right[0][row, place, 0]
    assert any(allowed) and not all(allowed)
