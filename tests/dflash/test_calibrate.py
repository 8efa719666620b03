"""Measuring what steps cost: on made-up parts over a made-up clock, and once on a real tiny model."""

import json
from types import SimpleNamespace

import golden_models
import numpy as np
import pytest

from sparkinfer.dflash import calibrate as module
from sparkinfer.dflash.calibrate import calibrate, fingerprint, measured_costs
from sparkinfer.dflash.costs import cost_file
from sparkinfer.dflash.scripted import ScriptedDraft
from sparkinfer.dflash.verify import Paths

MS = 1e-3


class Machine:
    """A clock that only the work of the parts below moves forward."""

    def __init__(self, row=4 * MS, more=1 * MS, per_token=0.002 * MS):
        self.now, self.row, self.more, self.per_token = 0.0, row, more, per_token
        self.log = []

    def clock(self):
        return self.now

    def work(self, what, rows, length, seconds):
        self.log.append((what, rows, length))
        self.now += seconds

    def forward(self, rows, length):
        return self.row + self.more * (rows - 1) + self.per_token * length


class State:
    recurrent = None

    def __init__(self, context):
        self.context, self.length = context, 0

    def assume(self, count):
        assert 0 <= count <= self.context
        self.length = count

    def advance(self, count):
        self.length += count
        assert self.length <= self.context, "ran out of the context"


class Target:
    max_width = 16

    def __init__(self, machine, context=2048):
        self.machine, self.context = machine, context
        self.plan = {"model": "made up", "mode": "graph"}
        self.config = SimpleNamespace(n_vocab=1000)

    def new_state(self, context=None):
        assert context is not None and context <= self.context
        return State(context)

    def forward(self, state, tokens, *, rows="last", verify=False):
        seconds = self.machine.forward(len(tokens), state.length)
        self.machine.work("plain", len(tokens), state.length, seconds)
        state.advance(len(tokens))

    def tapped(self, rows):
        return np.zeros((rows, 8), np.float32)

    def wait(self):
        """Nothing runs by itself."""


class Draft:
    name = "made up"
    taps = (0,)
    gap = 0

    def __init__(self, machine, max_depth=15, row=0.01 * MS):
        self.machine, self.max_depth, self.row = machine, max_depth, row
        self.length, self.plan = 0, {"layers": 2}

    def assume(self, length):
        self.length = length

    def extend(self, tokens, features):
        assert features.shape == (len(tokens), 8)
        self.length += len(tokens)
        self.machine.work("extend", len(tokens), self.length, 0.1 * MS + self.row * len(tokens))

    def propose(self, anchor, depth):
        assert 1 <= depth <= self.max_depth
        self.machine.work("propose", depth, self.length, 0.5 * MS + 0.05 * MS * depth)
        return SimpleNamespace(depth=depth, best=lambda slot, previous: 1)


class Path:
    """Costs `times` a window of the machine; serves widths up to `most`."""

    def __init__(self, name, machine, most=16, times=1.0):
        self.name, self.machine, self.most, self.times = name, machine, most, times

    def refusal(self, width):
        return f"{width} rows, at most {self.most}" if width > self.most else None

    def run(self, state, window, judge):
        assert self.refusal(len(window)) is None
        assert state.length + len(window) <= state.context
        assert len(set(window)) == len(window) and all(0 <= token < 1000 for token in window)
        seconds = self.machine.forward(len(window), state.length) * self.times
        self.machine.work(self.name, len(window), state.length, seconds)
        for index in range(len(window)):
            assert judge(index, None)

    def commit(self, state, kept):
        assert kept == 1
        self.machine.now += 0.2 * MS
        state.advance(kept)


def measure(machine=None, *, context=2048, depth=15, paths=None, **more):
    machine = machine or Machine()
    draft = Draft(machine, depth)
    paths = paths or [Path("compact", machine, 4, 0.9), Path("window", machine)]
    table = calibrate(Target(machine, context), draft, paths, clock=machine.clock, **more)
    return table, machine, draft


def test_the_table_is_what_the_parts_take():
    table, _, _ = measure()
    assert table.lengths == (32, 1024)
    assert table.plain(32) == pytest.approx((4 + 0.064) * MS, rel=0.01)
    assert table.plain(1024) == pytest.approx((4 + 2.048) * MS, rel=0.02)
    drafting = 0.5 + 0.05 * 7 + 0.1 + 0.01 * 4.5  # propose 7, append (8 + 1) / 2 rows
    verify = 4 + 7 + 0.064 + 0.2
    assert table.step(8, "window", 32) == pytest.approx((drafting + verify) * MS, rel=0.01)
    assert table.row == pytest.approx(0.01 * MS)
    assert table.best_path(3, 32) == "compact" and table.best_path(5, 32) == "window"


