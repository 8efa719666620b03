"""Training through quantised weights: steps see the matrices as a Q4_1 file has them, updates go to the exact ones.

The gradient passes straight through the rounding. What is learnt this way fits the grid, so that quantising at the end
costs little or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparkinfer.quant.encode import BLOCK

FORMAT = "Q4_1"
_STEPS = 15  # between a block's least and largest value
_LEAST = 1e-8


def on_grid(values: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor [..., a multiple of 32] with every 32 of its values on 16 levels from their least to their largest.

    Least value and step are rounded to half precision, as the file keeps them, so it keeps these values exactly. Not
    to be compiled: a compiler leaves such roundings out.
    """
    found = []
    for tensor in values:
        blocks = tensor.reshape(-1, BLOCK)
        low = blocks.amin(1, keepdim=True)
        step = ((blocks.amax(1, keepdim=True) - low) / _STEPS).half().float()
        low = low.half().float()
        codes = torch.round((blocks - low) / step.clamp(min=_LEAST)).clamp(0, _STEPS)
        found.append((codes * step + low).reshape(tensor.shape))
    return found


class Grid:
    """A draft's matrices, exact or on the grid. The Markov head's tables are left alone: they may be kept finer."""

    def __init__(self, draft: nn.Module) -> None:
        self.matrices = [
            parameter
            for name, parameter in draft.named_parameters()
            if parameter.ndim == 2 and "markov" not in name and parameter.shape[1] % BLOCK == 0
        ]
        self._exact: list[Tensor] | None = None

    @torch.no_grad()
    def enter(self) -> None:
        """Put the matrices on the grid, and keep the exact ones."""
        self._exact = [matrix.detach().clone() for matrix in self.matrices]
        for matrix, rounded in zip(self.matrices, on_grid(self.matrices), strict=True):
            matrix.copy_(rounded)

    @torch.no_grad()
    def leave(self) -> None:
        """Take the exact matrices back; nothing to do outside the grid."""
        if self._exact is None:
            return
        for matrix, exact in zip(self.matrices, self._exact, strict=True):
            matrix.copy_(exact)
        self._exact = None

    @torch.no_grad()
    def settle(self) -> None:
        """Put the matrices on the grid for good."""
        for matrix, rounded in zip(self.matrices, on_grid(self.matrices), strict=True):
            matrix.copy_(rounded)
