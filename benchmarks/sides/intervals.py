"""How sure a ratio of times is: over the rounds that were run and over the prompts that were chosen.

Rounds differ by what the machine does, prompts by what is asked. Both are samples, so both widen the interval: over
rounds Student's of the mean logarithm, over prompts a bootstrap that draws prompts with replacement. The statistics
are those of `sparkinfer.evaluation`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.evaluation.stats import bca_interval, student_interval

ALPHA = 0.05
Floats = NDArray[np.float64]


def speedup_interval(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """How many times faster ours is, from seconds by round and prompt, with an interval of 95 %.

    `point` is the geometric mean of the `rounds`, each with all its prompts. `over` says what the interval is about:
    one round tells nothing of others, and a few prompts nothing of other ones.
    """
    own, other = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    logs = np.log(other.sum(1) / own.sum(1))
    point = float(logs.mean())
    below, above, over = 0.0, 0.0, []

    def of_prompts(chosen: Floats) -> Floats:
        places = chosen.astype(int)
        means: Floats = np.log(other[:, places].sum(2) / own[:, places].sum(2)).mean(0)
        return means

    prompts = bca_interval(np.arange(own.shape[1]), ALPHA, statistic=of_prompts)
    if prompts is not None:
        over.append("prompts")
        below, above = point - prompts[0], prompts[1] - point
    rounds = student_interval(logs, ALPHA)
    if rounds is not None:
        over.append("rounds")
        half = rounds[1] - point
        below, above = math.hypot(below, half), math.hypot(above, half)
    return {
        "point": math.exp(point),
        "interval": [math.exp(point - below), math.exp(point + above)] if over else None,
        "over": over,
        "rounds": np.exp(logs).tolist(),
    }


def shown(found: dict[str, Any]) -> str:
    """`1.73 (1.65 to 1.80)`; with a mark where rounds are not in it."""
    text = f"{found['point']:.2f}"
    if found["interval"] is None:
        return f"{text} (?)"
    low, high = found["interval"]
    return f"{text} ({low:.2f} to {high:.2f}{'' if 'rounds' in found['over'] else ', one round'})"
