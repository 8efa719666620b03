"""What the draft's claims are worth: corrected by what comes of them, and what cutting by them would have gained."""

import json
import random

import numpy as np
import pytest

from sparkinfer.dflash.base import Confident
from sparkinfer.dflash.claims import Blocks, Calibration
from sparkinfer.dflash.proposals import BlockProposals, MarkovHead, Output, likelihood
from sparkinfer.models.table import Table
from sparkinfer.sampling.lazy import LazyRow


def worth(calibration, slot, claim):
    """Of the last of several slots that all claim the same."""
    return calibration.worths([claim] * (slot + 1), slot)[0]


def judge(calibration, claims, rates, blocks, seed=0):
    """Blocks of one claim a slot; the token of slot k is right with rates[k]."""
    rng = random.Random(seed)
    for _ in range(blocks):
        kept = 0
        while kept < len(claims) and rng.random() < rates[kept]:
            kept += 1
        calibration.observe(claims, kept, min(kept + 1, len(claims)))


@pytest.mark.parametrize("claim", [0.05, 0.3, 0.7, 0.95])
def test_at_first_the_draft_is_believed(claim):
    calibration = Calibration()
    assert worth(calibration, 0, claim) == pytest.approx(claim)
    assert not calibration.known


@pytest.mark.parametrize(("claim", "rate"), [(0.9, 0.2), (0.1, 0.8), (0.5, 0.95), (0.99, 0.0)])
def test_a_liar_is_found_out(claim, rate):
    calibration = Calibration()
    judge(calibration, [claim], [rate], 200)
    assert worth(calibration, 0, claim) == pytest.approx(rate, abs=0.1)


def test_an_honest_draft_stays_believed():
    calibration, rng = Calibration(), random.Random(4)
    for _ in range(600):
        claim = rng.random()
        calibration.observe([claim], int(rng.random() < claim), 1)
    for claim in (0.15, 0.5, 0.85):
        assert worth(calibration, 0, claim) == pytest.approx(claim, abs=0.15)


def test_claims_that_mean_nothing_are_worth_the_same_even_where_none_was_judged():
    """Only claims above one half are judged, as if windows were cut below; all are right nine times in ten."""
    calibration, rng = Calibration(), random.Random(5)
    for _ in range(300):
        calibration.observe([0.5 + rng.random() / 2], int(rng.random() < 0.9), 1)
    assert worth(calibration, 0, 0.25) > 0.6


def test_slots_that_were_not_judged_teach_nothing():
    calibration = Calibration()
    calibration.observe([0.9, 0.9, 0.9], 0, 1)
    assert worth(calibration, 0, 0.9) < 0.9
    judge(calibration, [0.9, 0.9, 0.9], [0.9, 0.9, 0.9], 60)
    before = worth(calibration, 1, 0.9), worth(calibration, 2, 0.9)
    calibration.observe([0.9, 0.9, 0.9], 0, 1)
    assert (worth(calibration, 1, 0.9), worth(calibration, 2, 0.9)) == before


def test_slots_of_which_little_is_known_are_taken_for_the_one_before():
    calibration = Calibration()
    judge(calibration, [0.2], [0.9], 60)
    assert worth(calibration, 1, 0.2) > 0.6 and worth(calibration, 6, 0.2) > 0.6
    judge(calibration, [0.2, 0.2], [1.0, 0.1], 60)
    assert worth(calibration, 1, 0.2) < 0.4 and worth(calibration, 6, 0.2) < 0.4


def test_no_claim_is_certain():
    calibration = Calibration()
    judge(calibration, [1.0], [1.0], 500)
    assert worth(calibration, 0, 1.0) < 1.0
    judge(calibration, [0.0], [0.0], 500)
    assert worth(calibration, 0, 0.0) > 0.0


def test_nothing_is_cut_before_enough_was_judged_then_ever_more():
    calibration = Calibration()
    assert all(calibration.spares(0, 0.1) for _ in range(50))
    judge(calibration, [0.1], [0.1], 40)
    assert calibration.known
    spared = [calibration.spares(0, 0.1) for _ in range(1000)]
    assert 0 < sum(spared) < 20
    assert sum(calibration.spares(0, 0.55) for _ in range(100)) > 15  # none of that kind was judged


