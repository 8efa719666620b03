"""Weights of hybrid models: read from a file, drawn at random, and turned back into a file's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkinfer.errors import GGUFError
from sparkinfer.gguf import ModelFile
from sparkinfer.models.config import ModelConfig, MoeConfig, read_config
from sparkinfer.training.hybrid import GatedAttention, GatedDeltaNet, HybridLayer, HybridModel
from sparkinfer.training.moe import DenseFeedForward, Experts
from sparkinfer.training.target import WeightReader

Part = type[GatedDeltaNet] | type[GatedAttention] | type[DenseFeedForward] | type[Experts]
Make = Callable[
    [Part | None, str, str], Tensor
]  # of a part (None: the model), a parameter's name, its name in a file

_TOP = {"embedding": "token_embd.weight", "output_norm": "output_norm.weight"}
_EXACT = ("router", "alpha", "beta", "conv")  # matrices that stay float32
_DECAY_RATES = (1.0, 16.0)  # of heads at the start, times a step of
_STEPS = (1e-3, 1e-1)


def _assemble(config: ModelConfig, make: Make, tied: bool) -> HybridModel:
    def part(kind: Any, layer: int) -> Any:
        names = kind.NAMES.items()
        return kind(config, {own: make(kind, own, f"blk.{layer}.{name}") for own, name in names})

    layers = []
    for index, recurrent in enumerate(config.recurrent):
        mixer = part(GatedDeltaNet if recurrent else GatedAttention, index)
        layers.append(HybridLayer(mixer, part(Experts if config.moe else DenseFeedForward, index)))
    top = {own: make(None, own, name) for own, name in _TOP.items()}
    if not tied:
        top["head"] = make(None, "head", "output.weight")
    return HybridModel(config, top, layers)


def load_hybrid(file: ModelFile, device: str | torch.device, dtype: torch.dtype) -> HybridModel:
    """Read a model of the qwen35 or qwen35moe kind: matrices as `dtype`, what decides and all vectors as float32.

    Raises GGUFError for a missing tensor or a decay that grows, UnsupportedError for a format without a decoder.
    """
    config = read_config(file)
    read = WeightReader(file, device, torch.float32)

    def make(_part: Part | None, own: str, name: str) -> Tensor:
        tensor = read(name)
        if own == "decay_log":
            if bool((tensor > 0).any()):
                raise GGUFError(f"{name} has values above 0: such a state grows without bound")
            return tensor.neg().log()
        if tensor.ndim == 3:
            tensor = _stacked(tensor, own)
        exact = tensor.ndim == 1 or own in _EXACT
        return tensor if exact else tensor.to(dtype)

    return _assemble(config, make, "output.weight" not in file.tensors).eval()


def _stacked(tensor: Tensor, own: str) -> Tensor:
    """Experts' matrices [experts, outputs, inputs] side by side: down along its inputs, the others along outputs."""
    if own == "down":
        return tensor.permute(1, 0, 2).flatten(1)
    return tensor.flatten(0, 1)


def _unstacked(tensor: Tensor, own: str, moe: MoeConfig) -> Tensor:
    if own == "down":
        return tensor.unflatten(1, (moe.experts, moe.width)).permute(1, 0, 2)
    return tensor.unflatten(0, (moe.experts, moe.width))


def file_tensors(model: HybridModel) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Names and float32 values of all tensors as a file has them, slowest dimension first."""
    config = model.config
    for own, name in _TOP.items():
        yield name, _array(getattr(model, own))
    if model.head is not model.embedding:
        yield "output.weight", _array(model.head)
    for index, layer in enumerate(model.layers):
        for part in (layer.mixer, layer.feed_forward):
            for own, name in part.NAMES.items():
                value = getattr(part, own).detach()
                if own == "decay_log":
                    value = -value.double().exp()
                elif "_exps." in name:
                    assert config.moe is not None
                    value = _unstacked(value, own, config.moe)
                yield f"blk.{index}.{name}", _array(value)


def _array(tensor: Tensor) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(tensor.detach().float().cpu().numpy())


def random_hybrid(config: ModelConfig, seed: int, tied: bool = True) -> HybridModel:
    """A model to train from scratch, on the CPU in float32. Projections into the stream start small."""
    random = torch.Generator().manual_seed(seed)
    depth = 1 / math.sqrt(2 * config.n_layers)

    def make(part: Part | None, own: str, _name: str) -> Tensor:
        shape = _shape(config, part, own)
        if own.endswith("norm"):
            return torch.ones(shape)
        if own == "decay_log":
            low, high = _DECAY_RATES
            return (low + (high - low) * torch.rand(shape, generator=random)).log()
        if own == "time_bias":
            low, high = (math.log(step) for step in _STEPS)
            step = (low + (high - low) * torch.rand(shape, generator=random)).exp()
            return step + (-torch.expm1(-step)).log()  # softplus of it is the step
        if own in ("embedding", "head"):
            return 0.04 * torch.randn(shape, generator=random)
        inputs = config.moe.width if own == "down" and config.moe else shape[-1]
        scale = inputs**-0.5 * (depth if own in ("output", "down", "shared_down") else 1)
        return scale * torch.randn(shape, generator=random)

    return _assemble(config, make, tied)


def _shape(config: ModelConfig, part: Part | None, own: str) -> tuple[int, ...]:
    """The shape of a parameter, slowest dimension first."""
    n, gdn, moe = config.n_embd, config.gdn, config.moe
    shapes: dict[str, tuple[int, ...]] = {"norm": (n,)}
    if part is None:
        shapes = {
            "embedding": (config.n_vocab, n),
            "head": (config.n_vocab, n),
            "output_norm": (n,),
        }
    elif part is GatedAttention:
        inner, outer = config.heads * config.head_size, config.kv_heads * config.head_size
        shapes |= {"q": (2 * inner, n), "k": (outer, n), "v": (outer, n), "output": (n, inner)}
        shapes |= {"q_norm": (config.head_size,), "k_norm": (config.head_size,)}
    elif part is GatedDeltaNet:
        assert gdn is not None
        shapes |= {
            "qkv": (gdn.channels, n),
            "gate": (gdn.value_width, n),
            "alpha": (gdn.value_heads, n),
            "beta": (gdn.value_heads, n),
            "conv": (gdn.channels, gdn.taps),
            "decay_log": (gdn.value_heads,),
            "time_bias": (gdn.value_heads,),
            "head_norm": (gdn.head_size,),
            "output": (n, gdn.value_width),
        }
    elif part is Experts:
        assert moe is not None
        stacked = moe.experts * moe.width
        shapes |= {"router": (moe.experts, n), "shared_router": (n,)}
        shapes |= {"gate": (stacked, n), "up": (stacked, n), "down": (n, stacked)}
        shapes |= {"shared_gate": (moe.shared, n), "shared_up": (moe.shared, n)}
        shapes |= {"shared_down": (n, moe.shared)}
    else:
        shapes |= {"gate": (config.n_ff, n), "up": (config.n_ff, n), "down": (n, config.n_ff)}
    return shapes[own]