def test_waiting_for_claims_is_measured_and_no_part_of_the_steps():
    class Ahead(Draft):
        runs_ahead = True

        def propose_ahead(self, anchor, depth):
            self.propose(anchor, depth)
            return SimpleNamespace(known=None, told=lambda: [1] * depth)

    class Starting(Target):
        def verify_ahead(self, state, anchor, count, drafts):
            assert drafts is None
            seconds = self.machine.forward(count + 1, state.length) + 0.2 * MS - 0.15 * MS
            self.machine.work("ahead", count + 1, state.length, seconds)
            state.commit = state.advance
            return lambda told: told()

    machine = Machine()
    paths = [Path("window", machine)]
    table = calibrate(Starting(machine), Ahead(machine), paths, clock=machine.clock)
    assert table.wait == pytest.approx(0.15 * MS, rel=0.1)
    assert calibrate(Target(machine), Draft(machine), paths, clock=machine.clock).wait == 0.0
    whole = measure(paths=paths, machine=machine)[0]
    for width in (2, 8, 16):
        late = table.step(width, "window", 32) + table.wait
        assert late == pytest.approx(whole.step(width, "window", 32), rel=0.01)


def test_every_width_has_a_cost_and_says_whether_it_was_measured():
    table, _, _ = measure()
    assert table.widths == tuple(range(2, 17))
    measured = {w for w, cost in table.steps["window"].items() if cost.measured}
    assert {5, 6, 7, 8, 10, 12, 16} <= measured and 9 not in measured
    assert table.step(9, "window", 32) == pytest.approx(
        (table.step(8, "window", 32) + table.step(10, "window", 32)) / 2
    )


def test_the_draft_is_left_without_a_context():
    _, _, draft = measure()
    assert draft.length == 0


def test_the_draft_is_left_without_a_context_after_an_interrupt():
    machine = Machine()
    draft, window = Draft(machine), Path("window", machine)

    def interrupted(state, tokens, judge):
        raise KeyboardInterrupt

    window.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        calibrate(Target(machine), draft, [window], clock=machine.clock)
    assert draft.length == 0


def test_no_more_than_target_draft_and_caller_allow():
    assert measure(depth=5)[0].widths == (2, 3, 4, 5, 6)
    assert measure(most=4)[0].widths == (2, 3, 4)
    assert measure(depth=1)[0].widths == (2,)


def test_a_path_is_only_asked_for_what_it_serves():
    machine = Machine()
    table, _, _ = measure(machine, paths=[Path("compact", machine, 4)])
    assert table.widths == (2, 3, 4)
    assert {rows for what, rows, _ in machine.log if what == "compact"} == {2, 3, 4}


def test_the_third_path_in_order_is_not_measured():
    machine = Machine()
    paths = [Path(name, machine) for name in ("window", "block", "token_loop")]
    table, _, _ = measure(machine, paths=paths)
    assert set(table.steps) == {"window", "block"}
    assert {rows for what, rows, _ in machine.log if what == "block"} == {2, 16}


def test_rounds_are_interleaved_and_turn_around():
    _, machine, _ = measure()
    plain = [i for i, (what, rows, _) in enumerate(machine.log) if what == "plain"]
    widest = [i for i, (what, rows, _) in enumerate(machine.log) if (what, rows) == ("window", 16)]
    assert len(plain) >= 7 and len(widest) >= 5
    assert max(plain) > min(widest) and max(widest) > min(plain[3:])


def test_a_slow_moment_in_one_round_changes_nothing():
    machine = Machine()
    work, calls = machine.work, 0

    def stumbling(what, rows, length, seconds):
        nonlocal calls
        calls += 1
        work(what, rows, length, seconds * (30 if 100 < calls < 120 else 1))

    machine.work = stumbling
    table, _, _ = measure(machine)
    calm, _, _ = measure()
    for width in (2, 6, 16):
        path = calm.best_path(width, 32)
        assert table.step(width, path, 32) == pytest.approx(calm.step(width, path, 32), rel=0.02)


def test_a_fast_model_is_measured_within_its_time():
    machine = Machine()
    measure(machine)
    assert machine.now < 4.0
    quick = Machine(row=0.2 * MS, more=0.02 * MS, per_token=0.0)
    measure(quick)
    assert quick.now < 1.0


def test_a_slow_model_gets_few_widths_and_rounds():
    machine = Machine(row=80 * MS, more=30 * MS)
    table, _, _ = measure(machine)
    assert {rows for what, rows, _ in machine.log if what == "window"} == {8, 16}
    assert {rows for what, rows, _ in machine.log if what == "compact"} == {2, 4}
    assert sum(what == "window" and rows == 16 for what, rows, _ in machine.log) <= 4
    assert table.widths == (2, 3, 4, *range(8, 17))
    assert machine.now < 10.0


def test_noise_never_makes_a_longer_context_cheaper():
    table, _, _ = measure(Machine(per_token=-0.001 * MS))
    assert table.plain(1024) >= table.plain(32) > 0.0


