"""Plain decoding and speculation give the same bits: models x drafts x paths x depths x requests."""

import functools
import itertools
from typing import Any

import golden_models
import numpy as np
import pytest
from draft_zoo import KINDS, MAX_DEPTH
from lossless_cases import (
    PATHS,
    SETTINGS,
    Case,
    Outcome,
    check_context,
    draft_for,
    options_of,
    outcome,
    plain_engine,
    plain_outcome,
    random_case,
    random_steps,
    spec_engine,
    step_paths,
)

from sparkinfer.tokenizer import Tokenizer

TARGETS = [
    *itertools.product(golden_models.MODELS, golden_models.ACTIVATIONS),
    *((name, golden_models.BLOCK_CACHE) for name in golden_models.BLOCK_MODELS),
]
PROMPTS = {0: 1, 1: 7, 2: 15, 3: 70}  # lengths by number
COUNT = 40


class Bench:
    """A golden model, its tokenizer and what plain decoding makes of each prompt and request."""

    def __init__(self, name: str, activations: str, count: int) -> None:
        self.target = golden_models.target(name, activations)
        self.tokenizer = Tokenizer.from_gguf(self.target.file)
        self.engine = plain_engine(self.target, self.tokenizer)
        self.count = count
        self._free: dict[int, Outcome] = {}
        self._plain: dict[str, Outcome] = {}

    def prompt(self, number: int) -> list[int]:
        rng = np.random.default_rng(100 + number)
        return [int(token) for token in rng.integers(0, 280, PROMPTS[number])]

    def free(self, number: int) -> Outcome:
        """The greedy output that nothing stops."""
        if number not in self._free:
            self._free[number] = plain_outcome(
                self.engine, self.prompt(number), max_tokens=self.count, ignore_eos=True
            )
        return self._free[number]

    def plain(self, prompt: list[int], options: dict[str, Any]) -> Outcome:
        key = repr((prompt, options))
        if key not in self._plain:
            self._plain[key] = plain_outcome(self.engine, prompt, **options)
        return self._plain[key]

    def compare(self, case: Case, number: int, *, features: bool = False) -> None:
        """One request both ways; `features` also looks at every context row of the draft."""
        prompt, free = self.prompt(number), self.free(number)
        rng = np.random.default_rng(case.seed)
        n_vocab = self.target.config.n_vocab
        options = options_of(case.setting, free, n_vocab, self.count, rng)
        plain = self.plain(prompt, options)
        whole = [*prompt, *plain.tokens]
        draft = draft_for(case.kind, self.target, self.tokenizer, whole, case.seed)
        engine = spec_engine(self.target, self.tokenizer, draft, case.steps)
        got, result = outcome(engine, prompt, **options)
        assert not plain.differences(got), (case.what, number, plain, got)
        if len(plain.tokens) > 3 and all(width > 1 for width, _ in case.steps):
            assert set(step_paths(result)) & set(PATHS), "nothing was speculated"
        assert draft.gap == 0, case.what
        if features:
            assert not check_context(self.target, draft, whole), case.what


@functools.cache
def bench(name: str, activations: str, count: int = COUNT) -> Bench:
    return Bench(name, activations, count)


@pytest.mark.parametrize(("name", "activations"), TARGETS)
def test_random_cases(name, activations):
    """Any draft, any path and depth, changing at every step, any request; 62: the state after every rollback."""
    rng = np.random.default_rng(11)
    for turn in range(7):
        case = random_case(rng)
        bench(name, activations).compare(case, turn % len(PROMPTS), features=turn % 5 == 0)


@pytest.mark.parametrize(("name", "activations"), TARGETS)
def test_every_setting(name, activations):
    """Each kind of request once, with a draft that is right for some slots, on changing paths and depths."""
    rng = np.random.default_rng(12)
    for turn, setting in enumerate(SETTINGS):
        kind = "scripted" if turn % 3 else "late"
        case = Case(setting, kind, random_steps(rng), int(rng.integers(2**31)))
        bench(name, activations).compare(case, turn % len(PROMPTS))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["qwen35-tiny-F32"])
def test_every_draft_and_depth_on_each_path(name, path):
    """All fifteen depths, one path for good (compact hands wide windows on); every draft at some depths, two at all."""
    depths = range(1, MAX_DEPTH + 1)
    grid = [
        (kind, depth)
        for depth in depths
        for kind in ("oracle", "scripted", KINDS[depth % len(KINDS)])
    ]
    for turn, (kind, depth) in enumerate(grid):
        case = Case("logprobs", kind, ((depth + 1, path),), turn)
        bench(name, "int8", 12).compare(case, turn % len(PROMPTS))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "activations"), TARGETS)
def test_everything(name, activations):
    """Every draft x path x depth, each with another request, at 48 tokens."""
    for turn, (kind, path, depth) in enumerate(
        itertools.product(KINDS, PATHS, range(1, MAX_DEPTH + 1))
    ):
        case = Case(SETTINGS[turn % len(SETTINGS)], kind, ((depth + 1, path),), turn)
        bench(name, activations, 48).compare(case, turn % len(PROMPTS), features=turn % 16 == 0)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "activations"), TARGETS)
def test_many_random_cases(name, activations):
    rng = np.random.default_rng(13)
    for turn in range(600):
        case = random_case(rng)
        bench(name, activations, 64).compare(case, turn % len(PROMPTS), features=turn % 8 == 0)
