"""The judge judged, in short: benchmarks/judge_simulation.py has the long form."""

import math
from dataclasses import replace

import numpy as np
import pytest
from judge_simulator import (
    FOUND,
    MACHINES,
    SCOPE,
    contrasts,
    found_at_looks,
    original_rule,
    recorded,
    simulate,
)

from sparkinfer.evaluation.sequential import plan_looks
from sparkinfer.evaluation.stats import power
from sparkinfer.evaluation.verdict import judge

# Seeds are fixed: these tests give the same result in every run.
REPLAY = recorded(50 * np.exp(0.2 * np.random.default_rng(1).standard_t(3, 400)))


@pytest.mark.parametrize("name", list(MACHINES))
def test_false_alarms_at_looks(name: str) -> None:
    """At most 5 %, and a bit for 500 repetitions: three standard errors."""
    ratios = contrasts(MACHINES[name], 500, 12, seed=1)
    rate = found_at_looks(ratios, plan_looks((8, 12), 0.05)).mean()
    assert rate <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 500)


def test_false_alarms_of_whole_evaluations() -> None:
    machines = [*MACHINES.values(), REPLAY]
    judged = [judge(simulate(machine, seed)) for machine in machines for seed in range(25)]
    alarms = [judgement.verdict in FOUND for judgement in judged]
    assert sum(alarms) / len(alarms) <= 0.05
    labelled = [judgement.label not in (None, "eval-dflash:none") for judgement in judged]
    assert sum(labelled) <= sum(alarms)


@pytest.mark.parametrize("effect", [0.97, 0.99, 1.01, 1.03])
@pytest.mark.parametrize("name", ["calm", "bimodal"])
def test_changes_are_found_as_often_as_predicted(name: str, effect: float) -> None:
    machine, single = MACHINES[name], replace(SCOPE, looks=(12,), guards=())
    spread = math.sqrt((contrasts(machine, 300, 12, seed=2) ** 2).mean())
    predicted = power(math.log(effect), spread, 12, plan_looks((12,), 0.05)[0].alpha)
    wanted = "BETTER" if effect > 1 else "WORSE"
    verdicts = [
        judge(simulate(machine, seed, effect=effect, scope_of=single)).verdict for seed in range(40)
    ]
    found = verdicts.count(wanted) / len(verdicts)
    assert found == pytest.approx(predicted, abs=0.15)
    assert set(verdicts) <= {wanted, "INCONCLUSIVE", "EQUIVALENT"}


def test_the_original_rule_rewards_a_third_of_changes_that_change_nothing() -> None:
    rule = original_rule(MACHINES["calm"], 2000)
    assert 0.05 < rule.wins_one < 0.12 and 0.28 < rule.wins_best < 0.42
