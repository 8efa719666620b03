"""Between the torch draft and arrays under the names of the safetensors layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkinfer.errors import GGUFError
from sparkinfer.training.config import DraftShape
from sparkinfer.training.draft import DraftModel
from sparkinfer.training.export import Arrays, tensor_names


def parameter_name(name: str) -> str:
    """The parameter of DraftModel behind a tensor of the safetensors layout."""
    stem = name.removesuffix(".weight")
    if stem.startswith("layers."):
        _, layer, rest = stem.split(".", 2)
        return f"layers.{layer}.{rest.rpartition('.')[2]}"
    return stem.removeprefix("markov_head.")


def arrays_of(draft: DraftModel, draft_ids: Tensor | None) -> dict[str, npt.NDArray[Any]]:
    """All tensors of a draft as float32 arrays; `draft_ids` int32."""
    parameters = dict(draft.named_parameters())
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name in tensor_names(draft.shape):
        if name == "draft_ids":
            assert draft_ids is not None
            arrays[name] = draft_ids.cpu().numpy().astype(np.int32)
        else:
            arrays[name] = parameters[parameter_name(name)].detach().float().cpu().numpy()
    return arrays


def draft_of(shape: DraftShape, arrays: Arrays) -> tuple[DraftModel, Tensor | None]:
    """A draft with these tensors, on the CPU, and its vocabulary. Raises GGUFError for a tensor of another shape."""
    draft = DraftModel(shape)
    parameters = dict(draft.named_parameters())
    with torch.no_grad():
        for name in tensor_names(shape):
            if name == "draft_ids":
                continue
            own = parameters[parameter_name(name)]
            if arrays[name].shape != own.shape:
                raise GGUFError(f"{name} is {arrays[name].shape}, expected {tuple(own.shape)}")
            own.copy_(torch.from_numpy(np.array(arrays[name], np.float32)))
    ids = torch.from_numpy(arrays["draft_ids"].astype(np.int64)) if shape.vocabulary else None
    return draft, ids
