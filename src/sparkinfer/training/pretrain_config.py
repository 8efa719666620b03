"""What a pretraining run is asked to do: the shape of the hybrid model and how it learns. Plain values, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparkinfer.errors import OptionError
from sparkinfer.models.config import GdnConfig, ModelConfig, MoeConfig
from sparkinfer.training.config import TrainPlan


@dataclass(frozen=True)
class TargetShape:
    """Shape of the model to train. Layer i is attention where (i + 1) % `interval` is 0, else Gated DeltaNet.

    Row lengths that are multiples of 256 (n_embd, width, shared, value_heads x ssm_size, heads x head_size) can be
    stored in K formats. `experts` 0 makes a dense model of feed-forward width `width`.
    """

    n_embd: int = 512
    layers: int = 6
    interval: int = 3
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 64
    rotated: int = 32
    key_heads: int = 4
    value_heads: int = 8
    ssm_size: int = 64
    taps: int = 4
    experts: int = 8
    used: int = 2
    width: int = 256
    shared: int = 256
    context: int = 2048
    rope_base: float = 10000.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.layers < self.interval or self.interval < 2:
            raise OptionError(
                f"{self.layers} layers with attention every {self.interval}: expected an interval of 2 or more, "
                "and at least as many layers"
            )
        if self.experts and not 1 <= self.used <= self.experts:
            raise OptionError(f"{self.used} experts used of {self.experts}: expected 1 or more")
        if self.value_heads % self.key_heads or self.heads % self.kv_heads:
            raise OptionError("value heads must be a multiple of key heads, heads of kv heads")

    def config(self, n_vocab: int, name: str) -> ModelConfig:
        """The model's configuration as its file will state it."""
        return ModelConfig(
            architecture="qwen35moe" if self.experts else "qwen35",
            name=name,
            n_layers=self.layers,
            n_vocab=n_vocab,
            n_embd=self.n_embd,
            n_ff=0 if self.experts else self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            rotated=self.rotated,
            rope_base=self.rope_base,
            eps=self.eps,
            context_length=self.context,
            recurrent=tuple((layer + 1) % self.interval != 0 for layer in range(self.layers)),
            gdn=GdnConfig(self.taps, self.key_heads, self.value_heads, self.ssm_size),
            moe=MoeConfig(self.experts, self.used, self.width, self.shared)
            if self.experts
            else None,
        )


@dataclass(frozen=True)
class PretrainJob:
    """A run. `teacher` gives the tokenizer, the chat template and, where `plan.distill` is above 0, its distribution;
    `data` is a folder of conversations-*.npz. `balance` weighs the loss that spreads tokens over the experts.

    The clock `plan.minutes` counts from the start of the run, compilation included.
    """

    teacher: Path
    data: Path
    output: Path
    shape: TargetShape
    plan: TrainPlan
    balance: float = 0.01
    fresh_embedding: bool = False
    held_out: int = 128
    matrices: str = "Q4_K"
    table: str = "Q4_K"
    name: str = "hybrid"
    device: str = "auto"
    compiled: bool = False
