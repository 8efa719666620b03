"""Any order of advance, verify, commit, rewind, snapshot and restore leaves the bits of single steps from nothing."""

import functools
from typing import Any

import golden_models as gm
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from state_bits import Oracle, digest, state_bits

from sparkinfer.errors import RequestError

CONTEXT = 80
MODELS = ("llama-tiny-F32", "qwen35-tiny-F32", "qwen35moe-tiny-F32")
TOKENS = st.integers(0, 3)  # few, so that prefixes meet again


@functools.cache
def oracle(name: str, activations: str) -> Oracle:
    return Oracle(gm.target(name, activations, context=CONTEXT))


class SequenceMachine(RuleBasedStateMachine):
    """Two sequences on one target; `tokens[i]` is what sequence i must remember."""

    name, activations = "", ""

    @initialize()
    def start(self) -> None:
        self.target = gm.target(self.name, self.activations, context=CONTEXT)
        self.states = [self.target.new_state(), self.target.new_state()]
        self.tokens: list[list[int]] = [[], []]
        self.windows: list[list[int]] = [[], []]
        self.snapshots: list[tuple[int, Any, list[int]]] = []

    @rule(i=st.integers(0, 1), tokens=st.lists(TOKENS, min_size=1, max_size=20))
    def advance(self, i: int, tokens: list[int]) -> None:
        if len(self.tokens[i]) + len(tokens) > CONTEXT:
            with pytest.raises(RequestError, match="exceed the context of 80"):
                self.target.forward(self.states[i], tokens)
            return
        rows = self.target.forward(self.states[i], tokens, rows="all").copy()
        before, self.windows[i] = self.tokens[i], []
        self.tokens[i] = [*before, *tokens]
        self.check_rows(rows, before, tokens)

    @rule(i=st.integers(0, 1), tokens=st.lists(TOKENS, min_size=1, max_size=16))
    def verify(self, i: int, tokens: list[int]) -> None:
        if len(self.tokens[i]) + len(tokens) > CONTEXT:
            with pytest.raises(RequestError, match="exceed the context of 80"):
                self.target.forward(self.states[i], tokens, verify=True)
            return
        rows = self.target.forward(self.states[i], tokens, rows="all", verify=True).copy()
        self.windows[i] = list(tokens)
        self.check_rows(rows, self.tokens[i], tokens)

    def check_rows(self, rows: Any, before: list[int], tokens: list[int]) -> None:
        known = oracle(self.name, self.activations)
        known([*before, *tokens])  # knows every prefix from here on
        for r, row in enumerate(rows):
            assert digest(row) == known([*before, *tokens[: r + 1]])[1]

    @precondition(lambda self: any(self.windows))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        i = data.draw(st.sampled_from([i for i in (0, 1) if self.windows[i]]))
        count = data.draw(st.integers(0, len(self.windows[i])))
        with pytest.raises(RequestError, match="verified window has"):
            self.states[i].commit(len(self.windows[i]) + 1)
        self.states[i].commit(count)
        self.tokens[i] = [*self.tokens[i], *self.windows[i][:count]]
        self.windows[i] = []

    @rule(i=st.integers(0, 1), data=st.data())
    def rewind(self, i: int, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, min(len(self.tokens[i]), 25)))
        self.states[i].rewind(count)
        self.tokens[i], self.windows[i] = self.tokens[i][: len(self.tokens[i]) - count], []

    @rule(i=st.integers(0, 1))
    def mark(self, i: int) -> None:
        self.states[i].mark()

    @rule(i=st.integers(0, 1))
    def snapshot(self, i: int) -> None:
        self.snapshots.append((i, self.states[i].snapshot(), list(self.tokens[i])))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """Either the state of the snapshot comes back, or it is refused because its rows were overwritten."""
        i, saved, tokens = data.draw(st.sampled_from(self.snapshots))
        try:
            self.states[i].restore(saved)
        except RequestError as error:
            assert "have been overwritten" in str(error)
            return
        self.tokens[i], self.windows[i] = list(tokens), []

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def restore_into_the_other(self, data: st.DataObject) -> None:
        i, saved, tokens = data.draw(st.sampled_from(self.snapshots))
        if tokens:
            with pytest.raises(RequestError, match="snapshot"):
                self.states[1 - i].restore(saved)

    @invariant()
    def the_state_is_that_of_single_steps(self) -> None:
        for i, state in enumerate(getattr(self, "states", [])):
            assert state.tokens == self.tokens[i]
            assert state.length == len(self.tokens[i])
            assert state.pending == self.windows[i]
            assert (
                state_bits(self.target, state)
                == oracle(self.name, self.activations)(self.tokens[i])[0]
            )


@pytest.mark.parametrize(
    ("name", "activations"),
    [*((name, "int8") for name in MODELS), ("qwen35-tiny-F32", gm.BLOCK_CACHE)],
)
def test_a_sequence_has_the_bits_of_single_steps(name, activations):
    run_machine(name, activations, examples=100, steps=30)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "activations"),
    [*((name, "int8") for name in gm.MODELS), *((n, gm.BLOCK_CACHE) for n in gm.BLOCK_MODELS)],
)
def test_long_lives_of_sequences(name, activations):
    run_machine(name, activations, examples=400, steps=50)


def run_machine(name: str, activations: str, examples: int, steps: int) -> None:
    machine = type("Machine", (SequenceMachine,), {"name": name, "activations": activations})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
