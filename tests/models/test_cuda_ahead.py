"""Plain decoding on a device begins with the next row before the host has read a token: the same tokens, and a state as
if it had not. Without a GPU one hybrid under Triton's interpreter.
"""

import atexit
import functools

import golden_models as gm
import gpu_machine
import numpy as np
import pytest
from state_bits import digest, state_bits

from sparkinfer.decoding import AutoregressiveDecoder
from sparkinfer.models import Target, load_target
from sparkinfer.sampling import Sampler, SamplingParams, TokenHistory

gpu_only = pytest.mark.skipif(gpu_machine.DEVICE != "cuda", reason="needs an NVIDIA GPU")
HYBRID = "qwen35moe-tiny-F32"


@functools.cache
def target(name: str) -> Target:
    backend = gpu_machine.CudaBackend(gpu_machine.DEVICE)
    loaded = load_target(gm.FOLDER / f"{name}.gguf", context=gm.CONTEXT, backend=backend)
    atexit.register(loaded.close)
    return loaded


class Single:
    """The rows and the state of `forward`, one token at a time."""

    def __init__(self, model: Target, prompt: list[int]) -> None:
        self.model, self.state = model, model.new_state()
        self.rows = [np.array(model.forward(self.state, [token])[0]) for token in prompt]

    def step(self, token: int) -> int:
        self.rows.append(np.array(self.model.forward(self.state, [token])[0]))
        return int(self.rows[-1].argmax())


def row(found) -> bytes:
    return digest(np.asarray(found))


def check(name: str, prompt: int, steps: int) -> None:
    """Rows ahead are single rows; what was begun and not asked for leaves nothing; another token may come instead."""
    model, tokens = target(name), gm.tokens(prompt)
    assert model.runs_ahead
    single = Single(model, tokens)
    best, wanted = int(single.rows[-1].argmax()), []
    state = model.new_state()
    for token in tokens[:-1]:
        model.forward(state, [token])
    found = model.row_after(state, tokens[-1], ahead=True)
    assert found.best == best and found.finite
    for _ in range(steps):
        assert state_bits(model, state) == state_bits(model, single.state)
        assert state.tokens == single.state.tokens
        token, best = best, single.step(best)
        found = model.row_after(state, token, ahead=True)
        assert found.best == best
        assert row(found) == digest(
            single.rows[-1]
        )  # the whole row, while the next one is computed
        wanted.append(best)
    assert state_bits(model, state) == state_bits(model, single.state)
    other = (best + 1) % model.config.n_vocab
    single.step(other)
    assert row(model.row_after(state, other, ahead=False)) == digest(single.rows[-1])
    assert state_bits(model, state) == state_bits(model, single.state)


@pytest.mark.timeout(600)
def test_rows_ahead_are_single_rows():
    check(HYBRID, 1, 1)


@gpu_only
@pytest.mark.parametrize("name", gm.MODELS)
def test_rows_ahead_are_single_rows_in_every_model(name):
    check(name, 5, 40)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_comes_between_ends_a_run_ahead():
    """A restored state, a window, another sequence: the rows after them are single rows, too."""
    model, tokens = target(HYBRID), gm.tokens(2)
    single = Single(model, tokens)
    best = int(single.rows[-1].argmax())
    state = model.new_state()
    model.forward(state, tokens[:1])
    before = state.snapshot()
    best_of = model.row_after(state, tokens[1], ahead=True)
    assert best_of.best == best
    state.restore(before)
    again = model.row_after(state, tokens[1], ahead=True)
    assert row(again) == digest(single.rows[-1])
    another = model.new_state()
    assert row(model.forward(another, tokens[:1])[0]) == digest(single.rows[0])
    single.step(best)
    assert row(model.row_after(state, best, ahead=False)) == digest(single.rows[-1])
    assert state_bits(model, state) == state_bits(model, single.state)


def decoded(model: Target, prompt: list[int], count: int, temperature: float = 0.0):
    """Tokens, the state and how many runs there were ahead."""
    decoder, state = AutoregressiveDecoder(model), model.new_state()
    history = TokenHistory(prompt)
    sampler = Sampler(SamplingParams(temperature=temperature), model.config.n_vocab, seed=3)
    decoder.begin(state, prompt, sampler, history)
    serial = model._intake.serial
    for left in range(count, 0, -1):
        decoder.step(left)
        decoder.commit(1)
    return list(history.output), state, model._intake.serial - serial


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_decoder_never_begins_with_a_row_after_the_last(monkeypatch):
    model, prompt = target(HYBRID), gm.tokens(1)
    tokens, state, runs = decoded(model, prompt, 3)
    assert runs == 2
    monkeypatch.setattr(Target, "runs_ahead", False)
    alone, other, _ = decoded(model, prompt, 3)
    assert tokens == alone
    assert state_bits(model, state) == state_bits(model, other)
