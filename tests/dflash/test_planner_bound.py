"""Never slower: whatever the draft does, a request of 128 tokens or more takes at most plain time / 0.97."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from planner_simulator import VERIFY, cost_table, relative_costs

from sparkinfer.dflash.costs import Cost, CostTable, Observed
from sparkinfer.dflash.ledger import GROWTH, LIMIT, MOST, START, Ledger
from sparkinfer.dflash.planner import POLICIES, Decision, Policy, Setup

Adversary = Callable[[Decision, int, int], int]  # decision, step, tokens so far -> drafts to keep


def run(policy: Policy, table: CostTable, adversary: Adversary, tokens: int, start: int = 0):
    """Seconds of one request and of plain decoding, under the cost table."""
    done, seconds, plain, step = 0, 0.0, 0.0, 0
    policy.begin(start)
    while done < tokens:
        length = start + done
        decision = policy.choose(length, tokens - done)
        assert 1 <= decision.width <= tokens - done
        drafted = decision.width - 1
        kept = min(drafted, adversary(decision, step, done))
        cost = table.step(decision.width, decision.path, length)
        policy.observe(Observed(decision.width, decision.path, length, drafted, kept, cost, {}))
        plain += sum(table.plain(length + i) for i in range(kept + 1))
        seconds += cost
        done += kept + 1
        step += 1
    return seconds, plain


def never(decision, step, done):
    return 0


def good_then_bad(after):
    return lambda decision, step, done: 15 if done < after else 0


def probes_only(decision, step, done):
    """Right when it is only tried, wrong when it is relied on."""
    return 15 if decision.why.startswith("probe") else 0


def just_enough(decision, step, done):
    """Two of three steps are right: what looks like paying and hardly does."""
    return 1 if step % 3 else 0


def by_turns(decision, step, done):
    return 15 if (step // 5) % 2 else 0


ADVERSARIES = {
    "never": never,
    "good then bad": good_then_bad(40),
    "good for long, then bad": good_then_bad(400),
    "probes only": probes_only,
    "just enough": just_enough,
    "by turns": by_turns,
}


@pytest.mark.parametrize("tokens", [128, 129, 200, 1000])
@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("draft", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("verify", VERIFY)
def test_known_adversaries(verify, draft, adversary, tokens):
    table = cost_table(VERIFY[verify], draft)
    policy = POLICIES["auto"](Setup(table, 15, 16))
    seconds, plain = run(policy, table, ADVERSARIES[adversary], tokens)
    assert seconds <= plain / 0.97


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    """Any machine: costs that need not even grow with the width, and that change with the context."""
    plain = (0.01, 0.01 * draw(st.floats(1.0, 4.0)))
    steps = {}
    for width in range(2, draw(st.integers(2, 16)) + 1):
        times = draw(st.floats(0.8, 8.0))
        steps[width] = Cost(
            tuple(p * times for p in plain), (0.001 * draw(st.floats(0.0, 5.0)),) * 2
        )
    return CostTable([32, 1024], plain, {"window": steps})


@given(
    table=tables(),
    trace=st.lists(st.integers(0, 15), min_size=1, max_size=60),
    tokens=st.integers(128, 400),
    start=st.integers(0, 600),
    depth=st.integers(1, 15),
)
@example(table=cost_table(VERIFY["avx2"], 0.5), trace=[0], tokens=128, start=0, depth=15)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_trace_on_any_machine(table, trace, tokens, start, depth):
    policy = POLICIES["auto"](Setup(table, depth, 16))
    keep = lambda decision, step, done: trace[step % len(trace)]  # noqa: E731
    seconds, plain = run(policy, table, keep, tokens, start)
    assert seconds <= plain / 0.97


@given(
    verify=st.sampled_from(sorted(VERIFY)),
    requests=st.lists(st.integers(1, 40) | st.integers(128, 160), min_size=5, max_size=40),
    trace=st.lists(st.sampled_from([0, 0, 0, 1, 15]), min_size=1, max_size=20),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_many_short_requests_cannot_each_lose_the_allowance(verify, requests, trace):
    table = cost_table(VERIFY[verify], 0.3)
    policy = POLICIES["auto"](Setup(table, 15, 16))
    spent = plain = 0.0
    turn = 0

    def keep(decision, step, done):
        nonlocal turn
        turn += 1
        return trace[turn % len(trace)]

    for tokens in requests:
        seconds, alone = run(policy, table, keep, tokens)
        spent, plain = spent + seconds, plain + alone
        if tokens >= 128:
            assert seconds <= alone / 0.97
    assert spent <= plain * (1.0 + max(GROWTH)) + START * table.plain(0) + 1e-9


def test_gains_of_a_request_may_be_lost_again_but_not_those_of_an_earlier_one():
    ledger = Ledger()
    ledger.begin(0, 1.0)
    ledger.spend(2.0)
    ledger.reach(10, 1.0)
    assert ledger.balance > 9.0 and ledger.allows(9.0)
    ledger.begin(10, 1.0)
    assert ledger.balance == MOST  # a small part of it


def test_a_request_starts_with_no_more_than_what_all_have_left():
    ledger = Ledger()
    for _ in range(10):
        ledger.begin(0, 1.0)
        assert ledger.balance <= START
        ledger.spend(1.9)
        ledger.reach(1, 1.0)
    assert ledger.balance < 0.0 and not ledger.allows(1.1)


@pytest.mark.parametrize("saved", [0.0, 1.0, 2.0, 3.0, 50.0])
def test_what_128_tokens_may_lose_is_bounded_whatever_was_saved(saved):
    ledger = Ledger()
    ledger.saved = saved
    ledger.begin(0, 1.0)
    start = ledger.balance
    for token in range(127):
        ledger.spend(1.0)
        ledger.reach(token + 1, 1.0)
    assert ledger.balance <= LIMIT + 1e-9 and start <= MOST
    assert 127 + LIMIT <= 127 / 0.97


def test_of_a_request_that_was_cut_only_one_token_of_the_last_step_counts():
    ledger = Ledger()
    ledger.begin(0, 1.0)
    ledger.spend(2.5)  # a step of many rows; the stop string was in its first token
    ledger.begin(50, 1.0)
    assert ledger.balance == pytest.approx(START - 2.5 + 1.0 + GROWTH[0])


def test_a_loss_at_a_long_context_weighs_what_it_costs_there():
    ledger = Ledger()
    ledger.begin(0, 1.0)
    ledger.reach(1, 3.0)  # a plain step now takes three times as long
    before = ledger.balance
    ledger.spend(1.5)
    assert before - ledger.balance == pytest.approx(4.5)


def test_the_bound_holds_when_the_machine_slows_down_and_up_again():
    """Costs seen differ from the table by one common factor: relative to that machine the bound is the same."""
    table = cost_table(VERIFY["avx2"], 0.3)
    policy = POLICIES["auto"](Setup(cost_table(VERIFY["avx2"], 0.3), 15, 16))
    costs = relative_costs(VERIFY["avx2"], 0.3)
    done = step = 0
    spent = 0.0
    policy.begin(0)
    while done < 600:
        decision = policy.choose(done, 600 - done)
        factor = 3.0 if 100 < step < 300 else 1.0
        kept = min(decision.width - 1, 15 if (step // 7) % 3 == 0 else 0)
        seconds = table.step(decision.width, decision.path, done) * factor
        policy.observe(
            Observed(decision.width, decision.path, done, decision.width - 1, kept, seconds, {})
        )
        spent += costs[decision.width]
        done, step = done + kept + 1, step + 1
    assert spent <= 600 / 0.97
