"""A step of k tokens ends exactly where k single steps would have ended."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import (
    BOS,
    END,
    ToyTarget,
    ToyTokenizer,
    WindowDecoder,
    hashed_logits,
    scripted_logits,
)

from sparkinfer.engine import Engine, StopMatch

# Bytes of é and of an emoji are split over tokens; "ab" and "b" overlap.
PIECES = [b"a", b"b", b"ab", b" ", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b"end", b"!"]
A, B, AB, SPACE, E1, E2, M1, M2, WORD, BANG = range(3, 13)
TOKENIZER = ToyTokenizer(PIECES)
PROMPT = (BOS, A, B)


def engines(script, width=1, offset=None, context=256):
    """An engine of single steps and one of blocks, over the same scripted model."""

    def logits():
        return scripted_logits(TOKENIZER.n_vocab, len(PROMPT), script)

    plain = Engine(ToyTarget(logits(), context), TOKENIZER)
    target = ToyTarget(logits(), context)
    block = WindowDecoder(target, width, offset)
    return plain, Engine(target, TOKENIZER, decoder=block)


def outcome(engine, **options):
    """Everything of a result that must not depend on the decoder, and the state it leaves."""
    deltas, generation = [], engine.stream(PROMPT, **options)
    for delta in generation:
        deltas.append(delta)
    result = generation.result
    assert "".join(delta.text for delta in deltas) == result.text
    assert tuple(itertools.chain(*(delta.tokens for delta in deltas))) == result.tokens
    assert tuple(itertools.chain(*(delta.logprobs for delta in deltas))) == result.logprobs
    assert result.usage.completion_tokens == len(result.tokens)
    asked = result.tokens if options.get("logprobs") is not None else ()
    assert tuple(item.token for item in result.logprobs) == asked
    assert sum(path.tokens for path in result.paths.values()) == len(result.tokens)
    state = engine.target.states[-1].tokens
    assert (
        state == [*PROMPT, *result.tokens][: max(len(PROMPT), len(PROMPT) + len(result.tokens) - 1)]
    )
    whole = TOKENIZER.detokenizer(skip_special=True)
    decoded = "".join(map(whole.push, result.tokens)) + whole.flush()
    assert decoded.startswith(result.text)
    return (
        result.text,
        result.tokens,
        result.logprobs,
        result.finish_reason,
        result.stop,
        result.usage,
    )


SCRIPT = [A, B, SPACE, E1, E2, AB, BANG, M1, M2, A, WORD, SPACE, B, A]
TEXT = "ab éab!😀aend ba"


@pytest.mark.parametrize("width", range(1, 17))
@pytest.mark.parametrize("stop_at", range(len(SCRIPT)))
def test_every_stop_id_position_at_every_block_offset(width, stop_at):
    script = [*SCRIPT[:stop_at], END, *SCRIPT[stop_at:]]
    for offset in range(1, width + 1):
        plain, block = engines(script, width, offset)
        single = outcome(plain, logprobs=1)
        assert single == outcome(block, logprobs=1)
        assert single[1] == tuple(script[: stop_at + 1])
        assert single[3:5] == ("stop", StopMatch(END))


STOPS = sorted(
    {TEXT[i:j] for i in range(len(TEXT)) for j in range(i + 1, min(i + 4, len(TEXT)) + 1)}
)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 16])
def test_every_stop_string_at_every_block_offset(width):
    for offset in range(1, width + 1):
        plain, block = engines(SCRIPT, width, offset)
        for stop in STOPS:
            single = outcome(plain, stop=stop, logprobs=0)
            assert single == outcome(block, stop=stop, logprobs=0)
            assert single[0] == TEXT[: TEXT.index(stop)]
            assert single[3:5] == ("stop", StopMatch(text=stop))
            before, last = TOKENIZER.decode(single[1][:-1]), TOKENIZER.decode(single[1])
            assert stop in last and stop not in before, "the last token completes it"


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("count", range(len(SCRIPT) + 3))
def test_every_length_limit_at_every_block_offset(width, count):
    for offset in range(1, width + 1):
        plain, block = engines(SCRIPT, width, offset)
        single = outcome(plain, max_tokens=count)
        assert single == outcome(block, max_tokens=count)
        assert len(single[1]) == min(count, len(SCRIPT) + 1)
        assert single[3] == ("length" if count <= len(SCRIPT) else "stop")
        if count == len(SCRIPT):
            assert single[0] == TEXT


@pytest.mark.parametrize("width", [1, 2, 5, 16])
@pytest.mark.parametrize("room", range(6))
def test_the_context_is_filled_exactly(width, room):
    plain, block = engines([A] * 20, width, context=len(PROMPT) + room)
    single = outcome(plain)
    assert single == outcome(block)
    assert len(single[1]) == room and single[3] == "context"


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 16),
    st.integers(1, 16),
    st.lists(
        st.sampled_from(["a", "ab", "ba", "b a", "é", "😀", "end", "!", " ", "aa"]), max_size=3
    ),
    st.integers(0, 30),
    st.integers(0, 6),
    st.sampled_from([0.0, 0.7, 1.5]),
    st.integers(0, 2**32),
    st.sampled_from([1.0, 1.3]),
    st.booleans(),
)
def test_any_request_over_any_blocks_equals_single_steps(
    width, offset, stops, limit, min_tokens, temperature, seed, penalty, ignore_eos
):
    results = []
    for decoder in (None, WindowDecoder):
        target = ToyTarget(hashed_logits(TOKENIZER.n_vocab), context=28)
        made = decoder(target, width, min(offset, width)) if decoder else None
        results.append(
            outcome(
                Engine(target, TOKENIZER, decoder=made),
                stop=stops,
                max_tokens=limit,
                min_tokens=min(min_tokens, limit),
                temperature=temperature,
                seed=seed,
                repetition_penalty=penalty,
                frequency_penalty=0.2,
                ignore_eos=ignore_eos,
                logprobs=2,
            )
        )
    assert results[0] == results[1]


def test_two_stops_in_one_block_the_earliest_wins():
    for stops, text, match in [
        (["end", "!"], "ab éab", "!"),
        (["😀", "é"], "ab ", "é"),
        (["end", "a"], "", "a"),
    ]:
        _, block = engines(SCRIPT, 16)
        result = block.generate(PROMPT, stop=stops)
        assert (result.text, result.stop) == (text, StopMatch(text=match))


def test_a_stop_string_before_a_stop_id_and_a_limit_in_one_block_wins():
    _, block = engines([A, BANG, END, A], 4)
    result = block.generate(PROMPT, stop="!", max_tokens=4)
    assert (result.text, result.tokens, result.finish_reason) == ("a", (A, BANG), "stop")
    result = block.generate(PROMPT, stop="b", max_tokens=4)
    assert (result.tokens, result.stop) == ((A, BANG, END), StopMatch(END))


def test_a_stop_string_does_not_begin_in_the_prompt():
    plain, _ = engines([B, A, END])
    assert plain.generate((BOS, A, A), stop="ab").text == "ba"


def test_a_stop_string_that_is_a_control_token_ends_by_its_id():
    plain, _ = engines([A, 2, B])  # <turn> is no end-of-generation id and has no text
    result = plain.generate(PROMPT, stop="<turn>")
    assert (result.text, result.tokens, result.stop) == ("a", (A, 2), StopMatch(2, "<turn>"))
    assert plain.generate(PROMPT).text == "ab"


def test_extra_stop_ids_and_ignore_eos():
    plain, _ = engines([A, END, B, BANG, A])
    assert plain.generate(PROMPT).tokens == (A, END)
    assert plain.generate(PROMPT, stop_ids=[A]).tokens == (A,)
    result = plain.generate(PROMPT, ignore_eos=True, stop_ids=[BANG])
    assert (result.text, result.tokens) == ("ab", (A, END, B, BANG))
    result = plain.generate(PROMPT, ignore_eos=True, max_tokens=50)
    assert len(result.tokens) == 50 and result.finish_reason == "length"


def test_text_that_stops_inside_a_character_ends_in_one_replacement():
    plain, block = engines([A, M1, M2, M1], 4)
    for engine in (plain, block):
        pieces = [str(delta) for delta in engine.stream(PROMPT, max_tokens=4)]
        assert "".join(pieces) == "a😀\ufffd"
        assert "\ufffd" not in "".join(pieces)[:-1]


def test_min_tokens_keeps_stop_strings_out_of_the_first_tokens():
    plain, block = engines([A, BANG, A, BANG, A], 3)
    for engine in (plain, block):
        result = engine.generate(PROMPT, stop="!", min_tokens=2)
        assert (result.text, result.tokens) == ("a!a", (A, BANG, A, BANG))


def test_steps_are_counted_by_path():
    _, block = engines([A] * 9, 4)
    result = block.generate(PROMPT)
    assert list(result.paths) == ["prefill", "window/graph"]
    count = result.paths["window/graph"]
    assert (count.steps, count.rows, count.tokens) == (3, 12, 9)
    assert (count.drafted, count.accepted) == (9, 9)
    assert block.decoder.thrown_away == 3
