"""Small evaluation records for tests: two domains, one guard, samples from a seeded noise."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sparkinfer.evaluation.record import (
    Build,
    Check,
    Correctness,
    Evaluation,
    Guard,
    InputFile,
    Metric,
    OneTime,
    Sample,
    Scope,
    StepMs,
)
from sparkinfer.evaluation.schedule import aa_blocks, make_plan

SPEED = {"dflash_tps": 300.0, "ar_tps": 200.0, "decode_tps": 180.0, "prefill_tps": 900.0}
FILE = InputFile("tiny.gguf", "ab" * 32, 1000)


def scope(**changes: Any) -> Scope:
    plain = Scope(
        name="tiny",
        title="a scope for tests",
        device="cpu",
        target="tiny.gguf",
        draft="draft.gguf",
        prompts={"chat": ("Why?",), "code": ("Sort a list.", "Reverse a list.")},
        metrics=(Metric("dflash_tps", "primary"), Metric("ar_tps")),
        tokens=64,
        looks=(8, 12),
        guards=(Guard("target", (128,)),),
    )
    return replace(plain, **changes)


def evaluation(
    speed_up: float = 1.0,
    *,
    noise: float = 0.005,
    seed: int = 1,
    blocks: int = 12,
    cells: Mapping[str, float] | None = None,
    guards: float = 1.0,
    scope_of: Scope | None = None,
    **changes: Any,
) -> Evaluation:
    """A record in which the candidate's primary rate is `speed_up` times the base's, `guards` its guards.

    `noise`: standard deviation of the logarithm of one figure. `cells`: factors of single cells.
    """
    chosen = scope_of or scope()
    random = np.random.default_rng(seed)
    plan = make_plan(chosen, seed)
    factors = dict.fromkeys(chosen.cells, speed_up) | dict(cells or {})
    samples = [
        _sample(block, slot, side, metric, cell, guard, factor, noise, random)
        for block in range(blocks)
        for slot, side in enumerate(plan.blocks[block])
        for metric, cell, guard, factor in _figures(chosen, factors, guards)
    ]
    aa = [
        _sample(block, slot, side, metric, cell, guard, 1.0, noise, random)
        for block, order in enumerate(aa_blocks(seed, chosen.aa_blocks))
        for slot, side in enumerate(order)
        for metric, cell, guard, _ in _figures(chosen, factors, guards)
    ]
    correct = tuple(
        Correctness("spec_agree", cell, side, True, "64/64", {"agree": 1.0})
        for cell in chosen.cells
        for side in ("base", "candidate")
    )
    record = Evaluation(
        id="tiny-1",
        created="2026-11-30T00:00:00Z",
        scope=chosen,
        base=Build("git", "main", "1" * 40, None, "2" * 40, "3" * 64, "4" * 64),
        candidate=Build("git", "faster", "5" * 40, "1" * 40, "6" * 40, "7" * 64, "4" * 64),
        inputs={"model": FILE, "draft": FILE, "target": FILE},
        machine={"cpu": "toy", "cores": 2},
        preflight=(Check("load", 0.1, "ok"),),
        plan=plan,
        correctness=correct,
        aa=tuple(aa),
        samples=tuple(samples),
        one_time=(OneTime(0, 0, "base", "load", 1.5),),
        events=(),
        seconds=60.0,
    )
    return replace(record, **changes)


def _figures(
    chosen: Scope, factors: Mapping[str, float], guards: float
) -> list[tuple[str, str, bool, float]]:
    plain = [
        (metric.name, cell, False, factors[cell] if metric.role == "primary" else 1.0)
        for metric in chosen.metrics
        for cell in chosen.cells
    ]
    watched = [
        (metric, guard.cell(context), True, guards)
        for guard in chosen.guards
        for context in guard.contexts
        for metric in guard.metrics
    ]
    return plain + watched


def _sample(
    block: int,
    slot: int,
    side: Any,
    metric: str,
    cell: str,
    guard: bool,
    factor: float,
    noise: float,
    random: np.random.Generator,
) -> Sample:
    speed = SPEED[metric] * (factor if side == "candidate" else 1.0)
    value = float(speed * np.exp(noise * random.standard_normal()))
    speculative = metric == "dflash_tps"
    return Sample(
        block=block,
        slot=slot,
        side=side,
        metric=metric,
        cell=cell,
        guard=guard,
        value=value,
        unit="tok/s",
        tokens=64,
        seconds=64 / value,
        paths={"window": 20, "ar": 4} if speculative else {"ar": 64},
        accept=2.6 if speculative else None,
        step_ms=StepMs(1.0, 6.0, 0.2, 0.1) if speculative else None,
        slots=((24, 20), (20, 12), (12, 6)) if speculative else (),
    )
