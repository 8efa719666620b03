"""Machines that are never steady, and the evaluations they would give: the judge's own test bench.

A machine gives the logarithm of its speed for every reading in the order of time; a slot is one process and has one
reading for each figure. Nothing here runs a model.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from evaluation_records import SPEED, evaluation, scope
from numpy.typing import NDArray

from sparkinfer.evaluation import labels
from sparkinfer.evaluation.record import Evaluation, Guard, Metric, Sample, Scope
from sparkinfer.evaluation.schedule import aa_blocks, make_plan
from sparkinfer.evaluation.sequential import Look
from sparkinfer.evaluation.stats import SignFlip, attained

Floats = NDArray[np.float64]
Machine = Callable[[np.random.Generator, int, int], Floats]  # slots, readings a slot -> log speed

SCOPE = scope(
    prompts={"chat": ("a",), "code": ("b",), "maths": ("c",)},
    metrics=(Metric("dflash_tps", "primary"),),
    guards=(Guard("target", (128,)),),
    looks=(8, 12),
    noise_limit=0.5,  # the noise here is meant to be bad
)
FOUND = {"BETTER", "WORSE", "MIXED"}


def calm(random: np.random.Generator, slots: int, readings: int) -> Floats:
    """One per cent, every reading on its own."""
    return 0.01 * random.standard_normal((slots, readings))


def drift(random: np.random.Generator, slots: int, readings: int) -> Floats:
    """It grows 6 % slower over the evaluation and swings by 2 %, as a case heats up."""
    time = np.linspace(0, 1, slots * readings).reshape(slots, readings)
    swing = 0.02 * np.sin(2 * np.pi * (random.random() + time * random.uniform(0.5, 6)))
    return calm(random, slots, readings) + swing - 0.06 * time


def spikes(random: np.random.Generator, slots: int, readings: int) -> Floats:
    """One reading of twenty is up to 40 % slower: somebody else's work."""
    hit = random.random((slots, readings)) < 0.05
    return 0.5 * calm(random, slots, readings) - hit * random.uniform(0.05, 0.5, (slots, readings))


def bimodal(random: np.random.Generator, slots: int, readings: int) -> Floats:
    """Each process runs at one of two clocks, 5 % apart."""
    slow = random.random((slots, 1)) < 0.35
    return 0.3 * calm(random, slots, readings) - 0.05 * slow


def sticky_clock(random: np.random.Generator, slots: int, readings: int) -> Floats:
    """Two clocks 8 % apart; a change of clock comes once in thirty readings and stays."""
    change = random.random(slots * readings) < 1 / 30
    slow = (np.cumsum(change) % 2).reshape(slots, readings)
    return 0.3 * calm(random, slots, readings) - 0.08 * slow


def autocorrelated(random: np.random.Generator, slots: int, readings: int) -> Floats:
    """Two per cent, and a reading keeps 95 % of the one before."""
    pushes = 0.02 * math.sqrt(1 - 0.95**2) * random.standard_normal(slots * readings)
    pushes[0] = 0.02 * random.standard_normal()
    return (_memory(slots * readings) @ pushes).reshape(slots, readings)


@cache
def _memory(count: int) -> Floats:
    """How much of an earlier push is left in each reading, (reading, push)."""
    age = np.subtract.outer(np.arange(count), np.arange(count))
    return np.where(age >= 0, 0.95 ** np.maximum(age, 0), 0.0)


def heavy(random: np.random.Generator, slots: int, readings: int) -> Floats:
    """Student's t of two degrees: now and then a reading of any size."""
    return 0.01 * random.standard_t(2, (slots, readings))


MACHINES: dict[str, Machine] = {
    "calm": calm,
    "drift": drift,
    "spikes": spikes,
    "bimodal": bimodal,
    "sticky clock": sticky_clock,
    "autocorrelated": autocorrelated,
    "heavy tails": heavy,
}


def recorded(rates: Sequence[float]) -> Machine:
    """A machine that replays a recording from a random place on, in its own order, round and round."""
    logs = np.log(np.asarray(rates, np.float64))

    def machine(random: np.random.Generator, slots: int, readings: int) -> Floats:
        places = random.integers(len(logs)) + np.arange(slots * readings)
        return logs[places % len(logs)].reshape(slots, readings) - logs.mean()

    return machine


