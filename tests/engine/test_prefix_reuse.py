"""The kept sequence: a shared prefix is not computed again and never changes what comes out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import ToyTarget, ToyTokenizer, WindowDecoder, hashed_logits

from sparkinfer.engine import Engine
from sparkinfer.engine.prefix import common_prefix

TOKENIZER = ToyTokenizer([bytes([c]) for c in b"abcdefgh"])


def engine(recurrent=False, width=None):
    target = ToyTarget(hashed_logits(TOKENIZER.n_vocab), 64, recurrent=recurrent)
    return Engine(target, TOKENIZER, decoder=WindowDecoder(target, width) if width else None)


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_prefix(left, right):
    count = common_prefix(left, right)
    assert left[:count] == right[:count]
    assert count in (len(left), len(right)) or left[count] != right[count]


prompts = st.lists(st.integers(3, 5), min_size=1, max_size=12)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(0, 6), st.booleans(), st.booleans()), max_size=8),
    st.booleans(),
    st.sampled_from([None, 3]),
)
def test_any_series_of_requests_gives_what_fresh_engines_give(series, recurrent, width):
    kept, last = engine(recurrent, width), None
    for prompt, count, goes_on, reuse in series:
        if goes_on and last is not None:
            prompt = [*last.tokens, *prompt]
        options = {"max_tokens": count, "ignore_eos": True, "reuse_prefix": reuse}
        last = kept.generate(prompt, **options)
        fresh = engine(recurrent, width).generate(prompt, **options)
        assert last.tokens == fresh.tokens and last.text == fresh.text
        assert fresh.usage.cached_tokens == 0
        assert reuse or last.usage.cached_tokens == 0


@pytest.mark.parametrize("length", range(16, 40))
def test_a_template_that_changes_the_end_of_a_prompt_costs_little(length):
    """A recurrent state has a copy before the last 16 tokens, at most a chunk (4) before."""
    tested, prompt = engine(recurrent=True), [3, 4, 5, 6] * 10
    tested.generate(prompt[:length], max_tokens=9, ignore_eos=True)
    changed = [*prompt[: length - 15], 10, 10]
    result = tested.generate(changed, max_tokens=1)
    assert length - 16 - 4 < result.usage.cached_tokens <= length - 15
    assert result.tokens == engine().generate(changed, max_tokens=1).tokens


@pytest.mark.parametrize("recurrent", [False, True])
def test_only_new_tokens_are_computed(recurrent):
    tested = engine(recurrent)
    first = tested.generate([3, 4, 5, 6], max_tokens=5, ignore_eos=True)
    longer = [3, 4, 5, 6, *first.tokens, 7, 8]
    second = tested.generate(longer, max_tokens=1, ignore_eos=True)
    assert second.usage.cached_tokens == 8  # the fifth token was chosen, never computed
    assert second.timings.prefill_tokens == len(longer) - 8
    assert len(tested.target.states) == 1


def test_a_recurrent_state_goes_back_to_the_end_of_a_prompt():
    """A chat template that rewrites the last answer shares the prompt before it only."""
    tested = engine(recurrent=True)
    first = tested.generate([3, 4, 5, 6], max_tokens=5, ignore_eos=True)
    rest = [7 if first.tokens[1] != 7 else 8] * 4
    second = tested.generate([3, 4, 5, 6, first.tokens[0], *rest], max_tokens=1, ignore_eos=True)
    assert second.usage.cached_tokens == 4  # not 5
    third = tested.generate([3, 4, 5, 7], max_tokens=1, ignore_eos=True)
    assert third.usage.cached_tokens == 0 and len(tested.target.states) == 1


def test_the_same_prompt_again_computes_one_token():
    tested = engine()
    first = tested.generate([3, 4, 5, 6], max_tokens=5, ignore_eos=True)
    again = tested.generate([3, 4, 5, 6], max_tokens=5, ignore_eos=True)
    assert again.usage.cached_tokens == 3 and again.tokens == first.tokens


def test_reset_forgets():
    tested = engine()
    tested.generate([3, 4, 5, 6], max_tokens=5, ignore_eos=True)
    tested.reset()
    assert tested.generate([3, 4, 5, 6], max_tokens=1).usage.cached_tokens == 0
