"""The draft's objective: weighted cross-entropy over the slots of a block.

Weights say how much a slot adds to the accepted length. `exponential`: exp(-(k - 1) / gamma) for slot k. `dpace`
(arXiv 2605.18810): the expected gain of slot k, the sum over m >= k of the products of the acceptance of slots 1 ..
m, where an acceptance is the draft's own probability of the label, smoothed towards 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkinfer.training.config import TrainPlan


def reachable(labels: Tensor, counts: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Labels as output numbers, and the slots that can be accepted, both [..., depth].

    `index` [n_vocab] maps a target id to its output number, -1 for a token the draft cannot propose: such a slot is a
    sure rejection, so neither it nor the slots after it count.
    """
    if index is None:
        return labels, counts
    places = index[labels]
    return places.clamp(min=0), (counts & (places >= 0)).cumprod(-1).bool()


def slot_weights(losses: Tensor, counts: Tensor, plan: TrainPlan) -> Tensor:
    """Weight of every slot [..., depth], zero where it does not count; `losses` are cross-entropies of the labels."""
    if plan.weighting == "exponential":
        steps = torch.arange(losses.shape[-1], device=losses.device, dtype=torch.float32)
        return torch.exp(-steps / plan.gamma) * counts
    accepted = plan.smoothing + (1 - plan.smoothing) * torch.exp(-losses.detach().float())
    reached = accepted.cumprod(-1) * counts
    if plan.reach:
        steps = torch.arange(losses.shape[-1], device=losses.device, dtype=torch.float32)
        reached = reached * torch.exp(-steps / plan.reach)
    return reached.flip(-1).cumsum(-1).flip(-1) * counts


def block_loss(
    logits: Tensor, labels: Tensor, counts: Tensor, plan: TrainPlan, soft: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loss, and which slots the draft gets right [..., depth].

    logits [..., depth, outputs]; labels and counts [..., depth] from `reachable`. `soft`: the target's logits over
    the same outputs; a share `plan.distill` of the objective is then the cross-entropy with its distribution.
    """
    scores = F.log_softmax(logits.float(), -1)
    losses = -scores.gather(-1, labels[..., None])[..., 0]
    weights = slot_weights(losses, counts, plan)
    objective = losses
    if soft is not None and plan.distill:
        matched = -(soft.float().softmax(-1) * scores).sum(-1)
        objective = (1 - plan.distill) * losses + plan.distill * matched
    total = (weights * objective).sum() / weights.sum().clamp(min=1e-6)
    right = (logits.detach().argmax(-1) == labels) & counts
    return total, right


def expected_length(right: Tensor, real: Tensor) -> Tensor:
    """Mean accepted length of full blocks, the target's own token included: 1 + slots right from the first on.

    right [b, n, depth]; real [b, n].
    """
    prefix = right.cumprod(-1).sum(-1)
    return 1 + (prefix * real).sum() / real.sum().clamp(min=1)
