"""What the policies choose, and why, on simulated acceptance; numbers in names are faults known of other engines."""

import json
import statistics

import pytest
from planner_simulator import (
    PLAIN_SECONDS,
    VERIFY,
    accepted,
    cheap,
    cost_table,
    decaying,
    fixed_time,
    flat,
    luck,
    policy_time,
    relative_costs,
    switching,
)

from sparkinfer.dflash.costs import Cost, CostTable, Observed
from sparkinfer.dflash.planner import POLICIES, Decision, Setup, make_policy
from sparkinfer.errors import OptionError
from sparkinfer.options import resolve

SECONDS = PLAIN_SECONDS


def steps_of(policy, table, keep, tokens, start=0, usual=True):
    """Decisions of one request; `keep(decision, step)` drafts are right."""
    decisions, done = [], 0
    policy.begin(start, usual=usual)
    while done < tokens:
        decision = policy.choose(start + done, tokens - done)
        kept = min(decision.width - 1, keep(decision, len(decisions)))
        cost = table.step(decision.width, decision.path, start + done)
        policy.observe(
            Observed(
                decision.width, decision.path, start + done, decision.width - 1, kept, cost, {}
            )
        )
        decisions.append(decision)
        done += kept + 1
    return decisions


def auto(table, depth=15, width=16):
    return POLICIES["auto"](Setup(table, depth, width))


def always_right(decision, step):
    return 15


def never_right(decision, step):
    return 0


def test_57_requests_with_penalties_teach_nothing_about_the_draft():
    """What penalties do to acceptance is used within the request and forgotten after it."""
    table = cost_table(cheap, 0.1)
    policy = POLICIES["always"](Setup(table, 15, 16))
    steps_of(policy, table, always_right, 300)
    before = policy.acceptance.rates
    steps_of(policy, table, never_right, 60, usual=False)
    assert policy.acceptance.rates[0] < 0.2 < before[0]
    policy.begin(0)
    assert policy.acceptance.rates[0] > 0.9
    assert policy.acceptance.reached[0] < 60


def test_the_table_of_policies_names_itself():
    table = cost_table(cheap, 0.1)
    names = {name: make(Setup(table, 15, 16, 4)).name for name, make in POLICIES.items()}
    assert names == {"auto": "auto", "always": "always", "fixed": "fixed", "off": "off"}


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({}, "auto"),
        ({"spec": "on"}, "always"),
        ({"spec": "off"}, "off"),
        ({"dflash_proposals": 3}, "fixed"),
        ({"dflash_proposals": 3, "spec": "on"}, "fixed"),
        ({"dflash_proposals": 3, "spec": "off"}, "off"),
    ],
)
def test_options_choose_the_policy(flags, name):
    assert make_policy(resolve(flags, {}), cost_table(cheap, 0.1), 15, 16).name == name


@pytest.mark.parametrize("name", ["auto", "always", "fixed", "off"])
def test_no_width_beyond_limit_draft_or_paths(name):
    policy = POLICIES[name](Setup(cost_table(cheap, 0.1), 7, 6, 4))
    policy.begin(0)
    for limit in (1, 2, 3, 5, 100):
        for step in range(20):
            decision = policy.choose(step, limit)
            assert 1 <= decision.width <= min(limit, 6)
            assert (decision.width == 1) == (decision.path == "ar")
            if limit == 1:
                assert decision.width == 1
            seconds = SECONDS * relative_costs(cheap, 0.1)[decision.width]
            drafted = decision.width - 1
            policy.observe(
                Observed(decision.width, decision.path, step, drafted, drafted, seconds, {})
            )


def test_a_good_draft_gets_wide_windows_a_bad_one_none():
    table = cost_table(cheap, 0.1)
    good, bad = auto(table), auto(table)
    assert steps_of(good, table, always_right, 600)[-3].width == 16
    assert good.expected_speedup() > 5.0
    widths = [decision.width for decision in steps_of(bad, table, never_right, 600)]
    assert statistics.fmean(width == 1 for width in widths) > 0.9
    assert bad.expected_speedup() == 1.0


def test_deeper_slots_are_explored_when_the_shallow_ones_go_well():
    """On costs that favour four rows at first sight, a draft that is always right reaches all sixteen."""
    table = cost_table(lambda width: 1.0 + 0.15 * width, 0.2)
    widths = [decision.width for decision in steps_of(auto(table), table, always_right, 400)]
    assert widths[0] < 16 and max(widths) == 16
    assert widths.index(16) < 25


def test_61_the_planner_leaves_its_assumptions_within_few_steps():
    table = cost_table(VERIFY["moe"], 0.3)
    widths = [decision.width for decision in steps_of(auto(table), table, never_right, 128)]
    assert widths[10:].count(1) >= 0.95 * len(widths[10:])
    widths = [decision.width for decision in steps_of(auto(table), table, always_right, 128)]
    assert all(width > 1 for width in widths[12:-1])