def test_the_report_is_json():
    calibration = Calibration()
    judge(calibration, [0.7, 0.2], [0.7, 0.2], 50)
    first, second, further = json.loads(json.dumps(calibration.report()))
    assert first["seen"][7] > 30 and second["seen"][2] > 20 and sum(further["seen"]) == 0
    assert further["worth"] == [0.0, 0.5, 1.0]


WIDTHS, BASE, DRAFTS = [1, 2, 3, 4], [1.0, 1.3, 1.6, 1.9], [0.0, 0.15, 0.17, 0.19]


def gains(blocks):
    return blocks.gains(WIDTHS, BASE, DRAFTS, lambda: [0.7] * 7, 1.3)


def test_few_blocks_say_nothing():
    blocks = Blocks()
    blocks.add([0.9, 0.1])
    assert gains(blocks) == [1.0] * 4


def test_blocks_that_are_all_alike_gain_nothing_where_all_rows_pay():
    blocks = Blocks()
    for _ in range(20):
        blocks.add([0.95, 0.95, 0.95])
    assert gains(blocks) == pytest.approx([1.0] * 4, abs=1e-9)


def test_uneven_blocks_gain_most_at_the_widest():
    blocks = Blocks()
    for turn in range(20):
        blocks.add([0.98, 0.97, 0.96] if turn % 2 else [0.1, 0.1, 0.1])
    found = gains(blocks)
    assert found[3] > found[2] > found[1] > 1.0
    # By hand for four rows: good blocks are left whole, of the others only the anchor's row stays.
    good = 1 + 0.98 + 0.98 * 0.97 + 0.98 * 0.97 * 0.96
    bad = 1 + 0.1 + 0.01 + 0.001
    cut = (good + 1.0) / (1.9 + 0.19 + 1.0 + 0.19)
    whole = (good + bad) / (2 * (1.9 + 0.19))
    assert found[3] == pytest.approx(cut / whole, rel=1e-6)


def test_gains_are_looked_at_again_after_some_blocks():
    blocks = Blocks()
    for _ in range(32):
        blocks.add([0.9, 0.9, 0.9])
    first = gains(blocks)
    blocks.add([0.01])
    assert gains(blocks) == first
    for _ in range(32):
        blocks.add([0.01])
    assert gains(blocks) != first


def softmax(row):
    shifted = np.exp(row.astype(np.float64) - row.max())
    return shifted / shifted.sum()


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_a_claim_is_about_the_softmax(scale):
    rng = np.random.default_rng(3)
    for _ in range(20):
        row = (rng.standard_normal(8192) * scale).astype(np.float32)
        index = int(row.argmax())
        assert likelihood(row, index) == pytest.approx(softmax(row)[index], rel=0.05)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_claim_nothing(value):
    row = np.zeros(8, np.float32)
    row[3] = value
    claim = likelihood(row, 3)
    assert claim == 0.0


def test_proposals_claim_what_their_final_logits_say():
    rng = np.random.default_rng(6)
    raw = rng.standard_normal((2, 10)).astype(np.float32) * 3
    bias = rng.standard_normal((12, 10)).astype(np.float32) * 3
    before = Table("F32", np.eye(12, dtype=np.float32).view(np.uint8))
    ids = np.arange(2, 12)
    output = Output(12, ids, markov=MarkovHead(before, lambda x: x @ bias))
    proposals = BlockProposals(raw, output)
    assert isinstance(proposals, Confident)
    for slot, previous in ((0, 4), (1, 9)):
        token, claim = proposals.surest(slot, previous)
        assert token == proposals.best(slot, previous)
        assert claim == pytest.approx(softmax(raw[slot] + bias[previous])[token - 2], rel=0.05)


def test_a_row_on_a_device_stays_there():
    """Its largest logit came over already; the whole row would cost more than a cut gains."""

    def fetch():
        raise AssertionError("the row was brought")

    rows = [LazyRow(5, True, fetch)]
    proposals = BlockProposals(rows, Output(10))
    assert proposals.surest(0, 1) == (5, None)
