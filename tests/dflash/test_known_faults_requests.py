"""Faults that users of other engines have reported: ends of output, parameters, resources, the real network."""

import gc
import itertools
import tracemalloc
from dataclasses import fields

import golden_models
import numpy as np
import pytest
from draft_zoo import MAX_DEPTH, constant, make_draft, write_block_draft
from fault_cases import PIECES, PROMPT, TOY, Golden, free, some_costs, toy_engine
from lossless_cases import (
    PATHS,
    ScriptedPolicy,
    draft_for,
    outcome,
    spec_engine,
    state_of,
)
from toy_model import END, ToyTarget, ToyTokenizer, hashed_logits, scripted_logits

from sparkinfer.decoding import AutoregressiveDecoder
from sparkinfer.dflash.draft import load_draft
from sparkinfer.dflash.loop import DFlashDecoder
from sparkinfer.dflash.planner import make_policy
from sparkinfer.dflash.verify import Paths
from sparkinfer.engine import Engine, StopMatch
from sparkinfer.errors import OptionError, RequestError
from sparkinfer.options import resolve
from sparkinfer.sampling import SamplingParams

# --- ends of output --------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("slot", range(8))
def test_29_an_end_inside_a_block_ends_there(slot, path):
    """29: an accepted end-of-text token stops the output; nothing after it is emitted, kept or given to the draft."""
    script = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 3, 4, 5]
    script[1 + slot] = END
    engine = toy_engine(script, path=path)
    result = engine.generate(PROMPT)
    assert result.tokens == tuple(script[: 2 + slot])
    assert result.finish_reason == "stop" and result.stop == StopMatch(END)
    assert state_of(engine).tokens == [*PROMPT, *script[: 1 + slot]]
    follow_up = engine.generate([*PROMPT, *script[: 2 + slot], 6])
    assert follow_up.usage.cached_tokens == len(PROMPT) + 1 + slot
    assert engine.decoder.draft.tokens[: len(PROMPT) + 1 + slot] == [*PROMPT, *script[: 1 + slot]]


@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize("path", PATHS)
def test_50_max_tokens_is_exact(path, width):
    """50: 1, 2, B and B + 1 tokens give exactly as many, each counted once."""
    script = [3 + i % 13 for i in range(60)]
    for count in (1, 2, width, width + 1):
        engine = toy_engine(script, width=width, path=path)
        result = engine.generate(PROMPT, max_tokens=count)
        assert result.tokens == tuple(script[:count])
        assert (result.usage.completion_tokens, result.finish_reason) == (count, "length")
        assert sum(path.tokens for path in result.paths.values()) == count
        assert state_of(engine).tokens == [*PROMPT, *script[: count - 1]]


def test_50_no_row_is_computed_beyond_what_may_be_output():
    """50: the window of the last step is as wide as there is room for."""
    engine = toy_engine([3] * 60, width=16)
    engine.generate(PROMPT, max_tokens=6)
    assert engine.target.computed == len(PROMPT) + 5


def test_51_a_request_can_be_cancelled_between_steps_and_the_engine_goes_on():
    """51: abort killed the process elsewhere; here the text so far stays and the next request is whole."""
    script = [3 + i % 13 for i in range(60)]
    engine = toy_engine(script, [4], width=6)
    generation = engine.stream(PROMPT)
    pieces = [next(generation), next(generation)]
    generation.cancel()
    result = generation.result
    assert result.finish_reason == "cancelled"
    assert result.tokens == tuple(script[: sum(len(p.tokens) for p in pieces)])
    assert state_of(engine).tokens == [*PROMPT, *result.tokens][:-1]
    assert engine.generate(PROMPT, max_tokens=40).tokens == tuple(script[:40])


