"""What a training run is asked to do: the shape of the draft, the data, the optimiser. Plain values, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from sparkinfer.errors import OptionError

WEIGHTINGS = ("dpace", "exponential")
OPTIMISERS = ("adamw", "muon")
PATTERNS = 0.3  # of the user turns


@dataclass(frozen=True)
class DraftShape:
    """Shape of a draft. `taps` are target layers (0 = the first) after which the residual stream is read.

    `vocabulary` 0 keeps the target's whole vocabulary; else the draft proposes only that many frequent tokens. Of these
    the first `active` (0: all) can always be proposed, the others once they have occurred in the text.
    `window` 0 lets a block see all context, else only keys nearer than `window` positions. `markov_rank` 0 leaves the
    Markov head out. `from_anchor`: the anchor's row proposes the token after it and every row its successor, so
    `block` rows give `block` tokens; else row k gives the token at its own place and the anchor's row gives none.
    `own_head`: the LM head is learnt and stored, else the target's rows serve.
    """

    n_embd: int
    n_ff: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    n_vocab: int
    target_layers: int
    taps: tuple[int, ...]
    block: int = 8
    from_anchor: bool = False
    causal: bool = True
    window: int = 0
    rope_base: float = 10000.0
    eps: float = 1e-6
    context_length: int = 8192
    mask_token: int = 0
    vocabulary: int = 0
    markov_rank: int = 0
    own_head: bool = False
    active: int = 0

    def __post_init__(self) -> None:
        bad = [tap for tap in self.taps if not 0 <= tap < self.target_layers]
        if bad or not self.taps:
            raise OptionError(
                f"taps {list(self.taps)}: expected layers from 0 to {self.target_layers - 1}"
            )
        if not 1 <= self.depth <= 15:
            raise OptionError(f"block size {self.block}: expected 1 to 15 proposed tokens")
        if not 1 <= self.layers <= 64:
            raise OptionError(f"draft layers {self.layers}: expected 1 to 64")
        for name in ("window", "markov_rank"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} {getattr(self, name)}: expected 0 or more")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise OptionError(f"kv heads {self.kv_heads}: expected a divisor of {self.heads} heads")
        if not 0 <= self.vocabulary <= self.n_vocab:
            raise OptionError(
                f"draft vocabulary {self.vocabulary}: expected 0 (all) to {self.n_vocab}"
            )
        if not 0 <= self.active <= self.vocabulary:
            raise OptionError(
                f"active tokens {self.active}: expected 0 (all) to the draft vocabulary, {self.vocabulary}"
            )

    @property
    def depth(self) -> int:
        """Tokens a block proposes."""
        return self.block if self.from_anchor else self.block - 1

    @property
    def outputs(self) -> int:
        """Tokens the draft can propose."""
        return self.vocabulary or self.n_vocab

    @property
    def features(self) -> int:
        return len(self.taps) * self.n_embd


def default_taps(target_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers spread over the target as published drafts do; one tap is the middle layer."""
    if count == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (count - 1)
    spread = (round(1 + j * step) for j in range(count))
    return tuple(dict.fromkeys(max(0, min(target_layers - 1, layer)) for layer in spread))


@dataclass(frozen=True)
class DataPlan:
    """How the target writes its conversations.

    `rows` conversations of `length` tokens, `batch` at a time. An answer is greedy, or drawn at `warm_temperature`
    for a share of `warm_share` of the rows; it ends after `answer_limit` tokens. User turns that the model writes are
    drawn at temperature 1. `patterns`: the share of the turns that are patterns filled at random, most of them whole
    questions; the others are left to the model from the first word or from an opener on.
    """

    rows: int
    length: int = 512
    batch: int = 64
    answer_limit: int = 256
    user_limit: int = 64
    warm_share: float = 0.2
    warm_temperature: float = 0.7
    min_p: float = 0.05
    patterns: float = PATTERNS

    def __post_init__(self) -> None:
        for name in ("rows", "length", "batch", "answer_limit", "user_limit"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} {getattr(self, name)}: expected 1 or more")
        if not 0 <= self.patterns <= 1:
            raise OptionError(f"patterns {self.patterns}: expected 0 to 1")


@dataclass(frozen=True)
class TrainPlan:
    """How the draft learns. A step sees `rows` conversations with `anchors` blocks each.

    The run ends after `steps`, or after `minutes` where that is not 0 (then steps only bound it). The learning rate
    rises over the first `warm_up` of the run and falls along a cosine to `final_lr` times its peak. From the share
    `grid_from` of the run on (1: never) steps see the matrices as Q4_1 has them. `gamma` belongs to the exponential
    weighting; `smoothing` to D-PACE: 1 takes every slot as accepted, 0 weighs the gradient of the expected accepted
    length itself, which gives up tokens that the draft finds hopeless; `reach` (0: none) makes D-PACE value an accepted
    slot m at exp(-(m - 1) / reach), for machines that verify few rows.
    """

    steps: int = 2000
    minutes: float = 0.0
    rows: int = 8
    anchors: int = 32
    optimiser: str = "adamw"
    lr: float = 1e-3
    warm_up: float = 0.04
    final_lr: float = 0.02
    clip: float = 1.0
    grid_from: float = 1.0
    weighting: str = "dpace"
    smoothing: float = 0.5
    gamma: float = 4.0
    reach: float = 0.0
    distill: float = 0.0
    seed: int = 0
    report_every: int = 100
    evaluate_every: int = 0
    save_every: int = 0

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS:
            raise OptionError(f"weighting {self.weighting!r}: accepted are {', '.join(WEIGHTINGS)}")
        if self.optimiser not in OPTIMISERS:
            raise OptionError(f"optimiser {self.optimiser!r}: accepted are {', '.join(OPTIMISERS)}")
        for name in ("steps", "rows", "anchors"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} {getattr(self, name)}: expected 1 or more")
        if not 0 < self.lr <= 1:
            raise OptionError(f"lr {self.lr}: expected more than 0, at most 1")
        for name in ("distill", "grid_from", "smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name} {getattr(self, name)}: expected 0 to 1")

    def progress(self, step: int, seconds: float) -> float:
        """The share of the run that is done, 0 to 1."""
        share = step / self.steps
        if self.minutes:
            share = max(share, seconds / (60 * self.minutes))
        return min(share, 1.0)
