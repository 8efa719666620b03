"""Tiny targets in torch, and drafts of them."""

from pathlib import Path

import torch

from sparkinfer.training.config import DraftShape
from sparkinfer.training.draft import DraftModel
from sparkinfer.training.target import TorchTarget

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
LLAMA, QWEN3 = GOLDEN / "llama-tiny-F32.gguf", GOLDEN / "qwen3-tiny-Q8_0.gguf"


def tiny_shape(target: TorchTarget, **changes: object) -> DraftShape:
    """A draft shape that fits the target."""
    c = target.config
    values: dict[str, object] = {
        "n_embd": c.n_embd,
        "n_ff": c.n_ff,
        "layers": 2,
        "heads": c.heads,
        "kv_heads": c.kv_heads,
        "head_size": c.head_size,
        "n_vocab": c.n_vocab,
        "target_layers": c.n_layers,
        "taps": (0, c.n_layers - 2),
        "block": 4,
        "rope_base": c.rope_base,
        "context_length": 512,
        "mask_token": 7,
    }
    return DraftShape(**{**values, **changes})  # type: ignore[arg-type]


def random_draft(target: TorchTarget, **changes: object) -> DraftModel:
    """A draft with random weights everywhere, norms and the mask's embedding included."""
    torch.manual_seed(5)
    draft = DraftModel(tiny_shape(target, **changes))
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(
                1 + 0.1 * noise if parameter.ndim == 1 else noise * parameter.shape[1] ** -0.5
            )
    return draft
