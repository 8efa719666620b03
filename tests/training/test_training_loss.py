"""The objective against cases computed by hand."""

import math

import pytest
import torch

from sparkinfer.errors import OptionError
from sparkinfer.training.config import TrainPlan
from sparkinfer.training.loss import block_loss, expected_length, reachable, slot_weights
from sparkinfer.training.schedule import learning_rate

# Two slots over two outputs: the label has probability 3/4 in the first and 1/2 in the second.
LOGITS = torch.tensor([[[math.log(3.0), 0.0], [0.0, 0.0]]])
LABELS = torch.tensor([[0, 1]])
ALL = torch.ones(1, 2, dtype=torch.bool)


def test_exponential_weights_by_hand() -> None:
    plan = TrainPlan(weighting="exponential", gamma=2.0)
    loss, right = block_loss(LOGITS, LABELS, ALL, plan)
    second = math.exp(-0.5)
    by_hand = (math.log(4 / 3) + second * math.log(2)) / (1 + second)
    assert loss.item() == pytest.approx(by_hand, rel=1e-6)
    assert right.tolist() == [[True, False]]  # of equal logits the first is taken


def test_dpace_weights_by_hand() -> None:
    plan = TrainPlan(weighting="dpace", smoothing=0.5)
    loss, _ = block_loss(LOGITS, LABELS, ALL, plan)
    first, both = 0.5 + 0.5 * 0.75, (0.5 + 0.5 * 0.75) * (0.5 + 0.5 * 0.5)
    by_hand = ((first + both) * math.log(4 / 3) + both * math.log(2)) / (first + 2 * both)
    assert loss.item() == pytest.approx(by_hand, rel=1e-6)


def test_reach_makes_later_slots_matter_less() -> None:
    plan = TrainPlan(weighting="dpace", smoothing=0.5, reach=2.0)
    loss, _ = block_loss(LOGITS, LABELS, ALL, plan)
    first = 0.5 + 0.5 * 0.75
    both = first * (0.5 + 0.5 * 0.5) * math.exp(-0.5)
    by_hand = ((first + both) * math.log(4 / 3) + both * math.log(2)) / (first + 2 * both)
    assert loss.item() == pytest.approx(by_hand, rel=1e-6)


def test_without_smoothing_the_gradient_is_that_of_the_expected_length() -> None:
    logits = LOGITS.clone().requires_grad_()
    plan = TrainPlan(weighting="dpace", smoothing=0.0)
    block_loss(logits, LABELS, ALL, plan)[0].backward()
    direct = LOGITS.clone().requires_grad_()
    chances = direct.softmax(-1).gather(-1, LABELS[..., None])[..., 0]
    chances.cumprod(-1).sum().backward()
    weights = 0.75 + 2 * 0.75 * 0.5  # their sum: slot 1 serves both prefixes, slot 2 one
    assert torch.allclose(-logits.grad * weights, direct.grad, atol=1e-6)


def test_weights_carry_no_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    loss, _ = block_loss(logits, LABELS, ALL, TrainPlan())
    loss.backward()
    losses = -LOGITS.log_softmax(-1).gather(-1, LABELS[..., None])[..., 0]
    weights = slot_weights(losses, ALL, TrainPlan())
    share = weights / weights.sum()
    by_hand = share[..., None] * (LOGITS.softmax(-1) - torch.nn.functional.one_hot(LABELS, 2))
    assert torch.allclose(logits.grad, by_hand, atol=1e-6)


def test_slots_that_do_not_count_change_nothing() -> None:
    counts = torch.tensor([[True, False]])
    other = LOGITS.clone()
    other[0, 1] = torch.tensor([9.0, -9.0])
    for weighting in ("dpace", "exponential"):
        plan = TrainPlan(weighting=weighting)
        loss, right = block_loss(LOGITS, LABELS, counts, plan)
        assert loss.item() == pytest.approx(math.log(4 / 3), rel=1e-6)
        assert loss.item() == block_loss(other, LABELS, counts, plan)[0].item()
        assert right.tolist() == [[True, False]]


def test_no_slot_at_all_is_no_loss() -> None:
    loss, _ = block_loss(LOGITS, LABELS, torch.zeros_like(ALL), TrainPlan())
    assert loss.item() == 0


def test_a_label_outside_the_vocabulary_ends_the_block() -> None:
    index = torch.tensor([-1, 0, 1, -1])  # the draft proposes the target's ids 1 and 2
    labels = torch.tensor([[2, 0, 1]])
    places, counts = reachable(labels, torch.ones(1, 3, dtype=torch.bool), index)
    assert counts.tolist() == [[True, False, False]]
    assert places[0, 0] == 1


def test_distillation_moves_towards_the_target() -> None:
    soft = torch.tensor([[[0.0, 0.0], [math.log(9.0), 0.0]]])
    plan = TrainPlan(weighting="exponential", gamma=1e9, distill=1.0)
    loss, _ = block_loss(LOGITS, LABELS, ALL, plan, soft)
    first = -(0.5 * math.log(0.75) + 0.5 * math.log(0.25))
    assert loss.item() == pytest.approx((first + math.log(2)) / 2, rel=1e-5)


def test_expected_length_counts_prefixes() -> None:
    right = torch.tensor([[[True, True, False], [False, True, True], [True, True, True]]])
    assert expected_length(right, torch.tensor([[True, True, True]])).item() == pytest.approx(
        1 + 5 / 3
    )
    assert expected_length(right, torch.tensor([[True, False, False]])).item() == pytest.approx(3)


def test_learning_rate_rises_and_falls() -> None:
    plan = TrainPlan(lr=0.5, warm_up=0.1, final_lr=0.2)
    assert learning_rate(plan, 0.05) == pytest.approx(0.25)
    assert learning_rate(plan, 0.1) == pytest.approx(0.5)
    assert learning_rate(plan, 0.55) == pytest.approx(0.5 * 0.6)
    assert learning_rate(plan, 1.0) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "values",
    [
        {"weighting": "even"},
        {"optimiser": "sgd"},
        {"rows": 0},
        {"distill": 1.5},
        {"smoothing": -1},
        {"lr": float("nan")},
        {"lr": 0.0},
    ],
)
def test_plans_refuse_what_they_cannot_do(values: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(values))):
        TrainPlan(**values)  # type: ignore[arg-type]
