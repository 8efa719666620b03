"""Feed-forward parts of hybrid models in torch: dense, and routed experts with a shared one.

The matrices of all experts are stacked: gate and up [experts x width, n_embd], down [n_embd, experts x width]. With few
experts every expert computes every token and the routing weights mask the hidden activations: three large products,
no reordering, nothing dropped. With many, the tokens of each expert are gathered; that form is for frozen targets.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkinfer.models.config import ModelConfig, MoeConfig
from sparkinfer.training.target import rms_norm

DENSE_EXPERTS = 32  # up to here all experts compute every token


def exact_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T in float32, outside autocast: for the few outputs that decide (routers, decays)."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), weight.float())


class DenseFeedForward(nn.Module):
    """SwiGLU behind a norm."""

    NAMES: ClassVar[dict[str, str]] = {
        "norm": "post_attention_norm.weight",
        "gate": "ffn_gate.weight",
        "up": "ffn_up.weight",
        "down": "ffn_down.weight",
    }

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.eps = config.eps
        keep(self, tensors)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the stream [..., n_embd], and a balance loss of zero."""
        y = rms_norm(x, self.norm, self.eps)
        hidden = F.silu(F.linear(y, self.gate)) * F.linear(y, self.up)
        return F.linear(hidden, self.down), torch.zeros((), device=x.device)


class Experts(nn.Module):
    """Routed experts and a shared one behind a norm."""

    NAMES: ClassVar[dict[str, str]] = {
        "norm": "post_attention_norm.weight",
        "router": "ffn_gate_inp.weight",
        "shared_router": "ffn_gate_inp_shexp.weight",
        "gate": "ffn_gate_exps.weight",
        "up": "ffn_up_exps.weight",
        "down": "ffn_down_exps.weight",
        "shared_gate": "ffn_gate_shexp.weight",
        "shared_up": "ffn_up_shexp.weight",
        "shared_down": "ffn_down_shexp.weight",
    }

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        assert config.moe is not None
        self.eps, self.moe = config.eps, config.moe
        keep(self, tensors)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the stream [..., n_embd], and the loss that is least (1) when all experts are used
        alike.
        """
        rows = rms_norm(x, self.norm, self.eps).flatten(0, -2)
        probabilities = exact_linear(rows, self.router).softmax(-1)
        best, ids = probabilities.topk(self.moe.used, -1)
        weights = best / best.sum(-1, keepdim=True)
        dense = self.moe.experts <= DENSE_EXPERTS
        routed = self._all(rows, ids, weights) if dense else self._gathered(rows, ids, weights)
        hidden = F.silu(F.linear(rows, self.shared_gate)) * F.linear(rows, self.shared_up)
        share = torch.sigmoid(exact_linear(rows, self.shared_router[None]))
        shared = F.linear(hidden, self.shared_down) * share.to(hidden.dtype)
        return (routed + shared).view(x.shape), balance(probabilities, ids, self.moe)

    def _all(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        mask = torch.zeros(len(rows), self.moe.experts, device=rows.device).scatter(1, ids, weights)
        hidden = F.silu(F.linear(rows, self.gate)) * F.linear(rows, self.up)
        split = hidden.unflatten(-1, (self.moe.experts, self.moe.width))
        return F.linear((split * mask[..., None].to(hidden.dtype)).flatten(1), self.down)

    def _gathered(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=self.moe.experts).tolist()
        out = torch.zeros_like(rows)
        for expert, places in enumerate(order.split(counts)):
            if not len(places):
                continue
            tokens, part = places // self.moe.used, slice_of(self.moe, expert)
            some = rows[tokens]
            hidden = F.silu(F.linear(some, self.gate[part])) * F.linear(some, self.up[part])
            result = F.linear(hidden, self.down[:, part])
            out.index_add_(0, tokens, result * weights.flatten()[places, None].to(result.dtype))
        return out


def slice_of(moe: MoeConfig, expert: int) -> slice:
    """The expert's rows of the stacked matrices."""
    return slice(expert * moe.width, (expert + 1) * moe.width)


def balance(probabilities: Tensor, ids: Tensor, moe: MoeConfig) -> Tensor:
    """experts x sum over experts of (share of the choices) x (mean probability), arXiv 2101.03961, section 2.2."""
    chosen = torch.zeros_like(probabilities).scatter(1, ids, 1.0)
    return moe.experts * (chosen.mean(0) / moe.used * probabilities.mean(0)).sum()


def keep(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Make `tensors` the module's parameters; they learn only where a trainer asks for it."""
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
