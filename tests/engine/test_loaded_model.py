"""Engine over real (tiny) model files, against a loop over whole prefixes of the same target."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from toy_model import WindowDecoder

from sparkinfer import Engine
from sparkinfer.errors import MissingFileError, RequestError

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
FILES = (
    "llama-tiny-F32.gguf",
    "qwen3-tiny-Q8_0.gguf",
    "qwen35-tiny-F32.gguf",
    "qwen35moe-tiny-F32.gguf",
)
PROMPT = [5, 6, 7, 8, 9, 10, 11]
FREE = {"ignore_eos": True, "max_tokens": 10}


@pytest.fixture(
    scope="module",
    params=[*((file, "f16") for file in FILES), (FILES[1], "q8_0"), (FILES[2], "q8_0")],
    ids="-".join,
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    file, cache = request.param
    with Engine.load(GOLDEN / file, context=96, threads=2, kv_cache=cache) as loaded:
        assert loaded.plan["cache"] == {"f16": "float16"}.get(cache, cache)
        yield loaded


def greedy(engine, prompt, count):
    """Every token from the prompt's whole prefix in a state of its own."""
    tokens = list(prompt)
    for _ in range(count):
        row = engine.target.forward(engine.target.new_state(), tokens)[0]
        tokens.append(int(row[: engine.tokenizer.n_vocab].argmax()))
    return tuple(tokens[len(prompt) :])


def test_greedy_output_is_that_of_whole_prefixes(engine):
    result = engine.generate(PROMPT, **FREE, logprobs=1)
    assert result.tokens == greedy(engine, PROMPT, 10)
    assert all(item.top[0][0] == item.token for item in result.logprobs)
    assert result.text == engine.tokenizer.decode(result.tokens, skip_special=True)
    assert list(result.paths) == ["prefill", "ar/graph"]


@pytest.mark.parametrize("width", [2, 5, 16])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 4, "presence_penalty": 0.5}])
def test_verified_windows_give_the_bits_of_single_steps(engine, width, options):
    """Tokens, text, log-probabilities, reason and usage, whatever is drafted."""
    options = {"max_tokens": 40, "logprobs": 3, "reuse_prefix": False, **options}
    plain = engine.generate(PROMPT, **options)
    for accuracy in (0.0, 0.7, 1.0):
        rng = np.random.default_rng(width)

        def draft(decoder, count, rng=rng, accuracy=accuracy):
            done = len(decoder.history.output)
            right = [*plain.tokens, *[0] * 16][done : done + count]
            return [t if rng.random() < accuracy else int(rng.integers(256)) for t in right]

        decoder = WindowDecoder(engine.target, width, draft=draft)
        result = Engine(engine.target, engine.tokenizer, decoder=decoder).generate(
            PROMPT, **options
        )
        for part in ("tokens", "text", "logprobs", "finish_reason", "stop", "usage"):
            assert getattr(result, part) == getattr(plain, part)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 4}])
def test_a_kept_prefix_changes_nothing(engine, options):
    first = engine.generate(PROMPT, **FREE, **options)
    prompts = [
        [*PROMPT, *first.tokens, 20, 21, 22],
        PROMPT,
        [*PROMPT, first.tokens[0], 30, 31],
        [40, 41],
    ]
    for prompt in prompts:
        kept = engine.generate(prompt, **FREE, **options)
        fresh = engine.generate(prompt, **FREE, **options, reuse_prefix=False)
        assert kept.tokens == fresh.tokens
        assert fresh.usage.cached_tokens == 0
        engine.generate(PROMPT, **FREE, **options)


def test_the_context_is_filled_to_its_last_token(engine):
    result = engine.generate([5] * 90, ignore_eos=True)
    assert (len(result.tokens), result.finish_reason) == (6, "context")
    with pytest.raises(RequestError, match="prompt has 97 tokens, the context holds 96"):
        engine.generate([5] * 97)


def test_a_file_that_is_missing_is_named():
    with pytest.raises(MissingFileError, match=r"none\.gguf"):
        Engine.load("none.gguf")
