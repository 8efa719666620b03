"""Bounds and refusals of a sequence, and where a rewind starts from."""

import golden_models as gm
import pytest
from state_bits import Oracle, state_bits

from sparkinfer.errors import RequestError

HYBRID, PLAIN = "qwen35-tiny-F32", "llama-tiny-F32"
both = pytest.mark.parametrize("name", [HYBRID, PLAIN])


@both
@pytest.mark.parametrize("count", [-1, 4, 10**9])
def test_commit_takes_as_many_rows_as_the_window_has(name, count):
    model = gm.target(name)
    state = gm.state_at(model, [1, 2])
    model.forward(state, [3, 4, 5], verify=True)
    with pytest.raises(RequestError, match=rf"commit\({count}\): the verified window has 3 rows"):
        state.commit(count)
    state.commit(3)
    assert state.tokens == [1, 2, 3, 4, 5] and state.pending == []


@both
def test_commit_without_a_window_takes_nothing(name):
    state = gm.state_at(gm.target(name), [1, 2])
    state.commit(0)
    with pytest.raises(RequestError, match="has 0 rows"):
        state.commit(1)


@both
@pytest.mark.parametrize("count", [-1, 3])
def test_rewind_stays_inside_the_sequence(name, count):
    state = gm.state_at(gm.target(name), [1, 2])
    with pytest.raises(RequestError, match=rf"rewind\({count}\): the sequence has 2 tokens"):
        state.rewind(count)
    assert state.tokens == [1, 2]


@both
def test_an_advance_a_rewind_and_a_restore_drop_the_window(name):
    model = gm.target(name)
    for action in ("advance", "rewind", "restore"):
        state = gm.state_at(model, [1, 2])
        saved = state.snapshot()
        model.forward(state, [3, 4], verify=True)
        if action == "advance":
            model.forward(state, [5])
        elif action == "rewind":
            state.rewind(1)
        else:
            state.restore(saved)
        assert state.pending == []
        assert state_bits(model, state) == Oracle(model)(state.tokens)[0]


@both
def test_a_snapshot_of_overwritten_rows_is_refused(name):
    model = gm.target(name)
    state = gm.state_at(model, [1, 2, 3])
    saved = state.snapshot()
    state.rewind(2)
    model.forward(state, [9], verify=True)  # not committed, but row 1 of the cache is written
    with pytest.raises(RequestError, match="snapshot at 3 tokens"):
        state.restore(saved)
    assert state.length == 1
    empty = model.new_state().snapshot()
    state.restore(empty)
    assert state.length == 0


def test_a_snapshot_of_another_sequence_is_refused():
    model = gm.target(HYBRID)
    first, second = gm.state_at(model, [1, 2, 3]), gm.state_at(model, [4, 5, 6])
    with pytest.raises(RequestError, match="another sequence"):
        second.restore(first.snapshot())


@pytest.mark.parametrize("count", [0, 1, 30, 260, 261, 320, 321, 500, 520])
def test_a_rewind_starts_from_the_nearest_mark(count, monkeypatch):
    """The newest three marks are kept; the one at 100 has given way."""
    model = gm.target(HYBRID)
    state, ran = model.new_state(), []
    monkeypatch.setattr(state, "_advance", lambda s, t: (ran.append(len(t)), model._advance(s, t)))
    for start, end in ((0, 100), (100, 200), (200, 260), (260, 520)):
        model.prefill(state, gm.tokens(520)[start:end])
        state.mark()
    state.rewind(count)
    left = 520 - count
    nearest = max(mark for mark in (0, 200, 260, 520) if mark <= left)
    assert sum(ran) == (left - nearest if count else 0)
    assert state_bits(model, state) == state_bits(model, gm.state_at(model, gm.tokens(520)[:left]))


@both
def test_the_context_may_be_filled_and_not_overfilled(name):
    model = gm.target(name)
    state = model.new_state(17)
    model.forward(state, gm.tokens(17))
    for verify in (False, True):
        with pytest.raises(RequestError, match="1 more tokens after 17 exceed the context of 17"):
            model.forward(state, [1], verify=verify)
    state.rewind(3)
    model.forward(state, [1, 2, 3], verify=True)
    state.commit(3)
    assert state.length == 17


@pytest.mark.parametrize("context", [0, -1, gm.CONTEXT + 1])
def test_a_state_is_no_larger_than_the_target_allows(context):
    with pytest.raises(RequestError, match=f"context {context} is outside 1 .. {gm.CONTEXT}"):
        gm.target(PLAIN).new_state(context)


def test_a_sequence_of_another_model_is_refused():
    other = gm.target(PLAIN).new_state()
    with pytest.raises(RequestError, match="another shape"):
        gm.target(HYBRID).forward(other, [1])
    with pytest.raises(RequestError, match="another shape"):
        gm.target(PLAIN, "f32").forward(other, [1])


@both
@pytest.mark.parametrize("when", ["advance", "second chunk", "commit", "rewind"])
@pytest.mark.parametrize("then", ["advance", "verify", "snapshot", "rewind"])
def test_an_interrupt_inside_a_step_leaves_no_trace(name, when, then, monkeypatch):
    """Ctrl-C is noticed when the compiled loop returns: recurrent state has moved, the length has not."""
    model = gm.target(name)
    state = gm.state_at(model, gm.tokens(90)[:70])
    if when == "commit":
        model.forward(state, [1, 2, 3], verify=True)
    run, calls = model.backend.run, []

    def interrupted(head):
        run(head)
        calls.append(head)
        if len(calls) == (2 if when == "second chunk" else 1):
            raise KeyboardInterrupt

    monkeypatch.setattr(model.backend, "run", interrupted)
    action = {
        "advance": lambda: model.forward(state, [9]),
        "second chunk": lambda: model.forward(state, gm.tokens(90)[:80]),
        "commit": lambda: state.commit(2),
        "rewind": lambda: state.rewind(3),
    }[when]
    if name == PLAIN and when in ("commit", "rewind"):
        action()  # nothing runs
    else:
        with pytest.raises(KeyboardInterrupt):
            action()
    monkeypatch.undo()
    if then == "advance":
        model.forward(state, [5])
    elif then == "verify":
        model.forward(state, [5, 6], verify=True)
    elif then == "snapshot":
        state.snapshot()
    else:
        state.rewind(min(1, state.length))  # an interrupted rewind may have left nothing
    assert state_bits(model, state) == state_bits(model, gm.state_at(model, state.tokens))