@pytest.mark.parametrize("context", [1, 2, 17, 33, 34, 40, 64, 100, 1056])
def test_small_contexts(context):
    table, _, _ = measure(context=context)
    assert table.plain(0) > 0.0
    assert max(table.widths, default=1) <= min(16, context)


def test_progress_is_told_to_the_end():
    told = []
    measure(report=lambda label, done, total: told.append((label, done, total)))
    assert told and all(label == "measuring steps" for label, _, _ in told)
    assert told[-1][1] == told[-1][2]


class FakePaths(Paths):
    """Two made-up paths in place of the real ones."""

    def __init__(self, machine):
        self.order = (Path("compact", machine, 4), Path("window", machine))
        self.max_width = 16


class Parts:
    """Target, draft and paths over one made-up machine, and how often they were measured."""

    def __init__(self, folder):
        self.machine, self.folder, self.runs = Machine(), folder, 0
        self.target, self.draft = Target(self.machine), Draft(self.machine)
        self.paths = FakePaths(self.machine)

    def calibrate(self, *arguments, **more):
        self.runs += 1
        return calibrate(*arguments, **more)

    def costs(self):
        return measured_costs(
            self.target, self.draft, self.paths, self.folder, clock=self.machine.clock
        )

    @property
    def fingerprint(self):
        return fingerprint(self.target, self.draft, self.paths)


@pytest.fixture
def parts(monkeypatch, tmp_path):
    made = Parts(tmp_path)
    monkeypatch.setattr(module, "calibrate", made.calibrate)
    return made


def test_costs_are_kept_and_read_back(parts):
    first, again = parts.costs(), parts.costs()
    assert first.origin == "measured now: nothing was kept" and again.origin == "read back"
    assert parts.runs == 1
    assert again.step(8, "window", 100) == pytest.approx(first.step(8, "window", 100))


def test_another_draft_or_other_paths_are_measured_anew(parts):
    parts.costs()
    parts.draft.plan = {"layers": 3}
    parts.costs()
    parts.paths.max_width = 4
    assert parts.costs().widths == (2, 3, 4)
    assert parts.runs == 3


def test_a_damaged_file_is_measured_again_and_says_so(parts):
    parts.costs()
    cost_file(parts.folder, parts.fingerprint).write_text('{"fingerprint": ')
    assert "damaged" in parts.costs().origin and parts.runs == 2
    assert parts.costs().origin == "read back"


def test_costs_that_no_longer_hold_are_measured_again(parts):
    parts.costs()
    parts.machine.row *= 2.0  # slower as a whole: the same relative costs
    parts.machine.more *= 2.0
    assert parts.costs().origin == "read back"
    parts.machine.more *= 4.0  # rows now cost more against one row
    assert "of the time that was kept" in parts.costs().origin and parts.runs == 2
    assert parts.costs().origin == "read back"
    assert parts.draft.length == 0


def test_measurements_of_a_busy_machine_are_not_kept(parts, monkeypatch):
    work, calls = parts.machine.work, 0

    def shared(what, rows, length, seconds):
        nonlocal calls
        calls += 1
        work(what, rows, length, seconds * (1.0 + calls * 7919 % 13 / 4))

    monkeypatch.setattr(parts.machine, "work", shared)
    assert parts.costs().origin.endswith("not kept, because the machine was busy")
    assert not cost_file(parts.folder, parts.fingerprint).exists()


def test_a_folder_that_cannot_be_written_only_costs_the_time(parts):
    parts.folder /= "file"
    parts.folder.write_text("")
    table = parts.costs()
    assert "could not be kept" in table.origin and table.widths[-1] == 16


def test_the_fingerprint_is_json_and_names_machine_models_and_paths(parts):
    data = json.loads(json.dumps(parts.fingerprint))
    assert data["target"]["model"] == "made up" and data["draft"] == {"layers": 2}
    assert data["paths"]["compact"] == [2, 3, 4] and data["cores"] >= 1 and data["cpu"]


@pytest.mark.parametrize("name", ["qwen3-tiny-Q8_0", "qwen35-tiny-F32"])
def test_a_real_model(name, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BUDGET", 0.05)
    for name_of in ("_BUSY", "_AGREE"):  # this machine may be busy; what is kept is tested above
        monkeypatch.setattr(module, name_of, 1e9)
    target = golden_models.target(name)
    draft = ScriptedDraft([0] * 8, [1], target.config.n_vocab, max_depth=7)
    paths = Paths(target)
    table = measured_costs(target, draft, paths, tmp_path)
    assert table.widths == tuple(range(2, 9))
    assert set(table.steps) == {"compact", "window", "block"}
    assert all(table.step(w, str(table.best_path(w, 64)), 64) > 0.0 for w in table.widths)
    assert measured_costs(target, draft, paths, tmp_path).origin == "read back"
