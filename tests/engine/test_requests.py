"""What a request refuses, and how it says so."""

import pytest
from toy_model import BOS, ToyTarget, ToyTokenizer, hashed_logits

from sparkinfer.engine import Engine, Request
from sparkinfer.engine.request import RequestOptions
from sparkinfer.errors import RequestError
from sparkinfer.sampling import SamplingParams

TOKENIZER = ToyTokenizer([b"a", b"b"])
PROMPT = (BOS, 3, 4)


def engine(context=64):
    return Engine(ToyTarget(hashed_logits(TOKENIZER.n_vocab), context), TOKENIZER)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": -1}, "max_tokens must be an integer from 0"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"max_tokens": 2**63}, "max_tokens must be an integer"),
        ({"max_tokens": True}, "max_tokens must be an integer"),
        ({"stop": ""}, "1 to 1024 characters, not 0"),
        ({"stop": "x" * 2**20}, "1 to 1024 characters, not 1048576"),
        ({"stop": ["x"] * 10**5}, "stop has 100000 entries; at most 16"),
        ({"stop": [3]}, "a stop string must be text, not 3"),
        ({"stop": 3}, "stop must be"),
        ({"stop_ids": [-1]}, "stop_ids has token id -1"),
        ({"stop_ids": [5]}, "stop_ids has token id 5; ids go from 0 to 4"),
        ({"stop_ids": range(10**5)}, "stop_ids has 100000 entries"),
        ({"stop_ids": 7}, "stop_ids must be"),
        ({"logprobs": 10**6}, "logprobs must be an integer from 0 to 20"),
        ({"logit_bias": {9: 1.0}}, "logit_bias has token id 9; ids go from 0 to 4"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, not 1"),
        ({"reuse_prefix": None}, "reuse_prefix must be true or false"),
        ({"sampling": {"top_k": 3}}, "sampling must be a SamplingParams"),
        ({"temprature": 1.0}, "unknown request option temprature; did you mean temperature?"),
        ({"zzz": 1}, "unknown request option zzz"),
    ],
)
def test_a_bad_option_is_refused_at_once_with_one_line(options, words):
    tested = engine()
    with pytest.raises(RequestError) as caught:
        tested.stream(PROMPT, **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert tested.target.computed == 0


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers():
    tested = engine(context=8)
    with pytest.raises(RequestError, match="prompt has 9 tokens, the context holds 8"):
        tested.generate([3] * 9)
    assert tested.generate([3] * 8).finish_reason == "context"


@pytest.mark.parametrize("many", [6, 2**31, 2**62, None])
def test_more_tokens_than_the_context_holds_are_cut_exactly_there(many):
    result = engine(context=8).generate(PROMPT, max_tokens=many, ignore_eos=True)
    assert (len(result.tokens), result.finish_reason) == (5, "context")
    assert engine(context=8).generate(PROMPT, max_tokens=5).finish_reason != "context"


@pytest.mark.parametrize("prompt", [[], [99], [-1], ["a"], [1.0], 3, None])
def test_a_bad_prompt_is_refused(prompt):
    with pytest.raises(RequestError, match="prompt"):
        engine().generate(prompt)


def test_a_request_is_used_as_it_is():
    request = Request(
        PROMPT, SamplingParams(temperature=1.0, seed=3), max_tokens=4, ignore_eos=True
    )
    assert engine().generate(request).tokens == engine().generate(request).tokens
    with pytest.raises(RequestError, match="has its options already"):
        engine().generate(request, max_tokens=5)


def test_single_fields_replace_those_of_sampling():
    base = SamplingParams(temperature=0.5, top_k=3, logit_bias={3: 1.0}, seed=1)
    made = engine().request(PROMPT, sampling=base, top_k=7).sampling
    assert made == SamplingParams(temperature=0.5, top_k=7, logit_bias={3: 1.0}, seed=1)


def test_keyword_options_cover_every_sampling_field():
    names = set(SamplingParams.__dataclass_fields__) | set(Request.__dataclass_fields__)
    assert set(RequestOptions.__annotations__) == names - {"prompt"}