def test_51_the_context_limit_is_a_reason_not_an_error():
    """51: the output ends when the context is full."""
    target = ToyTarget(scripted_logits(TOY.n_vocab, len(PROMPT), [3] * 99), context=20)
    draft = make_draft("oracle", TOY.n_vocab, [*PROMPT, *[3] * 99])
    result = spec_engine(target, TOY, draft, [(16, "window")]).generate(PROMPT)
    assert (len(result.tokens), result.finish_reason) == (17, "context")


def test_49_stop_ids_come_from_the_model_file_and_lists_are_taken():
    """49: a hard-coded end token left trailing garbage."""
    golden = Golden("qwen35-tiny-F32")
    assert len(golden.tokenizer.stop_ids) > 1
    prompt = golden_models.tokens(9)
    plain = golden.plain(prompt, **free(30))
    draft = golden.draft("oracle", [*prompt, *plain.tokens])
    engine = golden.speculative(draft, [(8, "window")])
    for end in sorted(golden.tokenizer.stop_ids):
        bias = {end: 100.0}
        result = engine.generate(prompt, logit_bias=bias, max_tokens=9)
        assert (result.tokens, result.stop) == ((end,), StopMatch(end))
    stops = [plain.tokens[6], plain.tokens[11]]
    first = min(plain.tokens.index(token) for token in stops)
    result = engine.generate(prompt, **free(30), stop_ids=stops)
    assert result.tokens == plain.tokens[: first + 1]


def test_34_a_token_equal_to_the_mask_id_survives():
    """34: a filter after decoding lost text that held the mask token."""
    mask = TOY.n_vocab - 2
    script = [3, mask, 4, mask, mask, 5, 6, mask, 7]
    for draft in (
        make_draft("mask", TOY.n_vocab, [*PROMPT, *script]),
        make_draft("oracle", TOY.n_vocab, [*PROMPT, *script]),
    ):
        result = toy_engine(script, draft=draft).generate(PROMPT)
        assert result.tokens == (*script, END)
        assert result.text == TOY.decode(script)


def test_27_padding_ids_never_win_and_a_prompt_of_one_token_works():
    """27: rows of a padded head hold anything; a draft may even propose them."""
    tokenizer = ToyTokenizer(PIECES[:5], unused=4)
    known, n_vocab = 8, tokenizer.n_vocab
    base = hashed_logits(n_vocab)

    def padded(tokens):
        row = base(tokens)
        row[known:] = 50.0
        return row

    plain = Engine(ToyTarget(padded), tokenizer)
    for options in ({}, {"temperature": 1.0, "seed": 5}):
        wanted = plain.generate([4], **free(30), **options)
        assert max(wanted.tokens) < known
        draft = make_draft("edges", n_vocab, [4])
        for guess in (constant([n_vocab - 1]), constant(range(n_vocab))):
            draft.guess = guess
            for rule in ("match", "rejection"):
                engine = spec_engine(
                    ToyTarget(padded), tokenizer, draft, [(5, "window")], rule=rule
                )
                got = engine.generate([4], **free(30), **options)
                assert max(got.tokens) < known and len(got.tokens) == 30
                if rule == "match":
                    assert got.tokens == wanted.tokens and got.logprobs == wanted.logprobs


# --- parameters of a request -----------------------------------------------------------------

HONOURED = {
    "temperature": 1.0,
    "top_k": 2,
    "top_p": 0.5,
    "min_p": 0.5,
    "repetition_penalty": 1.3,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.5,
    "logit_bias": {7: 4.0},
    "min_tokens": 12,
    "seed": 3,
    "logprobs": 5,
}


