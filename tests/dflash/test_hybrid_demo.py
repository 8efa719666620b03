"""The trained hybrid pair of `examples/hybrid-demo`: real recurrences, routed experts and acceptance, the same bits."""

import functools
from pathlib import Path

import golden_models
import numpy as np
import pytest
from lossless_cases import PATHS, outcome, plain_engine, plain_outcome, spec_engine, step_paths
from state_bits import Oracle, state_bits

from sparkinfer.dflash.draft import load_draft
from sparkinfer.dflash.verify import COMPACT_MAX_ROWS, Paths
from sparkinfer.gguf import open_gguf
from sparkinfer.models import load_target
from sparkinfer.tokenizer import Tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = EXAMPLES / "hybrid-demo"
MARKUP = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
QUESTIONS = (
    "Give three tips for learning to cook.",
    "Write a Python function that adds two numbers.",
    "What is 12 plus 30? Show the steps.",
)
COUNT = 40  # tokens of an answer
FREE = {"max_tokens": COUNT, "ignore_eos": True, "logprobs": 2}

pytestmark = pytest.mark.skipif(
    not EXAMPLES.exists(), reason="the examples are part of the repository, not of its archives"
)


class Pair:
    """Target, draft and tokenizer, loaded once, and what plain decoding answers."""

    def __init__(self) -> None:
        self.file = open_gguf(FOLDER / "target.gguf")
        self.target = load_target(self.file, context=256, threads=2)
        self.draft = load_draft(FOLDER / "draft.gguf", self.target)
        self.tokenizer = Tokenizer.from_gguf(self.file)
        self.prompts = [
            self.tokenizer.encode(MARKUP.format(question), parse_special=True)
            for question in QUESTIONS
        ]
        engine = plain_engine(self.target, self.tokenizer)
        self.plain = [plain_outcome(engine, prompt, **FREE) for prompt in self.prompts]


@functools.cache
def pair() -> Pair:
    return Pair()


def test_the_files_say_what_they_are():
    target, draft = pair().file, open_gguf(FOLDER / "draft.gguf")
    assert target.architecture == "qwen35moe" and draft.architecture == "dflash"
    for file in (target, draft):
        assert file.require("general.license", str) == "apache-2.0"
        assert file.require("general.quantization_version", int) == 2
    source = draft.require("general.base_model.0.name", str)
    assert source == target.require("general.name", str)
    assert pair().target.config.recurrent == (True, True, False) * 2
    moe = pair().target.config.moe
    assert moe is not None and (moe.experts, moe.used) == (8, 2) and moe.shared > 0
    draft.close()


@pytest.mark.parametrize("path", ["compact", "window"])
def test_every_depth_gives_plain_decoding_and_real_drafts_are_accepted(path):
    """Depths 1 to 7 on one path: text, log-probabilities and the state's bits; windows are accepted in part."""
    most = COMPACT_MAX_ROWS - 1 if path == "compact" else 7
    drafted = accepted = 0
    ends = set()
    for depth in range(1, most + 1):
        for prompt, plain in zip(pair().prompts, pair().plain, strict=True):
            engine = spec_engine(pair().target, pair().tokenizer, pair().draft, [(depth + 1, path)])
            got, result = outcome(engine, prompt, **FREE)
            assert not plain.differences(got), (path, depth, plain.text, got.text)
            assert step_paths(result).get(path, 0) > 0
            policy = engine.decoder.policy
            ends |= {(step.width, step.accepted) for step in policy.seen}
            drafted += result.speculation.drafted
            accepted += result.speculation.accepted
    assert 0.25 * drafted < accepted < drafted
    assert {0, most} <= {count for width, count in ends if width == most + 1}


def test_another_path_at_every_step_gives_plain_decoding():
    rng = np.random.default_rng(3)
    for prompt, plain in zip(pair().prompts, pair().plain, strict=True):
        steps = [(int(rng.integers(2, 9)), str(rng.choice(PATHS))) for _ in range(48)]
        engine = spec_engine(pair().target, pair().tokenizer, pair().draft, steps)
        got, result = outcome(engine, prompt, **FREE)
        assert not plain.differences(got), (steps, plain.text, got.text)
        assert len(set(step_paths(result)) & set(PATHS)) >= 3


def test_a_sampled_answer_is_the_same():
    options = {**FREE, "temperature": 0.9, "seed": 5}
    engine = plain_engine(pair().target, pair().tokenizer)
    for prompt in pair().prompts:
        plain = plain_outcome(engine, prompt, **options)
        drafted = spec_engine(pair().target, pair().tokenizer, pair().draft, [(4, "window")])
        assert not plain.differences(outcome(drafted, prompt, **options)[0])


def test_rows_of_a_window_take_other_experts_and_have_the_bits_of_single_rows():
    """A window of the trained text, for which every row chooses its own experts, at several places."""
    model = pair().target
    whole = [*pair().prompts[0], *pair().plain[0].tokens]
    start = len(pair().prompts[0])
    state = golden_models.state_at(model, whole[:start])
    alone = np.stack([model.forward(state, [token])[0].copy() for token in whole[start:]])
    for place, width in ((0, 2), (3, 4), (5, 8), (20, 16)):
        state = golden_models.state_at(model, whole[: start + place])
        window = whole[start + place : start + place + width]
        rows = model.forward(state, window, rows="all", verify=True)
        golden_models.assert_same_bits(rows, alone[place : place + width], f"{width} at {place}")


@pytest.mark.parametrize("path", PATHS)
def test_a_rejected_end_leaves_no_trace_in_the_recurrent_state(path):
    """For every number of accepted drafts: the bits of single steps; then a rewind, and a snapshot, as well."""
    model, oracle = pair().target, Oracle(pair().target)
    whole = [*pair().prompts[2], *pair().plain[2].tokens]
    start = len(pair().prompts[2])
    paths = {p.name: p for p in Paths(model).order}
    width = COMPACT_MAX_ROWS if path == "compact" else 8
    oracle(whole[: start + 8])
    state = golden_models.state_at(model, whole[:start])
    before = state.snapshot()
    for accepted in range(width):
        wrong = [*whole[start : start + accepted + 1], *range(width)][:width]
        paths[path].run(state, wrong, lambda index, row, most=accepted: index < most)
        paths[path].commit(state, accepted + 1)
        kept = whole[: start + accepted + 1]
        assert state.tokens == kept
        assert state_bits(model, state) == oracle(kept)[0]
        if accepted % 2:  # runs all of it again, over the rows that the snapshot relied on
            state.rewind(accepted + 1)
            before = state.snapshot()
        else:
            state.restore(before)
        assert state.tokens == whole[:start]
        assert state_bits(model, state) == oracle(whole[:start])[0]
