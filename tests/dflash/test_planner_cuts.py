"""Windows cut by the draft's own claims: what is gained, what a liar may cost, and the bound on any trace."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner_simulator import (
    LIARS,
    PLAIN_SECONDS,
    PROFILES,
    UNEVEN,
    VERIFY,
    auto,
    cost_table,
    cut,
    flat,
    luck,
    observed,
    policy_time,
    relative_costs,
)
from test_planner_bound import tables

from sparkinfer.dflash.acceptance import Acceptance
from sparkinfer.dflash.costs import Observed
from sparkinfer.dflash.planner import POLICIES, Setup

TOKENS = 1000


def time_of(verify, draft, profile, claims, seeds=3, tokens=TOKENS):
    """Plain steps a planner that knows nothing takes for a request, on average."""
    costs = relative_costs(VERIFY[verify], draft)
    times = [
        policy_time(
            auto(VERIFY[verify], draft), profile, luck(s, tokens), costs, tokens,
            claims=claims, draft=draft,
        )
        for s in range(seeds)
    ]  # fmt: skip
    return sum(times) / seeds


@pytest.mark.parametrize(
    ("verify", "name", "gain"),
    [
        ("avx2", "uneven .98/.30, half", 1.10),
        ("avx2", "uneven .99/.05, .6", 1.15),
        ("moe", "uneven .98/.30, half", 1.10),
        ("cheap", "uneven .99/.05, .6", 1.06),
        ("cheap", "uneven .95/.50, .7", 1.03),
    ],
)
def test_a_draft_that_knows_when_it_is_sure_gains(verify, name, gain):
    profile = UNEVEN[name]
    silent = time_of(verify, 0.1, profile, None)
    assert silent > gain * time_of(verify, 0.1, profile, profile)


def waiting(verify, name, wait, believed):
    """A request with windows that start ahead unless the planner waits for claims: its policy and its plain steps."""
    profile, costs = UNEVEN[name], relative_costs(VERIFY[verify], 0.1)
    policy = POLICIES["auto"](Setup(cost_table(VERIFY[verify], 0.1, believed), 15, 16))
    time = policy_time(
        policy, profile, luck(1, TOKENS), costs, TOKENS, claims=profile, draft=0.1, wait=wait
    )
    return policy, time


@pytest.mark.parametrize("wait", [0.02, 0.2])
@pytest.mark.parametrize("name", ["uneven .98/.30, half", "uneven .7/.6, half"])
@pytest.mark.parametrize("verify", ["moe", "cheap"])
def test_the_target_waits_for_claims_where_that_pays(verify, name, wait):
    policy, time = waiting(verify, name, wait, wait)
    never, ahead = waiting(verify, name, wait, 1e3)
    _, cutting = waiting(verify, name, wait, 1e-9)
    assert never.calibration.known and not never.cuts
    assert time < 1.03 * min(ahead, cutting)
    if (verify, name, wait) == ("moe", "uneven .98/.30, half", 0.02):
        assert policy.cuts and time < 0.95 * ahead


@pytest.mark.parametrize("liar", LIARS)
@pytest.mark.parametrize("profile", ["flat 0.00", "flat 0.70", "flat 0.90"])
@pytest.mark.parametrize("verify", VERIFY)
def test_a_liar_costs_little_more_than_a_draft_that_tells_nothing(verify, profile, liar):
    """In the first 1,000 tokens of a process; what is learned of it stays."""
    silent = time_of(verify, 0.1, PROFILES[profile], None, seeds=2)
    assert time_of(verify, 0.1, PROFILES[profile], LIARS[liar], seeds=2) < 1.15 * silent


@pytest.mark.parametrize("liar", LIARS)
def test_a_liar_is_found_out_for_good(liar):
    policy, profile = auto(VERIFY["avx2"], 0.1), flat(0.9)
    costs = relative_costs(VERIFY["avx2"], 0.1)

    def request(claims, seed):
        return policy_time(
            policy, profile, luck(seed, TOKENS), costs, TOKENS, claims=claims, draft=0.1
        )

    request(LIARS[liar], 1)
    later = sum(request(LIARS[liar], seed) for seed in (2, 3, 4))
    silent = auto(VERIFY["avx2"], 0.1)
    known = [policy_time(silent, profile, luck(s, TOKENS), costs, TOKENS) for s in (1, 2, 3, 4)]
    assert later < 1.06 * sum(known[1:])


def run(policy, table, keep, claim, tokens, start=0):
    """Seconds of one request and of plain decoding; `keep(step)` drafts are right, `claim(step, slot)` is claimed."""
    done, seconds, plain, step = 0, 0.0, 0.0, 0
    policy.begin(start)
    while done < tokens:
        length = start + done
        asked = policy.choose(length, tokens - done)
        decision, told = cut(policy, asked, [claim(step, slot) for slot in range(asked.width - 1)])
        assert 1 <= decision.width <= asked.width
        assert (decision.width == 1) == (decision.path == "ar")
        kept = min(decision.width - 1, keep(step))
        cost = table.step(decision.width, decision.path, length)
        if decision.width < asked.width:
            cost += table.drafting(asked.width, length) - table.drafting(decision.width, length)
        assert cost <= table.step(asked.width, asked.path, length) * (1.0 + 1e-9)
        policy.observe(observed(asked, decision, length, kept, cost, told))
        plain += sum(table.plain(length + i) for i in range(kept + 1))
        seconds += cost
        done += kept + 1
        step += 1
    return seconds, plain


@given(
    table=tables(),
    trace=st.lists(st.integers(0, 15), min_size=1, max_size=60),
    claims=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60),
    tokens=st.integers(128, 400),
    start=st.integers(0, 600),
    depth=st.integers(1, 15),
    requests=st.integers(1, 3),
)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_never_slower_whatever_is_claimed_on_any_machine(
    table, trace, claims, tokens, start, depth, requests
):
    policy = POLICIES["auto"](Setup(table, depth, 16))
    for _ in range(requests):
        seconds, plain = run(
            policy,
            table,
            lambda step: trace[step % len(trace)],
            lambda step, slot: claims[(3 * step + slot) % len(claims)],
            tokens,
            start,
        )
        assert seconds <= plain / 0.97


BETRAYALS = {
    "sure and wrong": (lambda step: 0, lambda step, slot: 0.999),
    "unsure and right": (lambda step: 15, lambda step, slot: 0.001),
    "honest, then sure and wrong": (
        lambda step: 15 if step < 80 else 0,
        lambda step, slot: 0.999,
    ),
    "right when unsure": (
        lambda step: 15 if step % 2 else 0,
        lambda step, slot: 0.05 if step % 2 else 0.95,
    ),
    "sure of the first slot alone": (lambda step: 1 if step % 3 else 0, lambda step, slot: 0.9 / (1 + 8 * slot)),
}  # fmt: skip


@pytest.mark.parametrize("tokens", [128, 1000])
@pytest.mark.parametrize("betrayal", BETRAYALS)
@pytest.mark.parametrize("draft", [0.1, 0.5])
@pytest.mark.parametrize("verify", VERIFY)
def test_known_betrayals(verify, draft, betrayal, tokens):
    table = cost_table(VERIFY[verify], draft)
    policy = POLICIES["auto"](Setup(table, 15, 16))
    for _ in range(3):
        seconds, plain = run(policy, table, *BETRAYALS[betrayal], tokens)
        assert seconds <= plain / 0.97


def trained(name="auto", verify="avx2", tokens=3000, proposals=0):
    """A policy that has seen a draft which knows itself."""
    policy = POLICIES[name](Setup(cost_table(VERIFY[verify], 0.1), 15, 16, proposals))
    profile = UNEVEN["uneven .98/.30, half"]
    costs = relative_costs(VERIFY[verify], 0.1)
    policy_time(policy, profile, luck(1, tokens), costs, tokens, claims=profile, draft=0.1)
    return policy


def test_what_is_cut_depends_on_claims():
    policy = trained()
    policy.begin(0)
    for _ in range(100):
        asked = policy.choose(0, 100)
        if asked.cutter and asked.width >= 4:
            break
        policy.observe(Observed(asked.width, asked.path, 0, asked.width - 1, 0, 0.01, {}))
    sure = [0.99] * (asked.width - 1)
    assert all(policy.more(sure[: slot + 1]) for slot in range(len(sure)))
    assert policy.cut(sure) == asked


def test_cuts_are_counted_and_explained():
    policy = trained()
    report = json.loads(json.dumps(policy.report()))
    assert sum(report["cuts"].values()) > 50
    assert sum(report["claims"][0]["seen"]) > 50
    assert "1" in report["cuts"]  # where the draft is unsure of the first slot already
    for _ in range(400):
        asked = policy.choose(0, 100)
        decision, told = cut(policy, asked, [0.3] * 15)
        if decision.width < asked.width:
            break
        policy.observe(observed(asked, decision, 0, 0, 0.01, told))
    assert decision.why.endswith(f"cut to {decision.width}, the draft is not sure")


def test_a_fixed_depth_and_probes_are_never_cut():
    fixed = POLICIES["fixed"](Setup(cost_table(VERIFY["avx2"], 0.1), 15, 16, 5))
    fixed.begin(0)
    assert fixed.choose(0, 100).cutter is None
    policy = auto(VERIFY["avx2"], 0.1)
    policy.begin(0)
    probes = 0
    for step in range(300):
        asked = policy.choose(step, 1000)
        if asked.why.startswith("probe"):
            probes += 1
            assert asked.cutter is None
        decision, told = cut(policy, asked, [0.5] * 15)
        seconds = PLAIN_SECONDS * relative_costs(VERIFY["avx2"], 0.1)[asked.width]
        policy.observe(observed(asked, decision, step, 0, seconds, told))
    assert probes


def test_always_leaves_one_draft():
    policy = trained("always")
    assert policy.report()["cuts"] and "1" not in policy.report()["cuts"]


def test_what_was_cut_counts_with_its_claim():
    """Only blocks that look good are judged at their second slot; the estimate is that of all blocks."""
    seen, blind = Acceptance(7), Acceptance(7)
    for step in range(400):
        if step % 2:  # sure, and right
            seen.observe(2, 2)
            blind.observe(2, 2)
        else:  # unsure of the second slot: cut before it
            seen.observe(1, 1, 0, [0.1])
            blind.observe(1, 1)
    assert seen.rates[1] == pytest.approx(0.55, abs=0.1)
    assert blind.rates[1] > 0.9
    assert seen.reached[:2] == [400, 200] == seen.kept[:2]  # for people: what was judged


def test_57_penalties_teach_nothing_about_claims_either():
    policy = trained()
    before = policy.report()["claims"]
    policy.begin(0, usual=False)
    for step in range(80):
        asked = policy.choose(step, 1000)
        decision, told = cut(policy, asked, [0.95] * 15)
        policy.observe(observed(asked, decision, step, 0, 0.01, told))
    policy.begin(0)
    assert policy.report()["claims"] == before


def test_a_cut_step_teaches_its_own_width_without_the_draft_it_paid_for():
    table = cost_table(VERIFY["avx2"], 0.1)
    whole = table.step(4, "window", 0)
    paid = []
    for _ in range(40):
        seconds = 1.3 * table.step(2, "window", 0)
        paid.append(table.observe(Observed(2, "window", 0, 1, 1, seconds, {}, asked=4)))
    assert paid[-1] == pytest.approx(1.3 * 1.7, rel=0.05)
    assert table.step(4, "window", 0) > whole  # as all drafting steps do
    plain = table.plain(0)
    one = table.observe(Observed(1, "ar", 0, 0, 0, 1.5 * plain, {}, asked=4))
    assert one > 1.0 and table.plain(0) == plain  # a mixture: it says nothing about plain steps