@pytest.mark.parametrize("field", [field.name for field in fields(SamplingParams)])
def test_30_39_40_every_parameter_is_honoured(field):
    """30, 39, 40: each one changes the output of plain decoding, and speculation gives the changed output."""
    value = HONOURED[field]
    sampled = field in ("top_k", "top_p", "min_p", "seed")
    base = {"temperature": 1.2, "seed": 2} if sampled else {"seed": 2}
    base |= {"max_tokens": 40, "ignore_eos": field != "min_tokens"}
    logits = hashed_logits(TOY.n_vocab)
    plain = Engine(ToyTarget(logits), TOY)
    without = plain.generate(PROMPT, **base)
    wanted = plain.generate(PROMPT, **base | {field: value})
    seen = [(result.tokens, result.logprobs) for result in (without, wanted)]
    assert seen[0] != seen[1], "the parameter made no difference: this test shows nothing"
    for kind in ("oracle", "scripted", "random"):
        draft = make_draft(kind, TOY.n_vocab, [*PROMPT, *wanted.tokens])
        engine = spec_engine(ToyTarget(logits), TOY, draft, [(6, "window"), (3, "token_loop")])
        got = engine.generate(PROMPT, **base | {field: value})
        assert (got.tokens, got.logprobs, got.finish_reason) == (
            wanted.tokens,
            wanted.logprobs,
            wanted.finish_reason,
        )


def test_30_40_an_unknown_parameter_is_an_error():
    """30, 40: never dropped in silence."""
    with pytest.raises(RequestError, match="unknown request option top_q; did you mean top_"):
        toy_engine([3]).generate(PROMPT, top_q=0.5)


