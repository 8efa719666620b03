"""A target that screens its head: the largest logits of plain forwards, whole rows when asked, what its plan says."""

import golden_models as gm
import numpy as np
import pytest

from sparkinfer import kernels
from sparkinfer.dflash.verify import Paths
from sparkinfer.models import load_target
from sparkinfer.sampling import Sampler, SamplingParams
from sparkinfer.sampling.lazy import LazyRows

NAMES = ("llama-tiny-F32", "qwen3-tiny-Q8_0", "qwen35-tiny-F32", "qwen35moe-tiny256-Q4_K_M")


@pytest.fixture(params=[(n, a) for n in NAMES for a in gm.ACTIVATIONS], ids="-".join)
def screened(request, monkeypatch):
    """A golden model whose head is screened although it is small."""
    monkeypatch.setattr(kernels.screen, "_LEAST_OUTPUTS", 1)
    monkeypatch.setattr(kernels.screen, "_LEAST_INPUTS", 64)
    name, activations = request.param
    path = gm.FOLDER / f"{name}.gguf"
    model = load_target(path, context=256, threads=2, activations=activations, device="cpu")
    yield model
    model.close()


def test_rows_are_those_of_a_forward(screened):
    model, tokens = screened, gm.tokens(60)
    assert model.plan["head_screen"] == "on"
    for width in (1, 2, 3, 7, 16):
        state = gm.state_at(model, tokens[:30])
        window = tokens[30 : 30 + width]
        wanted = model.forward(state, window, rows="all", verify=True).copy()
        rows = model.best(state, window, rows="all", verify=True)
        assert isinstance(rows, LazyRows) and state.length == 30
        assert [row.best for row in rows] == wanted.argmax(axis=1).tolist()
        assert all(row.finite for row in rows)
        gm.assert_same_bits(np.asarray(rows), wanted, f"{width} rows as a whole")
        state.commit(width)
        assert state.length == 30 + width


def test_it_advances_like_a_forward(screened):
    model, answers = screened, []
    for run in (model.forward, model.best):
        state, found = gm.state_at(model, gm.tokens(20)), [5]
        for _ in range(12):
            row = run(state, found[-1:])[0]
            found.append(int(row.argmax()))
        answers.append((found, state.length, np.asarray(row).copy()))
    assert answers[0][:2] == answers[1][:2]
    gm.assert_same_bits(answers[1][2], answers[0][2], "the last row")
    counts = model.screened
    assert counts["runs"] == counts["rows"] == 12 and 0 < counts["exact_share"] <= 1


def test_it_rests_where_it_does_not_pay(screened, monkeypatch):
    """These small models' logits are so close together that nearly everything is a candidate."""
    state, tokens = gm.state_at(screened, gm.tokens(20)), gm.tokens(2)
    screening = screened._screening
    for most, rests in ((2.0, 0), (-1.0, 1)):
        monkeypatch.setattr(screening, "_most", most)
        for _ in range(80):
            before = screened.screened["runs"]
            rows = screened.best(state, tokens, rows="all", verify=True)
            assert screened.screened["runs"] - before <= 1 and len(rows) == 2
        counts = screened.screened
        assert counts["rests"] == rests, counts
    assert counts["runs"] < 160
    wanted = screened.forward(state, tokens, rows="all", verify=True).argmax(axis=1)
    assert [row.best for row in screened.best(state, tokens, rows="all", verify=True)] == list(
        wanted
    )


def test_wide_runs_and_none_are_ordinary(screened):
    state, tokens = screened.new_state(), gm.tokens(20)
    assert len(screened.best(state, tokens, rows="none")) == 0
    last = screened.best(state, tokens)[0]  # the last of several rows
    again = screened.new_state()
    screened.forward(again, tokens, rows="none")
    assert last.best == int(screened.forward(again, tokens)[0].argmax())
    assert screened.screened["runs"] == 0


def test_only_a_choice_by_the_largest_logit_is_screened(screened):
    model = screened
    paths = Paths(model)
    state = gm.state_at(model, gm.tokens(10))
    path = paths.pick("window", 3)
    for params, runs in (
        (SamplingParams(), 1),
        (SamplingParams(temperature=0.7), 1),
        (SamplingParams(logprobs=1), 1),
        (SamplingParams(logit_bias={3: 1.0}), 1),
        (SamplingParams(min_tokens=2), 1),
    ):
        paths.read.sampler = Sampler(params, model.config.n_vocab, seed=1)
        path.run(state, gm.tokens(3), lambda index, row: True)
        path.commit(state, 1)
        assert model.screened["runs"] == runs, params


def test_what_the_plan_says(monkeypatch):
    path = gm.FOLDER / "llama-tiny-F32.gguf"
    small = load_target(path, context=64, threads=1, device="cpu")
    assert "too small" in small.plan["head_screen"] and small.screened is None
    plain = small.plan["memory_bytes"]["weights"]
    small.close()
    monkeypatch.setattr(kernels.screen, "_LEAST_OUTPUTS", 1)
    monkeypatch.setattr(kernels.screen, "_LEAST_INPUTS", 64)
    off = load_target(path, context=64, threads=1, device="cpu", head_screen=False)
    assert off.plan["head_screen"] == "off: switched off (head_screen)"
    row = off.best(off.new_state(), [1])[0]
    assert off.screened is None and row.best == int(np.asarray(row).argmax())
    off.close()
    on = load_target(path, context=64, threads=1, device="cpu")
    assert on.plan["memory_bytes"]["weights"] > plain
    assert on.weight_bytes_per_token < off.weight_bytes_per_token
    on.close()