def test_15_a_draft_that_is_too_dear_ends_at_one_row():
    table = cost_table(VERIFY["moe"], 1.5)
    policy = auto(table)
    time = policy_time(policy, flat(0.6), luck(1, 600), relative_costs(VERIFY["moe"], 1.5), 600)
    assert time <= 1.03 * 600
    assert policy.report()["widths"]["1"] > 560


def test_55_where_rows_cost_full_price_it_is_plain_decoding():
    """Many sequences at once, or a token loop: a window costs its rows."""
    table = cost_table(lambda width: float(width), 0.1)
    policy = auto(table)
    decisions = steps_of(policy, table, always_right, 300)
    assert {decision.width for decision in decisions} == {1}
    assert decisions[0].why == "no acceptance could pay here"


def test_59_a_change_of_domain_beats_the_fixed_depth():
    """Good for 300 tokens, then bad: fifteen proposals at every step lose to the planner."""
    profile = switching(0.9, 0.25, 300)
    costs, draws = relative_costs(VERIFY["avx2"], 0.3), luck(5, 900)
    planner = policy_time(auto(cost_table(VERIFY["avx2"], 0.3)), profile, draws, costs, 900)
    assert planner < 0.6 * fixed_time(profile, draws, costs, 16, 900)
    assert planner < min(fixed_time(profile, draws, costs, w, 900) for w in (1, 2, 4, 6, 8, 16))


@pytest.mark.parametrize("verify", VERIFY)
def test_a_bad_stretch_does_not_switch_speculation_off_for_ever(verify):
    table = cost_table(VERIFY[verify], 0.1)
    policy = auto(table)
    steps_of(policy, table, never_right, 600)
    decisions = steps_of(policy, table, always_right, 600)
    assert policy.report()["probes"] > 0
    assert decisions[-2].width > 4
    assert sum(decision.width == 1 for decision in decisions) < 300


def test_a_decision_does_not_depend_on_what_lies_beyond_the_limit():
    """Two planners with the same past choose alike; tokens are never shown to them."""
    table = cost_table(cheap, 0.2)
    one, two = auto(table), auto(cost_table(cheap, 0.2))
    draws = luck(7, 300)
    for policy in (one, two):
        policy.begin(0)
    done = 0
    while done < 250:
        first, second = one.choose(done, 300 - done), two.choose(done, 300 - done)
        assert first == second
        kept = accepted(decaying(0.8, 0.9), draws, done, first.width - 1)
        seconds = SECONDS * relative_costs(cheap, 0.2)[first.width]
        step = Observed(first.width, first.path, done, first.width - 1, kept, seconds, {})
        one.observe(step)
        two.observe(step)
        done += kept + 1


def test_noise_on_the_clock_does_not_make_it_waver():
    table = cost_table(VERIFY["avx2"], 0.1)
    policy = auto(table)
    noise = [0.9, 1.1, 1.0, 1.05, 0.95]
    profile, draws = flat(0.85), luck(3, 1500)
    costs = relative_costs(VERIFY["avx2"], 0.1)
    policy_time(policy, profile, draws, costs, 1500, machine=lambda step: noise[step % 5])
    widths = policy.report()["widths"]
    assert widths["6"] > 0.9 * sum(widths.values())
    assert policy.report()["switches"] < 40


def test_a_machine_that_slows_down_as_a_whole_changes_no_choice():
    costs = relative_costs(VERIFY["avx2"], 0.3)
    profile, draws = decaying(0.9, 0.95), luck(11, 1000)
    widths = []
    for factor in (1.0, 2.5):
        policy = auto(cost_table(VERIFY["avx2"], 0.3))

        def machine(step, factor=factor):
            return factor if step > 60 else 1.0

        policy_time(policy, profile, draws, costs, 1000, machine=machine)
        widths.append({int(w): n for w, n in policy.report()["widths"].items()})
    steps = [sum(w.values()) for w in widths]
    assert abs(steps[0] - steps[1]) < 0.05 * steps[0]
    assert widths[1].get(6, 0) > 0.85 * widths[0][6]


def test_a_width_that_is_dearer_than_measured_is_left():
    """Six rows were measured at 2.2 and cost 4.5 in the loop: four rows are better, and it finds out."""
    table = cost_table(VERIFY["avx2"], 0.1)
    costs = relative_costs(VERIFY["avx2"], 0.1)
    costs[6] = costs[5] = 4.5
    policy = auto(table)
    policy_time(policy, flat(0.85), luck(2, 2000), costs, 2000)
    widths = policy.report()["widths"]
    assert widths.get("6", 0) + widths.get("5", 0) < 0.2 * sum(widths.values())


