"""Intervals of the comparison with another engine: rounds and prompts both widen them, and say so."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from sides.intervals import shown, speedup_interval


def seconds(random, rounds, prompts, *, by_round=0.08, by_prompt=0.2):
    """Ours and theirs, of which ours is 1.5 times faster in the middle."""
    theirs = random.uniform(0.5, 1.5, prompts) * np.exp(0.05 * random.standard_normal((rounds, 1)))
    speedup = np.exp(
        by_round * random.standard_normal((rounds, 1)) + by_prompt * random.standard_normal(prompts)
    )
    return theirs / (1.5 * speedup), theirs


def test_the_point_is_the_mean_of_the_rounds_and_each_has_all_prompts():
    found = speedup_interval([[1.0, 1.0], [1.0, 3.0]], [[2.0, 2.0], [4.0, 4.0]])
    assert found["rounds"] == pytest.approx([2.0, 2.0])
    assert found["point"] == pytest.approx(2.0)
    assert found["over"] == ["rounds"]  # two prompts are too few


def test_one_round_says_that_it_is_one():
    ours, theirs = seconds(np.random.default_rng(1), 1, 20)
    found = speedup_interval(ours, theirs)
    low, high = found["interval"]
    assert found["over"] == ["prompts"] and low < found["point"] < high
    assert shown(found).endswith(", one round)")
    assert shown(speedup_interval([[1.0]], [[2.0]])) == "2.00 (?)"


def test_rounds_that_differ_widen_the_interval():
    ours, theirs = seconds(np.random.default_rng(2), 1, 20)
    same = speedup_interval(np.repeat(ours, 3, 0), np.repeat(theirs, 3, 0))
    turns = np.array([[0.9], [1.0], [1.1]])
    differing = speedup_interval(ours * turns, np.repeat(theirs, 3, 0))
    assert np.ptp(np.log(differing["interval"])) > 2 * np.ptp(np.log(same["interval"]))
    assert shown(differing).count("round") == 0


@pytest.mark.parametrize(("rounds", "prompts"), [(2, 12), (4, 24)])
def test_nineteen_of_twenty_intervals_hold_the_truth(rounds, prompts):
    """The truth is what very many rounds and prompts of the same kind give."""
    random = np.random.default_rng(3)
    ours, theirs = seconds(random, 1000, 2000)
    truth = float(np.exp(np.log(theirs.sum(1) / ours.sum(1)).mean()))
    held = 0
    for _ in range(120):
        low, high = speedup_interval(*seconds(random, rounds, prompts))["interval"]
        held += low <= truth <= high
    assert held / 120 > 0.9, held
