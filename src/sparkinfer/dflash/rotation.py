"""The rotary table of a draft: plain, linear or YaRN, over the whole head, whatever its target does."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.errors import GGUFError, UnsupportedError
from sparkinfer.kernels.rope.reference import angles, factors

_KINDS = ("default", "linear", "yarn")


@dataclass(frozen=True)
class Rotation:
    """`base` and how positions beyond the trained ones are reached; the last four belong to YaRN."""

    base: float
    kind: str = "default"
    factor: float = 1.0
    original: int = 0  # positions before scaling
    fast: float = 32.0  # rotations over `original` above which a dimension keeps its frequency
    slow: float = 1.0  # ... below which it is divided by `factor`
    attention: float = 1.0  # multiplies queries and keys alike

    def divisors(self, size: int) -> NDArray[np.float32] | None:
        """What each frequency is divided by, float32 [size / 2]; None for 1."""
        if self.kind == "default":
            return None
        if self.kind == "linear":
            return np.full(size // 2, self.factor, np.float32)
        low, high = (self._dimension(turns, size) for turns in (self.fast, self.slow))
        low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
        ramp = (np.arange(size // 2) - low) / max(high - low, 0.001)
        keep = 1.0 - np.clip(ramp, 0.0, 1.0)
        return np.asarray(1.0 / (keep + (1.0 - keep) / self.factor), np.float32)

    def table(self, positions: int, size: int) -> NDArray[np.float32]:
        """Factors for halves (`kernels.rope.reference.factors`), float32 [positions, 2 size]."""
        plain = angles(positions, size, self.base, self.divisors(size))
        return factors(plain * np.float32(self.attention), interleaved=False)

    def _dimension(self, turns: float, size: int) -> float:
        """The dimension that turns this often over the original positions."""
        return size * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.base))


def rotation_of(path: Path, values: Mapping[str, Any], base: float, positions: int) -> Rotation:
    """From `rope_parameters` or `rope_scaling`; `base` and `positions` where they do not say.

    Raises UnsupportedError for another kind of scaling, GGUFError for a value that is no number.
    """
    if not isinstance(values, Mapping):
        raise GGUFError(f"{path}: rope parameters are {values!r}, expected an object")
    kind = values.get("rope_type", values.get("type", "default")) or "default"
    if kind not in _KINDS:
        raise UnsupportedError(
            f"{path}: rope type {kind!r} is not supported; accepted: {', '.join(_KINDS)}"
        )

    def number(name: str, default: float) -> float:
        value = values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise GGUFError(f"{path}: {name} is {value!r}, expected a positive number")
        return float(value)

    base, factor = number("rope_theta", base), number("factor", 1.0)
    if kind == "default":
        return Rotation(base)
    if kind == "linear":
        return Rotation(base, kind, factor)
    return Rotation(
        base,
        kind,
        factor,
        original=int(number("original_max_position_embeddings", positions)),
        fast=number("beta_fast", 32.0),
        slow=number("beta_slow", 1.0),
        attention=_attention_factor(values, number, factor),
    )


def _attention_factor(values: Mapping[str, Any], number: Any, factor: float) -> float:
    """YaRN's scale of queries and keys (https://arxiv.org/abs/2309.00071, equation 15), unless the file gives it."""

    def scale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    if values.get("attention_factor") is not None:
        return float(number("attention_factor", 1.0))
    if values.get("mscale") and values.get("mscale_all_dim"):
        return scale(number("mscale", 1.0)) / scale(number("mscale_all_dim", 1.0))
    return scale(1.0)
