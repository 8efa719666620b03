"""The autoregressive decoder over a toy target: the contract that every decoder keeps."""

import numpy as np
import pytest
from toy_model import ToyTarget, WindowDecoder, hashed_logits, oracle_draft

from sparkinfer.decoding import AutoregressiveDecoder
from sparkinfer.errors import ModelOutputError
from sparkinfer.sampling import Sampler, SamplingParams, TokenHistory

N = 40
PROMPT = (5, 6, 7, 8, 9)


def started(decoder_type, params, *more):
    target = ToyTarget(hashed_logits(N))
    decoder, state, history = decoder_type(target, *more), target.new_state(), TokenHistory(PROMPT)
    decoder.begin(state, PROMPT, Sampler(params, N, seed=9), history)
    return target, decoder, state, history


def reference(params, count):
    """Plain decoding without any of the decoder's code: a loop over whole prefixes."""
    logits, history = hashed_logits(N), TokenHistory(PROMPT)
    for _ in range(count):
        row = logits([*PROMPT, *history.output])
        history.push(Sampler(params, N, seed=9).choose(row, history).token)
    return history.output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_a_loop_over_whole_prefixes(temperature):
    params = SamplingParams(temperature=temperature, repetition_penalty=1.2, logprobs=2)
    target, decoder, state, history = started(AutoregressiveDecoder, params)
    steps = []
    for _ in range(12):
        steps.append(decoder.step(100))
        decoder.commit(1)
    assert [token for step in steps for token in step.tokens] == reference(params, 12)
    assert history.output == reference(params, 12)
    assert state.tokens == [*PROMPT, *history.output[:-1]]
    assert target.computed == len(PROMPT) + 11
    assert [step.path for step in steps] == ["prefill"] + ["ar"] * 11
    assert [step.rows for step in steps] == [0] + [1] * 11
    assert all(len(step.logprobs) == 1 for step in steps)
    assert all(set(step.seconds) == {"target", "sample"} for step in steps)


def test_no_logprobs_unless_asked_for():
    _, decoder, _, _ = started(AutoregressiveDecoder, SamplingParams())
    assert decoder.step(1).logprobs == ()


def test_progress_reaches_the_total():
    target, seen = ToyTarget(hashed_logits(N)), []
    decoder = AutoregressiveDecoder(target)
    decoder.begin(
        target.new_state(),
        PROMPT,
        Sampler(SamplingParams(), N, seed=0),
        TokenHistory(PROMPT),
        lambda done, total: seen.append((done, total)),
    )
    assert seen == [(4, 5), (5, 5)]


def test_a_decoder_serves_one_request_after_another():
    target = ToyTarget(hashed_logits(N))
    decoder = AutoregressiveDecoder(target)
    for _ in range(2):
        history = TokenHistory(PROMPT)
        sampler = Sampler(SamplingParams(), N, seed=0)
        decoder.begin(target.new_state(), PROMPT, sampler, history)
        for _ in range(3):
            decoder.step(10)
        assert history.output == reference(SamplingParams(), 3)


def test_a_bad_logit_names_its_position():
    target = ToyTarget(lambda tokens: np.full(N, np.nan if len(tokens) > 6 else 0, np.float32))
    decoder = AutoregressiveDecoder(target)
    sampler = Sampler(SamplingParams(), N, seed=0)
    decoder.begin(target.new_state(), PROMPT, sampler, TokenHistory(PROMPT))
    decoder.step(1)
    decoder.step(1)
    with pytest.raises(ModelOutputError, match="position 7"):
        decoder.step(1)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("kept", range(1, 5))
def test_after_a_commit_a_window_decoder_is_where_single_steps_would_be(temperature, kept):
    params = SamplingParams(temperature=temperature, presence_penalty=0.7)
    _, decoder, state, history = started(WindowDecoder, params, 4)
    assert len(decoder.step(100).tokens) == 1
    decoder.commit(1)
    assert len(decoder.step(100).tokens) == 4
    decoder.commit(kept)
    assert history.output == reference(params, kept + 1)
    assert state.tokens == [*PROMPT, *history.output[:-1]]
    decoder.step(100)
    decoder.commit(4)
    assert history.output == reference(params, kept + 5)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.9])
def test_wrong_drafts_cost_rows_but_change_no_token(temperature, accuracy):
    """The protocol carries a decoder that verifies drafts: its output is the plain one."""
    rng = np.random.default_rng(3)

    def draft(decoder, count):
        right = oracle_draft(decoder, count)
        return [token if rng.random() < accuracy else int(rng.integers(N)) for token in right]

    params = SamplingParams(temperature=temperature, repetition_penalty=1.3, logprobs=1)
    target, decoder, state, history = started(WindowDecoder, params, 4, None, draft)
    steps = []
    while len(history.output) < 40:
        steps.append(decoder.step(100))
        decoder.commit(len(steps[-1].tokens))
    assert history.output == reference(params, len(history.output))
    assert state.tokens == [*PROMPT, *history.output[:-1]]
    assert sum(step.rows for step in steps) == target.computed - len(PROMPT)
    assert [item.token for step in steps for item in step.logprobs] == history.output