@pytest.mark.parametrize("name", golden_models.MODELS)
def test_39_a_repetition_penalty_counts_row_by_row(name):
    """39: one adjustment for the whole block, or none, makes loops; greedy with penalty 1.3 equals plain decoding."""
    golden = Golden(name)
    prompt = golden_models.tokens(12)
    options = free(60) | {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
    plain = golden.plain(prompt, **options)
    for kind in ("oracle", "scripted"):
        draft = golden.draft(kind, [*prompt, *plain.tokens])
        got, result = outcome(golden.speculative(draft, [(8, "window")]), prompt, **options)
        assert not plain.differences(got) and result.speculation.accepted > 0


@pytest.mark.parametrize("name", golden_models.MODELS)
@pytest.mark.parametrize("path", PATHS)
def test_33_42_depth_one_has_the_bits_of_plain_decoding(name, path):
    """33, 42: outputs that differ at token 30 with one draft, missing log-probabilities; twenty to the last bit."""
    golden = Golden(name)
    prompt = golden_models.tokens(12)
    options = free(60) | {"logprobs": 20}
    plain = golden.plain(prompt, **options)
    draft = golden.draft("scripted", [*prompt, *plain.tokens])
    got, _ = outcome(golden.speculative(draft, [(2, path)]), prompt, **options)
    assert len(plain.logprobs) == 60 and len(plain.logprobs[0].split()) == 42
    assert not plain.differences(got)


# --- resources and repeats -------------------------------------------------------------------


def test_36_forty_repeated_runs_are_equal_to_the_last_bit():
    """36: a race let 5 to 7 of 40 runs differ, and a single check missed it; four threads."""
    golden = Golden("qwen35moe-tiny-F32")
    target = golden_models.target("qwen35moe-tiny-F32", threads=4)
    prompt = golden_models.tokens(30)
    plain = golden.plain(prompt, **free(40))
    for run in range(40):
        draft = draft_for("scripted", target, golden.tokenizer, [*prompt, *plain.tokens], run)
        engine = spec_engine(target, golden.tokenizer, draft, [(8, PATHS[run % 4]), (5, "window")])
        got, _ = outcome(engine, prompt, **free(40))
        assert not plain.differences(got), run


def test_37_a_depth_beyond_the_block_is_refused(tmp_path):
    """37: buffers overran when the depth was larger than the block."""
    target = golden_models.target("qwen3-tiny-Q8_0")
    draft = load_draft(write_block_draft(tmp_path / "draft", target, block=8), target)
    assert draft.max_depth == 7
    draft.begin([])
    draft.extend([1, 2], np.zeros((2, 2 * target.config.n_embd), np.float32))
    assert draft.propose(3, 7).depth == 7
    for depth in (0, 8, 15):
        with pytest.raises(RequestError, match=f"depth {depth} is outside 1 .. 7"):
            draft.propose(3, depth)
    options = resolve({"dflash_proposals": 8})
    with pytest.raises(OptionError, match="1 to 7"):
        make_policy(options, some_costs(), draft.max_depth, target.max_width)


def test_22_options_that_contradict_each_other_are_refused():
    """22: a fixed depth of 8 with the compact path alone, which takes four rows."""
    target = golden_models.target("qwen3-tiny-Q8_0")
    paths = Paths(target, compact=1)
    options = resolve({"dflash_proposals": 8, "dflash_compact_verify": 1})
    with pytest.raises(OptionError, match="1 to 3"):
        make_policy(options, some_costs(), MAX_DEPTH, paths.max_width)


def test_56_memory_is_flat_over_two_hundred_requests():
    """56: swap grew with every request elsewhere."""
    golden = Golden("qwen35-tiny-F32")
    prompts = [golden_models.tokens(40, seed=seed) for seed in range(4)]
    plain = [golden.plain(prompt, **free(12)) for prompt in prompts]
    draft = make_draft("scripted", 320, [], taps=(0, 5))
    engine = golden.speculative(draft, [(8, "window"), (4, "compact"), (5, "block")])
    engine.decoder.policy = Forgetful(engine.decoder.policy.steps)

    def serve(count):
        for turn in range(count):
            draft.known = [*prompts[turn % 4], *plain[turn % 4].tokens]
            draft.anchors.clear()
            draft.depths.clear()
            assert engine.generate(prompts[turn % 4], **free(12)).tokens == plain[turn % 4].tokens

    serve(20)
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(
            4
        ):  # a leak grows every time; what a cache or another test's rest adds does not
            serve(45)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert min(after - before for before, after in itertools.pairwise(sizes)) < 9_000, sizes


class Forgetful(ScriptedPolicy):
    """Keeps no record, which would grow."""

    def begin(self, length, usual=True):
        return None

    def observe(self, step):
        return None


# --- the real network ------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden_models.MODELS)
def test_33_36_a_real_draft_of_random_weights_changes_nothing(tmp_path, name):
    """33, 36: a real network on the threads and buffers of its target, and a gap after a plain request."""
    golden = Golden(name)
    draft = load_draft(write_block_draft(tmp_path / "draft", golden.target), golden.target)
    engine = golden.speculative(draft, [(8, "window"), (16, "block"), (1, "ar"), (3, "compact")])
    prompt = golden_models.tokens(80)
    for turn, speculate in enumerate((True, True, False, True)):
        options = free(40) | ({"temperature": 1.0, "seed": turn} if turn % 2 else {})
        plain = golden.plain(prompt, **options)
        got, result = outcome(engine, prompt, **options, speculate=speculate)
        assert [d for d in plain.differences(got) if d != "usage"] == []
        if speculate:
            assert draft.length >= len(prompt) and result.speculation.drafted > 0
            assert (result.speculation.gap_rows > 0) == (turn == 3)
        prompt = [*prompt, *got.tokens, 5, 6]


def test_33_plain_decoding_after_speculation_is_plain_decoding():
    """33: taps and windows leave nothing behind in the target."""
    golden = Golden("qwen35-tiny256-Q4_K_M")
    prompt = golden_models.tokens(20)
    before = golden.plain(prompt, **free(30))
    draft = golden.draft("scripted", [*prompt, *before.tokens])
    outcome(golden.speculative(draft, [(8, "window")]), prompt, **free(30))
    assert not before.differences(golden.plain(prompt, **free(30)))
    decoder = AutoregressiveDecoder(golden.target)
    engine = Engine(golden.target, golden.tokenizer, decoder=decoder)
    assert not before.differences(outcome(engine, prompt, **free(30))[0])
    assert isinstance(golden.speculative(draft, [(2, "window")]).decoder, DFlashDecoder)
