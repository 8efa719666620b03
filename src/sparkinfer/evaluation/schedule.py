"""Who is measured when: ABBA blocks by a fair coin from the seed, declared before the first sample."""

import random

from sparkinfer.evaluation.record import Plan, Scope, Side

_AA_STREAM = 1  # the A/A part has coins of its own, so that its length does not shift the others


def make_plan(scope: Scope, seed: int) -> Plan:
    """Return everything that is decided before the first sample."""
    return Plan(
        seed=seed,
        blocks=blocks(seed, scope.blocks),
        looks=scope.looks,
        delta=scope.delta,
        alpha=scope.alpha,
        primary=scope.primary,
        warmup=scope.warmup,
    )


def blocks(seed: int, count: int) -> tuple[tuple[Side, ...], ...]:
    """Return `count` blocks, each base-candidate-candidate-base or its mirror.

    A machine that grows slower or faster over a block then favours neither side. The coin of a block does not
    depend on how many blocks there are.
    """
    return _mirrored(random.Random(f"{seed}:0"), count, "base", "candidate")


def aa_blocks(seed: int, count: int) -> tuple[tuple[Side, ...], ...]:
    """Return the blocks in which the base is compared with itself."""
    return _mirrored(random.Random(f"{seed}:{_AA_STREAM}"), count, "a1", "a2")


def _mirrored(
    coin: random.Random, count: int, one: Side, other: Side
) -> tuple[tuple[Side, ...], ...]:
    found: list[tuple[Side, ...]] = []
    for _ in range(count):
        first, second = (one, other) if coin.random() < 0.5 else (other, one)
        found.append((first, second, second, first))
    return tuple(found)


def backwards(slot: int, slots: int) -> bool:
    """Whether a slot runs its requests from last to first: the second half does, so each side has both orders."""
    return 2 * slot >= slots
