"""Looks: after which numbers of blocks an evaluation may stop, and what chance of error each look may spend.

The looks are declared before the first sample. The spending function is Kim and DeMets' with exponent 2,
alpha * (share of blocks)**2: early looks stop only for what is plain to see and leave nearly all of alpha to the
last. Each look is tested at its own increment. The increments add up to alpha, so the chance of a wrong verdict at any
look is at most alpha (a union bound): nothing is assumed about how looks depend on each other. P values of few blocks
come in steps; what a look cannot spend goes to the next.

Guards can only fail, which is an error of its own kind. A tenth of alpha is theirs, all of them together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sparkinfer.evaluation.stats import attained

GUARD_SHARE = 0.1  # of alpha; the primary metric has the rest


@dataclass(frozen=True, slots=True)
class Look:
    """A look after `blocks` blocks; the primary metric's level is `alpha`, that of all guards `guard_alpha`.

    `alpha` 0: too few blocks to decide anything.
    """

    blocks: int
    alpha: float

    @property
    def guard_alpha(self) -> float:
        return self.alpha * GUARD_SHARE / (1 - GUARD_SHARE)


def spent(share: float, alpha: float) -> float:
    """What may be spent once this share of the blocks is there."""
    return alpha * share**2


def plan_looks(looks: Sequence[int], alpha: float) -> tuple[Look, ...]:
    """The level of each look; levels that sign-flip tests really attain add up to at most the primary's share."""
    planned, used, share = [], 0.0, (1 - GUARD_SHARE) * alpha
    for blocks in looks:
        allowed = share if blocks == looks[-1] else spent(blocks / looks[-1], share)
        level = max(0.0, allowed - used)
        real = attained(blocks, level)
        used += real
        planned.append(Look(blocks, level if real > 0 else 0.0))
    return tuple(planned)


def reached(looks: Sequence[int], blocks: int) -> int:
    """How many looks `blocks` complete blocks allow."""
    return sum(look <= blocks for look in looks)


def next_look(looks: Sequence[int], blocks: int) -> int | None:
    """The number of blocks to go on to, None if the last look is reached."""
    return next((look for look in looks if look > blocks), None)
