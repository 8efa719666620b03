"""The estimate of per-slot acceptance: what it learns from, how fast, and what it assumes of slots it never saw."""

import json
import random
from itertools import pairwise

import pytest

from sparkinfer.dflash.acceptance import Acceptance

SLOTS = 15


def feed(acceptance, rates, steps, depth, seed=0):
    """Steps of `depth` drafts, the draft of slot k kept with rates[k]."""
    rng = random.Random(seed)
    for _ in range(steps):
        kept = 0
        while kept < depth and rng.random() < rates[kept]:
            kept += 1
        acceptance.observe(depth, kept)


def test_only_slots_that_were_reached_count():
    acceptance = Acceptance(SLOTS)
    acceptance.observe(drafted=5, accepted=2)  # two kept, the third rejected, two never judged
    assert acceptance.reached[:6] == [1, 1, 1, 0, 0, 0]
    assert acceptance.kept[:6] == [1, 1, 0, 0, 0, 0]


def test_a_full_block_says_nothing_about_the_next_slot():
    acceptance = Acceptance(SLOTS)
    acceptance.observe(drafted=3, accepted=3)
    assert acceptance.reached[:5] == [1, 1, 1, 0, 0]
    assert acceptance.kept[:5] == [1, 1, 1, 0, 0]


def test_nothing_drafted_teaches_nothing():
    acceptance = Acceptance(SLOTS)
    before = acceptance.rates
    acceptance.observe(drafted=0, accepted=0)
    assert acceptance.rates == before and acceptance.reached == [0] * SLOTS


def test_32_what_was_reached_adds_up_to_what_was_judged():
    rng = random.Random(3)
    acceptance, judged, kept_total = Acceptance(SLOTS), 0, 0
    for _ in range(300):
        drafted = rng.randint(0, SLOTS)
        kept = rng.randint(0, drafted)
        acceptance.observe(drafted, kept)
        judged += min(drafted, kept + 1)
        kept_total += kept
    assert sum(acceptance.reached) == judged and sum(acceptance.kept) == kept_total


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.9])
def test_it_settles_near_the_truth(rate):
    acceptance = Acceptance(SLOTS)
    feed(acceptance, [rate] * SLOTS, 600, 6)
    assert acceptance.rates[0] == pytest.approx(rate, abs=0.09)
    truth = sum(rate**k for k in range(6))
    assert acceptance.expected(5) == pytest.approx(truth, rel=0.12)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.2), (0.2, 0.9)])
def test_a_change_of_text_shows_within_thirty_steps(before, after):
    errors = []
    for seed in range(20):
        acceptance = Acceptance(SLOTS)
        feed(acceptance, [before] * SLOTS, 400, 6, seed)
        feed(acceptance, [after] * SLOTS, 30, 6, seed + 100)
        errors.append(abs(acceptance.rates[0] - after))
    assert sum(errors) / len(errors) < 0.15


def test_slots_never_seen_follow_the_shallower_ones():
    good, bad = Acceptance(SLOTS), Acceptance(SLOTS)
    feed(good, [0.95] * SLOTS, 100, 2)
    feed(bad, [0.3] * SLOTS, 100, 2)
    assert good.reached[2:] == [0] * 13
    assert min(good.rates) > 0.7 and max(bad.rates[2:]) < 0.5


def test_a_cliff_after_the_first_slot_is_found():
    acceptance = Acceptance(SLOTS)
    feed(acceptance, [0.9] + [0.2] * 14, 300, 3)
    assert acceptance.rates[0] > 0.8 and acceptance.rates[1] < 0.35
    assert max(acceptance.rates[3:]) < 0.4


def test_expected_tokens_grow_with_the_depth_and_start_at_one():
    acceptance = Acceptance(SLOTS)
    feed(acceptance, [0.8] * SLOTS, 50, 8)
    expected = [acceptance.expected(depth) for depth in range(SLOTS + 1)]
    assert expected[0] == 1.0
    gains = [b - a for a, b in pairwise(expected)]
    assert all(0.0 < later <= earlier for earlier, later in pairwise(gains))
    assert gains[0] == pytest.approx(acceptance.rates[0])
    assert acceptance.expected(99) == expected[-1]


def test_a_new_request_softens_what_was_learned_but_keeps_it():
    acceptance = Acceptance(SLOTS)
    unknown = acceptance.rates[0]
    feed(acceptance, [0.1] * SLOTS, 100, 4)
    learned = acceptance.rates[0]
    acceptance.soften()
    assert learned < acceptance.rates[0] < unknown
    assert acceptance.steps == 100


def test_plain_steps_age_the_recent_past_not_the_long_one():
    """After long plain stretches a single good try counts for more than right after a bad one."""
    fresh, aged = Acceptance(SLOTS), Acceptance(SLOTS)
    for acceptance in (fresh, aged):
        feed(acceptance, [0.1] * SLOTS, 200, 4)
    fresh.observe(4, 4, since=0)
    aged.observe(4, 4, since=100)
    assert aged.rates[0] > fresh.rates[0]


def test_a_rate_is_never_certain():
    acceptance = Acceptance(SLOTS)
    for _ in range(2000):
        acceptance.observe(15, 15)
    assert max(acceptance.rates) < 1.0
    for _ in range(2000):
        acceptance.observe(15, 0)
    assert min(acceptance.rates) > 0.0


def test_the_report_is_json_and_tells_counts_and_estimates():
    acceptance = Acceptance(2)
    acceptance.observe(2, 1)
    report = json.loads(json.dumps(acceptance.report()))
    first, second = report["slots"]
    assert (first["slot"], first["reached"], first["accepted"]) == (1, 1, 1)
    assert (second["slot"], second["reached"], second["accepted"]) == (2, 1, 0)
    assert 0.0 < second["estimate"] < first["estimate"] < 1.0
    assert sum(report["memories"].values()) == pytest.approx(1.0, abs=0.01)