def simulate(
    machine: Machine,
    seed: int,
    *,
    effect: float = 1.0,
    guards: float = 1.0,
    scope_of: Scope = SCOPE,
) -> Evaluation:
    """The evaluation of a candidate whose primary rate is `effect` times the base's, on this machine."""
    random = np.random.default_rng([20240301, seed])
    plan = make_plan(scope_of, seed)
    orders = (*aa_blocks(seed, scope_of.aa_blocks), *plan.blocks)
    figures = [(scope_of.primary, cell, False, effect) for cell in scope_of.cells]
    figures += [
        (metric, guard.cell(context), True, guards)
        for guard in scope_of.guards
        for context in guard.contexts
        for metric in guard.metrics
    ]
    slots = sum(len(order) for order in orders)
    levels = iter(machine(random, slots, len(figures)))
    samples = [
        _sample(number, slot, side, figure, float(log))
        for number, order in enumerate(orders)
        for slot, side in enumerate(order)
        for figure, log in zip(figures, next(levels), strict=True)
    ]
    first = scope_of.aa_blocks
    return evaluation(
        blocks=0,
        seed=seed,
        scope_of=scope_of,
        aa=tuple(s for s in samples if s.block < first),
        samples=tuple(replace(s, block=s.block - first) for s in samples if s.block >= first),
    )


def _sample(
    block: int, slot: int, side: Any, figure: tuple[str, str, bool, float], log: float
) -> Sample:
    metric, cell, guard, factor = figure
    value = SPEED[metric] * math.exp(log) * (factor if side == "candidate" else 1.0)
    return Sample(block, slot, side, metric, cell, guard, value, "tok/s", 64, 64 / value)


def swapped(record: Evaluation) -> Evaluation:
    """The same evaluation with the sides exchanged: in each block the figures change places, the order stays."""
    values = {(s.block, s.slot, s.metric, s.cell): s for s in record.samples}
    partner = {0: 1, 1: 0, 2: 3, 3: 2}
    samples = [
        replace(values[s.block, partner[s.slot], s.metric, s.cell], slot=s.slot, side=s.side)
        for s in record.samples
    ]
    return replace(record, samples=tuple(samples))


READINGS = 5  # figures of a slot of `SCOPE`: three of the primary metric, then two guards


def contrasts(machine: Machine, count: int, blocks: int, seed: int) -> Floats:
    """Log ratios of blocks without any change, (count, blocks): what `simulate` would give, without the records."""
    cells = len(SCOPE.cells)
    random = np.random.default_rng([20240302, seed])
    found = np.empty((count, blocks))
    for number in range(count):
        slots = machine(random, 4 * blocks, READINGS)[:, :cells].mean(axis=1).reshape(blocks, 4)
        coins = random.choice((-1.0, 1.0), blocks)
        found[number] = coins * (slots[:, 0] - slots[:, 1] - slots[:, 2] + slots[:, 3]) / 2
    return found


def found_at_looks(ratios: Floats, looks: Sequence[Look]) -> Floats:
    """Of each row of log ratios, whether any look's interval excludes 0."""
    found = np.zeros(len(ratios), bool)
    for look in looks:
        assert attained(look.blocks, look.alpha) > 0
        for number in np.flatnonzero(~found):
            flips = SignFlip.of(ratios[number, : look.blocks])
            found[number] = flips.p() <= look.alpha
    return found


@dataclass(frozen=True, slots=True)
class Original:
    """Shares of changes that change nothing which the original's rule rewards or rejects."""

    wins_one: float
    wins_best: float
    rejected: float


def original_rule(machine: Machine, count: int, contexts: int = 5) -> Original:
    """One run a side, the candidate first, a gate at 2 %; on one context, and on the best of several."""
    random = np.random.default_rng(20240303)
    runs = np.array([_two_slots(machine, random, contexts) for _ in range(count)])
    gains = np.exp(runs[:, 0] - runs[:, 1]) - 1
    wins = gains >= labels.CUTS[-1][0]
    return Original(
        wins_one=float(wins[:, 0].mean()),
        wins_best=float(wins.any(axis=1).mean()),
        rejected=float((gains[:, 0] < labels.REJECT_UNDER - 1).mean()),
    )


def _two_slots(machine: Machine, random: np.random.Generator, readings: int) -> Floats:
    """Two neighbouring slots out of an evaluation's length of time."""
    slots = machine(random, 64, readings)
    first = int(random.integers(63))
    return slots[first : first + 2]


def shares(verdicts: Sequence[str]) -> Mapping[str, float]:
    """Share of each verdict."""
    return {name: verdicts.count(name) / len(verdicts) for name in sorted(set(verdicts))}
