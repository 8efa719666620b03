"""Within 3 % of the best single width in hindsight, on means over requests of 1,000 tokens (simulated clock)."""

import pytest
from planner_simulator import DRAFTS, PROFILES, VERIFY, mean_regret, simulate

REQUESTS = 6
# Two kinds of case need more than that: first slots that fail often before a good rest, where the allowance
# of two plain steps may be gone before the draft is known, and gains of a few per cent, where it may run out.
HARD = {"cliff .7 then .9": 0.10, "flat 0.60": 0.06, "flat 0.70": 0.06, "decaying .8 x .85": 0.06}


def regret(verify, draft, profile, requests=REQUESTS):
    return mean_regret(
        [simulate(PROFILES[profile], VERIFY[verify], draft, s, 1000) for s in range(requests)]
    )


@pytest.mark.parametrize("draft", [0.1, 0.5])
@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("profile", ["flat 0.00", "flat 0.30"])
def test_bad_drafts(verify, draft, profile):
    assert regret(verify, draft, profile) < 0.03


@pytest.mark.parametrize("draft", [0.1, 0.5])
@pytest.mark.parametrize("verify", VERIFY)
def test_drafts_that_pay_little_or_nothing(verify, draft):
    assert regret(verify, draft, "flat 0.50") < 0.045


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("profile", ["flat 0.80", "flat 0.90", "decaying .9 x .93"])
def test_good_drafts(verify, profile):
    assert regret(verify, 0.3, profile) < 0.035


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize(
    "profile", ["switch .9/.2 each 200", "switch .2/.9 each 500", "switch .95/.5 each 100"]
)
def test_changing_text(verify, profile):
    assert regret(verify, 0.3, profile) < 0.03


@pytest.mark.parametrize("verify", VERIFY)
def test_a_first_slot_that_is_good_alone(verify):
    assert regret(verify, 0.1, "cliff .9 then .2") < 0.03


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("verify", VERIFY)
def test_everything(verify, draft):
    for profile in PROFILES:
        assert regret(verify, draft, profile, 20) < HARD.get(profile, 0.045), profile
