"""Looks, labels, path mix and scopes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evaluation_records import evaluation

from sparkinfer.errors import MissingFileError, OptionError
from sparkinfer.evaluation.codec import RecordError, encode
from sparkinfer.evaluation.labels import Published, label_of_interval, label_of_point, tier
from sparkinfer.evaluation.path_mix import path_shifts, step_costs, whole_cost
from sparkinfer.evaluation.scope import DEFAULT, FOLDER, find_scope, load_scope, scope_names
from sparkinfer.evaluation.sequential import next_look, plan_looks, reached, spent
from sparkinfer.evaluation.stats import attained
from sparkinfer.evaluation.verdict import judge


@pytest.mark.parametrize("looks", [(6,), (8,), (8, 12), (8, 16), (8, 12, 16), (10, 16, 24, 40)])
def test_looks_spend_no_more_than_alpha(looks: tuple[int, ...]) -> None:
    levels = plan_looks(looks, 0.05)
    assert [look.blocks for look in levels] == list(looks)
    spending = [attained(look.blocks, look.alpha) for look in levels]
    guards = sum(look.guard_alpha for look in levels)
    assert sum(spending) <= 0.045 and all(level > 0 for level in spending)
    assert guards == pytest.approx(sum(look.alpha for look in levels) / 9)
    for number, look in enumerate(levels):
        assert sum(spending[: number + 1]) <= spent(look.blocks / looks[-1], 0.045)
    step = 2 / 2 ** looks[-1]
    assert looks[-1] > 16 or sum(spending) > 0.045 - step - 1e-12  # nothing is left over


def test_a_look_at_too_few_blocks_decides_nothing() -> None:
    first, last = plan_looks((4, 8), 0.05)
    assert first.alpha == 0 and last.alpha == pytest.approx(0.045)


def test_where_looks_are() -> None:
    assert [reached((8, 12), n) for n in (0, 7, 8, 11, 12, 20)] == [0, 0, 1, 1, 2, 2]
    assert [next_look((8, 12), n) for n in (0, 8, 11, 12)] == [8, 12, 12, None]


def test_tiers() -> None:
    names = [tier(gain).removeprefix("eval-dflash:") for gain in (0.18, 0.1, 0.06, 0.035, 0.02)]
    assert names == ["XL", "L", "M", "S", "XS"]
    just_under = (0.1799, 0.0999, 0.0599, 0.0349, 0.0199, -0.5)
    names = [tier(gain).removeprefix("eval-dflash:") for gain in just_under]
    assert names == ["L", "M", "S", "XS", "none", "none"]


def test_labels_of_intervals_and_points() -> None:
    assert label_of_interval(1.11, 1.25) == "eval-dflash:L"
    assert label_of_interval(0.9, 0.979) == "eval-dflash:REJECT"
    assert label_of_interval(0.9, 0.98) == "eval-dflash:none"  # not all of it is under the bar
    assert label_of_point(100, 98) == "eval-dflash:none"
    assert label_of_point(100, 97.99) == "eval-dflash:REJECT"
    assert label_of_point(0, 50) == "eval-dflash:REJECT"


def test_published_single_figures() -> None:
    bot, author = Published(479.87, 438.40), Published(572.71, 631.17)
    assert bot.label == "eval-dflash:REJECT" and round(bot.gain, 3) == -0.086
    assert author.label == "eval-dflash:L" and round(author.gain, 3) == 0.102
    assert replace(author, correct=False).label == "eval-dflash:REJECT"
    assert replace(author, guards_held=False).label == "eval-dflash:REJECT"
    assert "unreplicated" in author.note and Published(0, 1).gain == float("-inf")


def _with_paths(base: dict[str, int], candidate: dict[str, int]) -> list[str]:
    record = evaluation(1.1)
    paths = {"base": base, "candidate": candidate}
    samples = tuple(
        replace(s, paths=paths[s.side]) if s.metric == "dflash_tps" else s for s in record.samples
    )
    shifts = path_shifts(samples)
    assert [s.changed for s in shifts] == sorted((s.changed for s in shifts), reverse=True)
    changed = [s.path for s in shifts if s.changed and s.cell == "chat"]
    reasons = judge(replace(record, samples=samples)).reasons
    first = [reason for reason in reasons if reason.startswith("path mix changed")]
    assert list(reasons[: len(first)]) == first and len(first) == 2 * len(changed)
    return changed


def test_a_changed_path_mix_comes_first() -> None:
    window, loop = {"window": 20, "ar": 4}, {"token_loop": 21, "ar": 3}
    assert _with_paths(window, window) == []
    assert _with_paths(window, {"window": 19, "ar": 4}) == []
    assert _with_paths(window, loop) == ["token_loop", "window"]
    assert _with_paths(window, {"window": 20, "ar": 4, "token_loop": 1}) == ["token_loop"]


def test_sides_that_vary_by_themselves_have_not_changed() -> None:
    record = evaluation(1.0)
    samples = [
        replace(s, paths={"window": 20 + s.slot * 7, "ar": 30}) if s.metric == "dflash_tps" else s
        for s in record.samples
    ]
    assert not any(shift.changed for shift in path_shifts(samples))


@pytest.mark.parametrize(("more", "changed"), [(0.2, True), (0.03, False)])
def test_shares_that_overlap_may_differ_beyond_chance(more: float, changed: bool) -> None:
    random = np.random.default_rng(5)
    record = evaluation(1.0)
    samples = []
    for sample in record.samples:
        share = random.uniform(0.2, 0.6) + (more if sample.side == "candidate" else 0.0)
        paths = {"ar": round(1000 * share), "window": 1000 - round(1000 * share)}
        samples.append(replace(sample, paths=paths) if sample.metric == "dflash_tps" else sample)
    shifts = [s for s in path_shifts(samples) if s.metric == "dflash_tps"]
    assert [s.changed for s in shifts] == [changed] * 4


def test_step_costs() -> None:
    costs = step_costs(evaluation(1.25, noise=1e-9).samples, "dflash_tps")
    assert [cost.cell for cost in costs] == ["chat", "code"]
    assert costs[0].base_ms == pytest.approx(1000 * 2.6 / 300)
    whole = whole_cost(costs)
    assert whole is not None and whole.candidate_ms == pytest.approx(costs[0].base_ms / 1.25)
    assert "all: at equal acceptance (2.600 tokens a step)" in whole.sentence()
    assert "(-20.0%)" in whole.sentence() and whole_cost(()) is None


def test_the_table_of_scopes() -> None:
    assert set(scope_names()) == {"cpu-smollm2", "quick", "dflash-qwen3.6-35b"}
    assert DEFAULT in scope_names()
    for name in scope_names():
        scope = find_scope(name)
        assert scope.name == name and scope.primary == "dflash_tps" and scope.draft
        assert all(look.alpha > 0 for look in plan_looks(scope.looks, scope.alpha))
    guards = find_scope("dflash-qwen3.6-35b").guards
    assert [guard.contexts for guard in guards] == [
        (128, 512, 4096, 16384, 32768),
        (128, 4096, 32768, 65536, 131072),
    ]


def test_a_users_own_scope(tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text((FOLDER / "quick.toml").read_text().replace('"quick"', '"mine"'))
    scope = find_scope(str(own))
    assert scope == replace(find_scope("quick"), name="mine")
    same = tmp_path / "mine.json"
    same.write_text(json.dumps(encode(scope)))
    assert load_scope(same) == scope


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tokens = 24", "tokens = 0", r"mine\.toml: scope 'quick': tokens is 0"),
        ("tokens = 24", "", r"mine\.toml: tokens is missing \(Scope\)"),
        ("tokens = 24", "tokens = '32'", r"mine\.toml: tokens is '32'; expected a whole number"),
        ("tokens = 24", "token = 24", r"mine\.toml: token is unknown; Scope has name,"),
        ("looks = [8]", "looks = [4]", r"looks: 4 blocks are too few to decide anything"),
        ("looks = [8]", "looks = []", r"looks are \[\]; expected rising numbers"),
        ("looks = [8]", "looks = [8", r"mine\.toml: the scope is not the TOML expected"),
        ('role = "primary"', 'role = "first"', r"metrics\[0\]\.role is 'first'; expected one of"),
        ("contexts = [128]", "contexts = [0]", r"guard 'target' has contexts \[0\]"),
        ("delta = 0.02", "delta = nan", r"delta is nan; expected a finite number"),
    ],
)
def test_what_is_wrong_with_a_scope_is_named(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    own = tmp_path / "mine.toml"
    text = (FOLDER / "quick.toml").read_text()
    assert old in text
    own.write_text(text.replace(old, new))
    with pytest.raises(RecordError, match=message):
        load_scope(own)


def test_scopes_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="did you mean 'quick'"):
        find_scope("quik")
    with pytest.raises(OptionError, match="known: cpu-smollm2"):
        find_scope("nothing like it")
    with pytest.raises(MissingFileError, match=r"nothing\.toml"):
        find_scope(str(tmp_path / "nothing.toml"))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="not the TOML expected"):
        load_scope(binary)
