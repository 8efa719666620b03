"""Learning rate and optimisers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from sparkinfer.training.config import TrainPlan

MATRIX_RATE = (
    2.0  # Muon's updates have the size of AdamW's at the same rate; matrices take a larger one
)


def learning_rate(plan: TrainPlan, progress: float) -> float:
    """The rate after a share `progress` of the run: a linear rise, then a cosine down to `final_lr` of the peak."""
    if progress < plan.warm_up:
        return plan.lr * max(progress / plan.warm_up, 1e-3)
    share = (progress - plan.warm_up) / max(1e-9, 1 - plan.warm_up)
    return plan.lr * (
        plan.final_lr + (1 - plan.final_lr) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    )


class Optimiser:
    """AdamW for everything, or Muon for the layers' matrices and AdamW for the rest."""

    def __init__(self, draft: nn.Module, plan: TrainPlan) -> None:
        self.plan = plan
        named = list(draft.named_parameters())
        muon = [p for name, p in named if plan.optimiser == "muon" and _is_layer_matrix(name, p)]
        chosen = {id(p) for p in muon}
        rest = [p for _, p in named if id(p) not in chosen]
        on_gpu = any(p.is_cuda for p in rest)
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=on_gpu)
        ]
        self.scales = [1.0]
        if muon:
            self.parts.append(
                torch.optim.Muon(muon, lr=plan.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
            )
            self.scales.append(MATRIX_RATE)
        self.parameters = [p for _, p in named]

    def step(self, progress: float) -> float:
        """Clip, update, forget the gradients; the rate used."""
        rate = learning_rate(self.plan, progress)
        nn.utils.clip_grad_norm_(self.parameters, self.plan.clip, foreach=True)
        for part, scale in zip(self.parts, self.scales, strict=True):
            for group in part.param_groups:
                group["lr"] = rate * scale
            part.step()
            part.zero_grad(set_to_none=True)
        return rate

    def forget(self) -> None:
        """Drop gradients of a step that was not finished."""
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> list[dict[str, object]]:
        return [part.state_dict() for part in self.parts]

    def load(self, states: Iterable[dict[str, object]]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


# Tables, and small matrices that decide instead of mixing: Muon would give every direction of theirs the same weight.
_NOT_MIXING = ("markov", "embedding", "router", "conv", "alpha", "beta", "own_head")


def _is_layer_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and not any(part in name for part in _NOT_MIXING)
