"""The cost table: what a step takes by path, width and context; its corrections; its file."""

import json
import random
import stat

import pytest

from sparkinfer.dflash.costs import (
    Cost,
    CostTable,
    Observed,
    cost_file,
    filled,
    load_costs,
    save_costs,
)

MS = 1e-3
FINGERPRINT = {"cpu": "test", "cores": 2, "target": {"model": "toy", "kernels": "abc"}}


def table(**more):
    """A plain step of 10 ms, 30 at 1,000 tokens; windows of 2 to 4 rows on two paths."""
    steps = {
        "compact": {
            w: Cost((MS * (10 + 2 * w), MS * (30 + 4 * w)), (MS * 1, MS * 2)) for w in (2, 3)
        },
        "window": {
            w: Cost((MS * (11 + 2 * w), MS * (24 + 4 * w)), (MS * 1, MS * 2)) for w in (2, 3, 4)
        },
    }
    return CostTable([0, 1000], (10 * MS, 30 * MS), steps, row=0.1 * MS, **more)


def seen(width, path, seconds, length=0, accepted=0):
    return Observed(width, path, length, width - 1, accepted, seconds, {})


def test_a_step_is_linear_in_the_context():
    costs = table()
    assert costs.plain(0) == pytest.approx(10 * MS)
    assert costs.plain(500) == pytest.approx(20 * MS)
    assert costs.plain(2000) == pytest.approx(50 * MS)
    assert costs.step(2, "compact", 500) == pytest.approx((14 + 38) / 2 * MS + 1.5 * MS)
    assert costs.step(1, "ar", 500) == costs.plain(500)
    assert costs.growth(1000) == pytest.approx(3.0)


def test_the_best_path_is_the_cheapest_at_that_length():
    costs = table()
    assert costs.best_path(2, 0) == "compact" and costs.best_path(2, 1000) == "window"
    assert costs.best_path(2, 0, without=["compact"]) == "window"
    assert costs.best_path(4, 0) == "window" and costs.best_path(5, 0) is None
    assert costs.best_path(1, 0) == "ar"
    assert costs.widths == (2, 3, 4)
    assert list(costs.cheapest(0)) == [2, 3, 4]
    assert costs.cheapest(0)[2] == ("compact", pytest.approx(15 * MS))


def test_a_width_that_costs_more_in_the_loop_is_corrected_alone():
    costs = table()
    for _ in range(150):
        costs.observe(seen(1, "ar", 10 * MS))
        costs.observe(seen(2, "compact", 22 * MS))
    assert costs.step(2, "compact", 0) == pytest.approx(22 * MS, rel=0.06)
    assert costs.plain(0) == pytest.approx(10 * MS, rel=0.06)


def test_a_slower_machine_moves_every_cost_alike():
    costs = table()
    before = costs.step(4, "window", 0) / costs.plain(0)
    for _ in range(50):
        costs.observe(seen(2, "compact", 15 * MS))
    for _ in range(50):
        costs.observe(seen(2, "compact", 30 * MS))  # twice as slow
    assert costs.step(2, "compact", 0) == pytest.approx(30 * MS, rel=0.05)
    assert costs.plain(0) == pytest.approx(20 * MS, rel=0.1)
    assert costs.step(4, "window", 0) / costs.plain(0) == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("factor", [20.0, 1000.0])
def test_an_outlier_is_clipped(factor):
    costs = table()
    for _ in range(50):
        costs.observe(seen(2, "compact", 15 * MS))
    costs.observe(seen(2, "compact", 15 * MS * factor))
    assert costs.step(2, "compact", 0) < 18 * MS
    for _ in range(30):
        costs.observe(seen(2, "compact", 15 * MS))
    assert costs.step(2, "compact", 0) == pytest.approx(15 * MS, rel=0.05)


def test_the_first_step_of_a_kind_may_record_a_tape():
    costs = table()
    assert costs.observe(seen(2, "compact", 900 * MS)) == pytest.approx(1.5)
    assert costs.step(2, "compact", 0) == pytest.approx(15 * MS)
    costs.observe(seen(2, "compact", 30 * MS))
    assert costs.step(2, "compact", 0) > 25 * MS


def test_noise_averages_out():
    rng = random.Random(1)
    costs = table()
    for _ in range(300):
        costs.observe(seen(1, "ar", 10 * MS * rng.uniform(0.8, 1.25)))
        costs.observe(seen(2, "compact", 15 * MS * rng.uniform(0.8, 1.25)))
    ratio = costs.step(2, "compact", 0) / costs.plain(0)
    assert ratio == pytest.approx(1.5, rel=0.05)


def test_what_was_never_measured_teaches_nothing():
    costs = table()
    before = costs.to_json()
    assert costs.observe(seen(3, "block", 99 * MS)) == pytest.approx(9.9)
    assert costs.observe(seen(9, "window", 99 * MS)) == pytest.approx(9.9)
    assert costs.to_json() == before


def test_a_token_loop_that_ended_early_teaches_nothing():
    steps = {"token_loop": {4: Cost((40 * MS,), (1 * MS,))}}
    costs = CostTable([0], (10 * MS,), steps)
    assert costs.observe(seen(4, "token_loop", 11 * MS, accepted=0)) == pytest.approx(1.1)
    assert costs.step(4, "token_loop", 0) == pytest.approx(41 * MS)
    for _ in range(20):
        costs.observe(seen(4, "token_loop", 60 * MS, accepted=3))
    assert costs.step(4, "token_loop", 0) > 50 * MS