@pytest.mark.parametrize("factor", [2.0, 3.0])
@pytest.mark.parametrize("rate", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("verify", VERIFY)
def test_costs_that_were_measured_far_too_low_are_found_out(verify, rate, factor):
    """Every drafting step takes two or three times what the table says: one row is measured again soon enough."""
    costs = relative_costs(VERIFY[verify], 0.2)
    true = [0.0, 1.0, *(factor * cost for cost in costs[2:])]
    profile, draws = flat(rate), luck(1, 1000)
    time = policy_time(auto(cost_table(VERIFY[verify], 0.2)), profile, draws, true, 1000)
    best = min(fixed_time(profile, draws, true, width, 1000) for width in range(1, 17))
    assert time <= 1.06 * best


def test_the_cheapest_path_is_taken_and_a_path_that_refuses_is_left():
    s = SECONDS
    steps = {
        "compact": {w: Cost((s * (1 + 0.02 * w),), (s * 0.1,)) for w in (2, 3, 4)},
        "window": {w: Cost((s * (1 + 0.05 * w),), (s * 0.1,)) for w in range(2, 9)},
    }
    table = CostTable([0], (s,), steps)
    policy = POLICIES["fixed"](Setup(table, 15, 8, 3))
    policy.begin(0)
    assert policy.choose(0, 100).path == "compact"
    policy.observe(Observed(4, "window", 0, 3, 1, 1.2 * s, {}))  # compact refused, window ran
    assert policy.choose(2, 100).path == "window"
    assert policy.report()["refused"] == ["compact 4"]
    policy.begin(0)
    assert policy.choose(0, 100).path == "compact"
    wide = POLICIES["fixed"](Setup(table, 15, 8, 7))
    wide.begin(0)
    assert wide.choose(0, 100) == Decision(
        8, "window", "fixed: 7 drafted in every step (--draft-max)"
    )


@pytest.mark.parametrize("proposals", [8, 15])
def test_a_fixed_depth_beyond_the_draft_is_an_error_that_names_both(proposals):
    with pytest.raises(OptionError, match=rf"dflash_proposals={proposals} .* draft takes 1 to 7"):
        POLICIES["fixed"](Setup(cost_table(cheap, 0.1), 7, 16, proposals))


def test_a_fixed_depth_beyond_the_paths_is_an_error():
    with pytest.raises(OptionError, match=r"dflash_proposals=5 .* verify path takes 1 to 3"):
        POLICIES["fixed"](Setup(cost_table(cheap, 0.1), 15, 4, 5))


def test_fixed_keeps_its_depth_whatever_happens():
    table = cost_table(VERIFY["moe"], 0.5)
    policy = POLICIES["fixed"](Setup(table, 15, 16, 5))
    widths = [decision.width for decision in steps_of(policy, table, never_right, 100)]
    assert set(widths[:-6]) == {6} and widths[-1] == 1


def test_always_drafts_even_where_it_does_not_pay():
    table = cost_table(VERIFY["moe"], 0.5)
    policy = POLICIES["always"](Setup(table, 15, 16))
    widths = [decision.width for decision in steps_of(policy, table, never_right, 100)]
    assert min(widths[:-1]) == 2 and widths[-1] == 1
    assert policy.expected_speedup() < 1.0


def test_off_never_drafts():
    table = cost_table(cheap, 0.1)
    policy = POLICIES["off"](Setup(table, 15, 16))
    assert {d.width for d in steps_of(policy, table, always_right, 50)} == {1}
    assert policy.expected_speedup() == 1.0


def test_what_was_learned_outlives_a_request():
    table = cost_table(VERIFY["avx2"], 0.3)
    policy = auto(table)
    before = policy.expected_speedup()
    steps_of(policy, table, always_right, 300)
    policy.begin(0)
    assert policy.expected_speedup() > before
    for _ in range(12):
        steps_of(policy, table, never_right, 200)
    policy.begin(0)
    assert policy.expected_speedup() < before


def test_the_report_is_json_and_says_what_people_ask_for():
    table = cost_table(VERIFY["avx2"], 0.3)
    policy = auto(table)
    policy.begin(0)
    assert json.dumps(policy.report())  # before the first step
    policy_time(policy, flat(0.8), luck(4, 400), relative_costs(VERIFY["avx2"], 0.3), 400)
    report = json.loads(json.dumps(policy.report()))
    assert report["policy"] == "auto" and report["why"]
    assert report["acceptance"]["slots"][0]["reached"] > 50
    assert report["cost_of_width"]["6"]["relative"] == pytest.approx(2.5, rel=0.01)
    assert report["cost_of_width"]["6"]["ms"] == pytest.approx(25.0, rel=0.01)
    assert report["cost_of_width"]["1"]["rate"] == 1.0
    assert sum(report["widths"].values()) >= 100
    assert report["tau"] > 2.0 and report["expected_speedup"] > 1.2
    assert report["ledger"]["spent"] < report["ledger"]["plain"]
    assert report["costs"]["origin"] == "given"


def test_reasons_are_sentences_for_people():
    table = cost_table(cheap, 0.1)
    good = steps_of(auto(table), table, always_right, 400)
    assert any(d.why.startswith("best of 1..16: ") and d.why.endswith(" ms") for d in good)
    bad = [decision.why for decision in steps_of(auto(table), table, never_right, 400)]
    assert "the draft does not pay here" in bad
    assert any(why.startswith("probe with ") for why in bad)
    policy = auto(table)
    policy.begin(0)
    assert policy.choose(0, 1).why == "one row is all that makes sense here"
