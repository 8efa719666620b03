"""What `bench` runs: prompts, decoding and verify windows at depths, on random tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sparkinfer.errors import OptionError

Kind = Literal["prompt", "decode", "verify"]
_PREFIX: dict[Kind, str] = {"prompt": "pp", "decode": "tg", "verify": "v"}
_SEED = 20240229


@dataclass(frozen=True, slots=True)
class Workload:
    """`tokens` tokens processed after `depth` tokens are in the state.

    prompt: in one call; decode: one call each; verify: one window, logits of every row.
    """

    kind: Kind
    tokens: int
    depth: int

    @property
    def name(self) -> str:
        at = f" @ d{self.depth}" if self.depth else ""
        return f"{_PREFIX[self.kind]}{self.tokens}{at}"

    @property
    def tokens_a_call(self) -> int:
        """Tokens that one forward gets."""
        return 1 if self.kind == "decode" else self.tokens


def plan_workloads(
    prompts: Sequence[int], decodes: Sequence[int], widths: Sequence[int], depths: Sequence[int]
) -> list[Workload]:
    """Return every workload at every depth; a count of 0 leaves that kind out."""
    kinds: tuple[tuple[Kind, Sequence[int]], ...] = (
        ("prompt", prompts),
        ("decode", decodes),
        ("verify", widths),
    )
    return [
        Workload(kind, count, depth)
        for depth in depths
        for kind, counts in kinds
        for count in counts
        if count > 0
    ]


def random_tokens(count: int, n_vocab: int) -> list[int]:
    """Return `count` token ids below `n_vocab`, the same ones in every run."""
    drawn: list[int] = np.random.default_rng(_SEED).integers(0, n_vocab, count).tolist()
    return drawn


def parse_counts(flag: str, text: str, *, most: int = 2**24) -> list[int]:
    """Return the numbers of `1,2,4`, at most `most` each. Raises: OptionError with the flag."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) <= most for part in parts):
        raise OptionError(
            f"{flag} {text!r} is not a list of whole numbers from 0 to {most}, like 1,2,4"
        )
    return list(dict.fromkeys(int(part) for part in parts))
