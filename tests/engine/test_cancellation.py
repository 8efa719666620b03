"""Ctrl-C, flags and superseding: the text so far is kept and the state stays right."""

import os
import signal
import threading
import time

import pytest
from toy_model import ToyTarget, ToyTokenizer, hashed_logits, scripted_logits

from sparkinfer.engine import Engine, cancel_on_interrupt
from sparkinfer.errors import RequestError

TOKENIZER = ToyTokenizer([bytes([c]) for c in b"abcdefgh"])
PROMPT = (3, 4, 5, 6, 7, 8, 9)
FREE = {"max_tokens": 20, "logit_bias": {0: -100.0, 1: -100.0, 2: -100.0}}  # every token has text


def engine(logits=None):
    return Engine(ToyTarget(logits or hashed_logits(TOKENIZER.n_vocab), 64), TOKENIZER)


def after(target, rows, action):
    """Run `action` once, inside the forward that makes the count of rows reach `rows`."""

    def watch():
        if target.computed >= rows:
            target.before_forward = lambda: None
            action()

    target.before_forward = watch


@pytest.mark.parametrize("steps", range(5))
def test_a_cancelled_generation_keeps_its_text_and_a_state_to_go_on_from(steps):
    tested, whole = engine(), engine().generate(PROMPT, **FREE)
    stream = tested.stream(PROMPT, **FREE)
    text = "".join(str(next(stream)) for _ in range(steps))
    stream.cancel()
    text += "".join(map(str, stream))
    result = stream.result
    assert result.finish_reason == "cancelled" and result.text == text
    assert result.tokens == whole.tokens[:steps] and len(text) == steps
    assert result.usage.completion_tokens == steps
    assert tested.generate(PROMPT, **FREE).tokens == whole.tokens


def test_cancel_inside_a_prefill_stops_between_chunks():
    tested = engine()
    stream = tested.stream(PROMPT, **FREE, progress=lambda *_: stream.cancel())
    assert list(stream) == []
    assert stream.result.finish_reason == "cancelled" and stream.result.text == ""
    assert tested.target.computed == 4  # one chunk of seven tokens
    assert stream.result.timings.prefill_tokens == 4
    assert tested.generate(PROMPT, **FREE).tokens == engine().generate(PROMPT, **FREE).tokens


def test_held_back_text_comes_out_when_cancelled():
    tested = engine(scripted_logits(TOKENIZER.n_vocab, 1, [3, 4, 5, 6]))
    stream = tested.stream([3], stop="abcx")
    assert [str(next(stream)) for _ in range(3)] == ["", "", ""]
    stream.cancel()
    assert list(map(str, stream)) == ["abc"] and stream.result.text == "abc"


def test_cancel_after_the_end_changes_nothing():
    tested = engine()
    stream = tested.stream(PROMPT, **FREE)
    result = stream.result
    stream.cancel()
    assert stream.result is result and list(stream) == [] and result.finish_reason == "length"


def test_ctrl_c_inside_cancel_on_interrupt_ends_at_a_step_and_keeps_the_state():
    tested, whole = engine(), engine().generate(PROMPT, **FREE)
    before = signal.getsignal(signal.SIGINT)
    after(tested.target, 10, lambda: os.kill(os.getpid(), signal.SIGINT))
    stream = tested.stream(PROMPT, **FREE)
    with cancel_on_interrupt(stream):
        text = "".join(map(str, stream))
    assert signal.getsignal(signal.SIGINT) is before
    assert stream.result.finish_reason == "cancelled" and stream.result.text == text
    assert 0 < len(text) < 20 and whole.text.startswith(text)
    assert tested.generate(PROMPT, **FREE).usage.cached_tokens == len(PROMPT) - 1


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also in a process that was started in the background, where it is ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_raises():
    tested = engine()

    def twice():
        """Two signals that wait at the same time become one, so the first has to be handled."""
        taken_over = signal.getsignal(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        while signal.getsignal(signal.SIGINT) is taken_over:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)  # another thread may have caught it: the handler raises in this one, soon

    after(tested.target, 10, twice)
    stream = tested.stream(PROMPT, **FREE)
    with pytest.raises(KeyboardInterrupt), cancel_on_interrupt(stream):
        list(stream)
    assert stream.result.finish_reason == "cancelled"


def test_a_plain_keyboard_interrupt_keeps_the_text_and_drops_the_state():
    def interrupt():
        raise KeyboardInterrupt

    tested, whole = engine(), engine().generate(PROMPT, **FREE)
    after(tested.target, 10, interrupt)
    stream, text = tested.stream(PROMPT, **FREE), ""
    with pytest.raises(KeyboardInterrupt):
        for delta in stream:
            text += str(delta)
    assert stream.result.finish_reason == "cancelled" and stream.result.text == text != ""
    again = tested.generate(PROMPT, **FREE)
    assert again.tokens == whole.tokens and again.usage.cached_tokens == 0


def test_in_another_thread_signals_are_left_alone():
    before, results = signal.getsignal(signal.SIGINT), []

    def work():
        stream = engine().stream(PROMPT, **FREE)
        with cancel_on_interrupt(stream):
            results.append(stream.result)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results[0].finish_reason == "length" and signal.getsignal(signal.SIGINT) is before


def test_a_new_generation_ends_the_one_before():
    tested = engine()
    old = tested.stream(PROMPT, **FREE)
    head = [next(old) for _ in range(3)]
    new = tested.generate(PROMPT[:4], **FREE)
    assert list(old) == [] and old.result.finish_reason == "cancelled"
    assert old.result.tokens == tuple(token for delta in head for token in delta.tokens)
    assert new.tokens == engine().generate(PROMPT[:4], **FREE).tokens


def test_a_step_from_a_second_thread_is_refused_and_does_no_harm():
    tested, inside, leave, errors = engine(), threading.Event(), threading.Event(), []

    def block():
        inside.set()
        assert leave.wait(5)

    after(tested.target, 0, block)
    stream = tested.stream(PROMPT, **FREE)
    thread = threading.Thread(target=lambda: errors.append(stream.result))
    thread.start()
    assert inside.wait(5)
    with pytest.raises(RequestError, match="one thread at a time"):
        next(stream)
    leave.set()
    thread.join()
    assert errors[0].tokens == engine().generate(PROMPT, **FREE).tokens
