"""What a draft's file tells about its acceptance: its bounds, how a planner starts with it, how it is forgotten."""

from pathlib import Path

import pytest
from planner_simulator import avx2, cost_table, flat, luck, policy_time, relative_costs

from sparkinfer.dflash.acceptance import Acceptance
from sparkinfer.dflash.claims import Calibration
from sparkinfer.dflash.config_gguf import read_gguf_config
from sparkinfer.dflash.planner import POLICIES, Setup
from sparkinfer.dflash.prior import Claims, Prior, Tally, checked_prior
from sparkinfer.dflash.shipped import FOLDER, SHIPPED
from sparkinfer.errors import GGUFError, ShapeError
from sparkinfer.gguf import Typed, open_gguf, write_gguf

MEANS = (0.7, 0.6, 0.55, 0.5)


def worth(calibration, slot, claim):
    """Of the last of several slots that all claim the same."""
    return calibration.worths([claim] * (slot + 1), slot)[0]


def test_numbers_of_a_tally_make_a_prior() -> None:
    tally = Tally(4)
    tally.add([0.9, 0.8, 0.4, 0.2], accepted=2, judged=3)
    tally.add([0.5, 0.6, 0.5, 0.1], accepted=0, judged=1)
    tally.add([0.5, 0.6], accepted=1, judged=2)
    prior = checked_prior(*tally.numbers)
    assert prior.acceptance == pytest.approx((2 / 3, 1 / 2, 0.0))
    assert prior.claims[0] == Claims(
        pytest.approx(1.9 / 3),
        pytest.approx(2 / 3),
        pytest.approx(1.31 / 3),
        pytest.approx(1.4 / 3),
    )
    assert Tally(3).numbers == ([], [])


@pytest.mark.parametrize(
    ("acceptance", "claims"),
    [
        ([], []),
        ([1.2], []),
        ([0.5, float("nan")], []),
        ([0.5], MEANS),  # of one depth only
        ([0.5], [*MEANS, *MEANS, 0.7, 0.6, 0.3, 0.5]),  # a square below the mean's
        ([0.5], [*MEANS, *MEANS, 0.7, 0.6, 0.8, 0.5]),  # above the mean
        ([0.5], [*MEANS, *MEANS, 0.7, 0.3, 0.55, 0.5]),  # more of both than of one
    ],
)
def test_numbers_that_cannot_be_are_refused(acceptance: list[float], claims: list[float]) -> None:
    with pytest.raises(ShapeError, match="prior"):
        checked_prior(acceptance, claims)


def shipped_with(path: Path, **more: Typed) -> Path:
    """The shipped draft's metadata, changed, without tensors."""
    with open_gguf(FOLDER / SHIPPED[0].filename) as file:
        kept = {
            key: Typed(value, file.type_name(key).removeprefix("array of "))
            for key, value in file.metadata.items()
        }
    changed = {f"dflash.prior.{key}": value for key, value in more.items()}
    write_gguf(path / "draft.gguf", {**kept, **changed})
    return path / "draft.gguf"


def test_a_file_tells_it(tmp_path: Path) -> None:
    rates, means = Typed([0.5, 0.25], "float32"), Typed([0.75, 0.5, 0.625, 0.5] * 3, "float32")
    with open_gguf(shipped_with(tmp_path, acceptance=rates, claims=means)) as file:
        prior = read_gguf_config(file, 49152).prior
    assert prior == Prior((0.5, 0.25), (Claims(0.75, 0.5, 0.625, 0.5),) * 3)


def test_a_file_with_other_numbers_is_refused(tmp_path: Path) -> None:
    path = shipped_with(tmp_path, acceptance=Typed([2.0], "float32"))
    with (
        open_gguf(path) as file,
        pytest.raises(ShapeError, match="has 2.0, which is outside 0 .. 1"),
    ):
        read_gguf_config(file, 49152)
    path = shipped_with(tmp_path, acceptance=Typed([1], "int32"))
    with open_gguf(path) as file, pytest.raises(GGUFError, match="no lists of floats"):
        read_gguf_config(file, 49152)


def test_the_shipped_draft_tells_it() -> None:
    with open_gguf(FOLDER / SHIPPED[0].filename) as file:
        config = read_gguf_config(file, 49152)
    assert config.prior is not None
    assert len(config.prior.acceptance) == config.max_depth and len(config.prior.claims) == 3


def test_acceptance_starts_there_and_forgets() -> None:
    told, plain = Acceptance(7), Acceptance(7)
    told.assume([0.6] * 7)
    assert 0.6 < told.rates[0] < 0.68 and plain.rates[0] == pytest.approx(0.8)
    assert all(ours < theirs for ours, theirs in zip(told.rates, plain.rates, strict=True))
    for acceptance in (told, plain):
        for step in range(300):
            acceptance.observe(3, 3 if step % 10 else 0)
    for ours, theirs in zip(told.rates[:3], plain.rates[:3], strict=True):
        assert ours == pytest.approx(theirs, abs=0.02)


def test_claims_start_there_and_forget() -> None:
    told, plain = Calibration(), Calibration()
    told.assume([Claims(0.7, 0.35, 0.55, 0.28)] * 3)  # worth half of what they say
    assert told.known and not plain.known
    assert worth(told, 0, 0.8) < 0.6 < worth(plain, 0, 0.8)
    for calibration in (told, plain):
        for step in range(600):
            calibration.observe([0.8, 0.8, 0.8], accepted=3 if step % 5 else 0, judged=3)
    for slot in range(3):
        assert worth(told, slot, 0.8) == pytest.approx(worth(plain, slot, 0.8), abs=0.03)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("told", [0.05, 0.95])
def test_a_wrong_one_costs_little(rate: float, told: float) -> None:
    """Time of ten requests of 200 tokens, in that of a planner that was told nothing."""
    costs, tokens = relative_costs(avx2, 0.1), 200
    times = []
    for prior in (None, Prior((told,) * 15, ())):
        total = 0.0
        for seed in range(10):
            policy = POLICIES["auto"](Setup(cost_table(avx2, 0.1), 15, 16, prior=prior))
            total += policy_time(policy, flat(rate), luck(seed, tokens), costs, tokens)
        times.append(total)
    assert times[1] < 1.05 * times[0]
