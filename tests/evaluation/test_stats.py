"""The statistics against scipy, and their limits."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as reference

from sparkinfer.evaluation import stats
from sparkinfer.evaluation.stats import SignFlip

RANDOM = np.random.default_rng(7)
SAMPLES = [RANDOM.standard_normal(count) * 0.02 + 0.01 for count in (5, 6, 8, 11, 14)]
BY_SIZE = [f"{len(sample)} blocks" for sample in SAMPLES]
ratios = st.lists(st.floats(-0.3, 0.3), min_size=2, max_size=10)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 8, 15, 40, 199])
def test_student(freedom: int) -> None:
    for t in (-30.0, -3.0, -0.5, 0.0, 0.01, 1.2, 4.0, 12.0):
        assert stats.student_cdf(t, freedom) == pytest.approx(
            reference.t.cdf(t, freedom), abs=1e-12
        )
    for p in (0.005, 0.2, 0.5, 0.8, 0.975, 0.9999):
        expected = reference.t.ppf(p, freedom)
        assert stats.student_quantile(p, freedom) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert stats.student_cdf(math.inf, freedom) == 1 and stats.student_cdf(-math.inf, freedom) == 0


@pytest.mark.parametrize("sample", SAMPLES, ids=BY_SIZE)
def test_t_interval_and_p(sample: np.ndarray) -> None:
    ours = stats.student_interval(sample, 0.04)
    theirs = reference.ttest_1samp(sample, 0).confidence_interval(0.96)
    assert ours == pytest.approx((theirs.low, theirs.high), rel=1e-9)
    for centre in (0.0, 0.015):
        for kind, p in zip(("greater", "less"), stats.student_p(sample, centre), strict=True):
            expected = reference.ttest_1samp(sample, centre, alternative=kind).pvalue
            assert p == pytest.approx(expected, rel=1e-9)
    assert stats.student_p([0.1]) == (1.0, 1.0) and stats.student_interval([0.1]) is None
    assert stats.student_p([0.1, 0.1]) == (0.0, 1.0) and stats.student_p([0.0, 0.0]) == (0.5, 0.5)


@pytest.mark.parametrize("sample", SAMPLES, ids=BY_SIZE)
def test_sign_flip_p(sample: np.ndarray) -> None:
    flips = SignFlip.of(sample)
    for centre in (0.0, 0.02, -0.01):
        expected = reference.permutation_test(
            (sample - centre,),
            np.mean,
            permutation_type="samples",
            n_resamples=np.inf,
            alternative="two-sided",
        ).pvalue
        assert flips.p(centre) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None)
@given(ratios, st.sampled_from([0.01, 0.05, 0.1, 0.3]))
def test_the_interval_holds_the_centres_that_are_not_rejected(
    values: list[float], alpha: float
) -> None:
    flips = SignFlip.of(values)
    interval = flips.interval(alpha)
    if interval is None:
        assert alpha < stats.least_alpha(len(values))
        return
    low, high = interval
    assert flips.p(low) > alpha and flips.p(high) > alpha  # its ends belong to it
    step = 1e-9
    assert flips.p(low - step) <= alpha and flips.p(high + step) <= alpha


@settings(deadline=None)
@given(ratios)
def test_exchanging_the_sides_mirrors_everything(values: list[float]) -> None:
    mirrored = [-value for value in values]
    ours, theirs = SignFlip.of(values), SignFlip.of(mirrored)
    assert ours.p() == theirs.p()
    assert stats.hodges_lehmann(values) == -stats.hodges_lehmann(mirrored)
    interval = ours.interval(0.3)
    if interval is not None:
        assert theirs.interval(0.3) == (-interval[1], -interval[0])


def test_many_blocks_are_judged_on_a_sample_of_sign_patterns() -> None:
    sample = np.random.default_rng(3).standard_normal(40) * 0.02 + 0.006
    flips = SignFlip.of(sample, seed=5)
    again = SignFlip.of(sample, seed=5)
    assert flips.total <= 20_000 and np.array_equal(flips.means, again.means)
    exact = reference.ttest_1samp(sample, 0)
    assert flips.p() == pytest.approx(exact.pvalue, abs=0.01)
    interval = flips.interval(0.05)
    assert interval == pytest.approx(exact.confidence_interval(0.95), abs=5e-4)
    assert flips.p(10.0) == pytest.approx(2 / flips.total)  # never 0


def test_levels_of_few_blocks() -> None:
    assert stats.least_alpha(6) == 2 / 64
    assert SignFlip.of(np.ones(5)).interval(0.05) is None
    assert SignFlip.of(np.ones(6)).interval(0.05) == (1.0, 1.0)
    assert stats.attained(6, 0.05) == 2 / 64 and stats.attained(5, 0.05) == 0
    assert stats.attained(8, 0.05) == 12 / 256


@pytest.mark.parametrize("sample", SAMPLES, ids=BY_SIZE)
def test_hodges_lehmann(sample: np.ndarray) -> None:
    pairs = [(a + b) / 2 for i, a in enumerate(sample) for b in sample[i:]]
    assert stats.hodges_lehmann(sample) == pytest.approx(float(np.median(pairs)), rel=1e-12)
    spoilt = np.append(sample, 9.0)
    assert abs(stats.hodges_lehmann(spoilt) - stats.hodges_lehmann(sample)) < 0.05


@pytest.mark.parametrize("sample", SAMPLES, ids=BY_SIZE)
def test_bca_interval(sample: np.ndarray) -> None:
    ours = stats.bca_interval(
        sample, resamples=20_000, statistic=lambda rows: np.mean(rows, axis=1)
    )
    theirs = reference.bootstrap(
        (sample,),
        np.mean,
        method="BCa",
        n_resamples=20_000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.04 * width)


def test_bca_of_little_data() -> None:
    assert stats.bca_interval([0.1, 0.2]) is None
    assert stats.bca_interval([0.1] * 5) == (0.1, 0.1)
    assert stats.bca_interval(SAMPLES[0], seed=4) == stats.bca_interval(SAMPLES[0], seed=4)


def test_holm() -> None:
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.9, 0.5]) == [1.0, 1.0] and stats.holm([]) == []


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_stepping_down_rejects(values: list[float]) -> None:
    alpha = 0.05
    rejected = set()
    for place, number in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        if (len(values) - place) * values[number] > alpha:
            break
        rejected.add(number)
    assert {i for i, p in enumerate(stats.holm(values)) if p <= alpha} == rejected


@pytest.mark.parametrize("count", [6, 8, 10, 12, 16, 24])
@pytest.mark.parametrize("effect", [0.5, 1.0, 1.6])
def test_power(count: int, effect: float) -> None:
    """The exact test's own power up to 10 blocks, by simulation; the t test's beyond."""
    predicted = stats.power(0.01 * effect, 0.01, count, 0.05)
    if count <= 10:
        draws = np.random.default_rng(count).standard_normal((1500, count)) + effect
        found = np.mean([SignFlip.of(row).p() <= 0.05 for row in draws])
        assert predicted == pytest.approx(found, abs=0.05)
    else:
        critical = reference.t.ppf(0.975, count - 1)
        exact = reference.nct.sf(critical, count - 1, effect * math.sqrt(count))
        assert predicted == pytest.approx(exact, abs=0.002)


@pytest.mark.parametrize("count", [6, 8, 10, 12, 16, 24])
def test_what_is_detectable_is_found_in_four_of_five_cases(count: int) -> None:
    smallest = stats.detectable(0.01, count, 0.04)
    assert smallest is not None
    assert stats.power(smallest, 0.01, count, 0.04) == pytest.approx(0.8, abs=0.01)


def test_power_at_the_edges() -> None:
    assert stats.power(0.1, 0.01, 5, 0.05) == 0 and stats.detectable(0.01, 5, 0.05) is None
    assert stats.power(0.1, 0.0, 8, 0.05) == 1 and stats.power(0.0, 0.0, 8, 0.05) == 0


def test_blocks_to_settle() -> None:
    needed = stats.blocks_to_settle(0.01, 0.02, 0.002, 0.05, least=8)
    assert needed is not None and needed > 30
    assert stats.power(0.01, 0.02, needed, 0.05) == pytest.approx(0.8, abs=0.06)
    equal = stats.blocks_to_settle(0.0, 0.02, 0.01, 0.05, least=8)
    assert equal is not None and equal > 30  # to lie within delta
    assert stats.blocks_to_settle(0.05, 0.02, 0.01, 0.05, least=9) == 9
    assert stats.blocks_to_settle(0.01, 0.5, 0.001, 0.05, least=8) is None