def test_rows_that_waited_for_the_draft_are_no_cost_of_the_step():
    costs = table()
    usual = seen(3, "compact", 17 * MS)  # appends 2 rows on average
    late = seen(3, "compact", (17 + 6.2) * MS)  # 64 rows waited, 62 more than usual
    assert costs.usual(usual, 2) == pytest.approx(17 * MS)
    assert costs.usual(late, 64) == pytest.approx(17 * MS)


def test_a_step_is_charged_at_what_such_a_step_takes():
    costs = table()
    for _ in range(60):
        costs.observe(seen(2, "compact", 18 * MS))
    slow = seen(2, "compact", 500 * MS)
    assert 1.5 <= costs.observe(slow) <= 2.0  # plain steps; 18 and 10 ms by far most of the time


def test_between_measured_widths_costs_lie_on_a_line_that_does_not_fall():
    known = {2: Cost((2.0,), (1.0,)), 4: Cost((4.0,), (1.0,)), 8: Cost((3.0,), (2.0,))}
    all_widths = filled(known, range(2, 9))
    assert [c.target[0] for c in all_widths.values()] == [2.0, 3.0, 4.0, 4.0, 4.0, 4.0, 3.0]
    assert all_widths[6].draft[0] == pytest.approx(1.5)
    assert [w for w, c in all_widths.items() if c.measured] == [2, 4, 8]


def test_json_keeps_what_was_measured():
    costs = table(origin="measured")
    for _ in range(2):
        costs.observe(seen(2, "compact", 20 * MS))
    data = json.loads(json.dumps(costs.to_json()))
    again = CostTable.from_json(data)
    for width, path in ((2, "compact"), (4, "window")):
        assert again.step(width, path, 700) == pytest.approx(table().step(width, path, 700))
    assert again.row == pytest.approx(0.1 * MS) and again.lengths == (0, 1000)
    assert data["steps"][0]["relative"] == pytest.approx((15 + 40) / 40)
    assert data["corrections"]["common"] > 1.0
    assert again.to_json()["corrections"]["common"] == 1.0


@pytest.mark.parametrize(
    ("lengths", "plain", "steps"),
    [
        ([], (), {}),
        ([5, 5], (1.0, 1.0), {}),
        ([0], (0.0,), {}),
        ([0], (float("nan"),), {}),
        ([0], (1.0, 2.0), {}),
        ([0], (1.0,), {"window": {1: Cost((1.0,), (1.0,))}}),
        ([0], (1.0,), {"window": {2: Cost((-1.0,), (0.5,))}}),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(lengths, plain, steps):
    with pytest.raises(ValueError, match=r"\S"):
        CostTable(lengths, plain, steps)


def test_what_is_kept_is_read_back(tmp_path):
    assert load_costs(tmp_path, FINGERPRINT) == (None, "nothing was kept")
    assert save_costs(tmp_path, FINGERPRINT, table()) is None
    again, reason = load_costs(tmp_path, FINGERPRINT)
    assert again is not None and again.origin == "read back"
    assert reason == cost_file(tmp_path, FINGERPRINT).name
    assert again.step(3, "window", 10) == pytest.approx(table().step(3, "window", 10))
    assert [path.suffix for path in (tmp_path / "costs").iterdir()] == [".json"]


def test_another_machine_or_plan_has_another_file(tmp_path):
    save_costs(tmp_path, FINGERPRINT, table())
    for other in ({**FINGERPRINT, "cores": 4}, {**FINGERPRINT, "target": {"kernels": "abd"}}):
        assert load_costs(tmp_path, other) == (None, "nothing was kept")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"fingerprint": 1}', "\x00\x01", '{"costs": {}, "fingerprint": {}}'],
)
def test_a_damaged_or_foreign_file_is_measured_again_with_a_reason(tmp_path, text):
    save_costs(tmp_path, FINGERPRINT, table())
    cost_file(tmp_path, FINGERPRINT).write_text(text)
    found, reason = load_costs(tmp_path, FINGERPRINT)
    assert found is None
    assert "damaged" in reason or "something else" in reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 99),
        ("plain_ms", []),
        ("plain_ms", [0.0, 1.0]),
        ("plain_ms", "fast"),
        ("lengths", [1000, 0]),
        ("draft_row_ms", -1),
        ("steps", [{"path": "window"}]),
        ("steps", 3),
    ],
)
def test_a_file_with_a_wrong_field_is_measured_again(tmp_path, field, value):
    save_costs(tmp_path, FINGERPRINT, table())
    file = cost_file(tmp_path, FINGERPRINT)
    data = json.loads(file.read_text())
    data["costs"][field] = value
    file.write_text(json.dumps(data))
    found, reason = load_costs(tmp_path, FINGERPRINT)
    assert found is None and "damaged" in reason


def test_bytes_that_are_no_text_are_a_reason(tmp_path):
    save_costs(tmp_path, FINGERPRINT, table())
    cost_file(tmp_path, FINGERPRINT).write_bytes(b"\xff\xfe\x80")
    found, reason = load_costs(tmp_path, FINGERPRINT)
    assert found is None and ("damaged" in reason or "cannot be read" in reason)


def test_a_folder_that_takes_nothing_is_a_reason_not_an_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    reason = save_costs(blocked, FINGERPRINT, table())
    assert reason is not None and str(blocked) in reason
    assert load_costs(blocked, FINGERPRINT)[0] is None


def test_a_failed_write_leaves_no_part(tmp_path, monkeypatch):
    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    assert "No space left" in str(save_costs(tmp_path, FINGERPRINT, table()))
    assert list((tmp_path / "costs").iterdir()) == []


def test_files_are_private_to_the_user(tmp_path):
    save_costs(tmp_path, FINGERPRINT, table())
    mode = cost_file(tmp_path, FINGERPRINT).stat().st_mode
    assert not mode & (stat.S_IWGRP | stat.S_IWOTH)
