"""The public calls: generate, stream, chat, conversation; results, timings, seeds."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from toy_model import (
    BOS,
    TURN,
    ToyTarget,
    ToyTemplate,
    ToyTokenizer,
    WindowDecoder,
    hashed_logits,
    scripted_logits,
)

import sparkinfer
from sparkinfer.engine import Engine
from sparkinfer.errors import ModelOutputError, RequestError

TOKENIZER = ToyTokenizer([bytes([c]) for c in b"abcdefghij "])
TEMPLATE = ToyTemplate(TOKENIZER)
FREE = {"ignore_eos": True, "max_tokens": 12}


def engine(context=128, template=TEMPLATE, **more):
    return Engine(ToyTarget(hashed_logits(TOKENIZER.n_vocab), context, **more), TOKENIZER, template)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}, {"top_k": 2, "seed": 0}])
def test_streamed_pieces_joined_are_the_text(options):
    tested = engine()
    stream = tested.stream("abc", **FREE, **options)
    text = "".join(str(delta) for delta in stream)
    assert text == stream.result.text == tested.generate("abc", **FREE, **options).text
    assert text == engine().generate("abc", **FREE, **options, reuse_prefix=False).text


def test_a_prompt_of_text_is_encoded_and_control_text_in_it_is_not_parsed():
    assert engine().request("a").prompt == (BOS, 3)
    assert TURN not in engine().request("<turn>a").prompt


def test_same_seed_same_tokens_and_a_drawn_seed_is_reported():
    first = engine().generate("abc", temperature=1.5, **FREE)
    again = engine().generate("abc", temperature=1.5, seed=first.seed, **FREE)
    other = engine().generate("abc", temperature=1.5, **FREE)
    assert first.tokens == again.tokens != other.tokens
    assert first.seed != other.seed


def test_result_counts_and_timings_agree():
    result = engine().generate("abc", logprobs=2, **FREE)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (4, 12)
    assert result.usage.total_tokens == 16 and result.usage.cached_tokens == 0
    times = result.timings
    assert (times.prefill_tokens, times.decode_tokens) == (4, 11)
    assert 0 < times.prefill_s <= times.ttft_s < times.total_s
    assert times.decode_s == pytest.approx(times.total_s - times.ttft_s)
    assert times.tpot_s == pytest.approx(1 / times.decode_tok_s)
    assert times.prefill_tok_s == pytest.approx(4 / times.prefill_s)
    assert {name: (p.steps, p.rows, p.tokens) for name, p in result.paths.items()} == {
        "prefill": (1, 0, 1),
        "ar": (11, 11, 11),
    }
    record = json.loads(json.dumps(result.to_dict()))
    assert record["usage"]["total_tokens"] == 16 and record["timings"]["tpot_s"] == times.tpot_s
    assert record["paths"]["ar"]["steps"] == 11 and record["finish_reason"] == "length"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_rates_of_very_short_outputs_are_numbers(count):
    result = engine().generate("abc", max_tokens=count, ignore_eos=True)
    assert len(result.tokens) == count and result.finish_reason == "length"
    assert result.timings.decode_tokens == max(0, count - 1)
    assert json.dumps(result.to_dict())


def test_a_slow_consumer_is_not_counted():
    stream = engine().stream("abc", **FREE)
    for _ in stream:
        threading.Event().wait(0.01)
    assert stream.result.timings.total_s < 0.1


def test_progress_follows_the_prompt():
    seen = []
    engine().generate("abcdefghi", max_tokens=1, progress=lambda *count: seen.append(count))
    assert seen == [(4, 10), (8, 10), (10, 10)]


def test_padding_ids_of_the_vocabulary_are_never_chosen():
    tokenizer = ToyTokenizer([b"a"], unused=3)
    target = ToyTarget(lambda tokens: np.arange(tokenizer.n_vocab, dtype=np.float32))
    assert Engine(target, tokenizer).generate([3], max_tokens=3).tokens == (3, 3, 3)


def test_a_model_failure_is_raised_and_the_next_request_starts_afresh():
    tested = engine()
    good, target = tested.target.logits, tested.target

    def bad(tokens):
        return good(tokens) * np.float32(np.nan if len(tokens) == 8 else 1)

    expected = engine().generate("abc", **FREE).tokens
    target.logits = bad
    stream = tested.stream("abc", **FREE)
    with pytest.raises(ModelOutputError, match="position 8"):
        list(stream)
    with pytest.raises(ModelOutputError):
        _ = stream.result
    target.logits = good
    result = tested.generate("abc", **FREE)
    assert result.tokens == expected and result.usage.cached_tokens == 0


# --- chat --------------------------------------------------------------------------------------


def test_chat_encodes_messages_with_the_template():
    messages = [{"role": "user", "content": "abc"}]
    result = engine().chat(messages, **FREE)
    assert result.text == engine().generate([BOS, TURN, 3, 4, 5, TURN], **FREE).text
    assert result.text == "".join(map(str, engine().stream_chat(messages, **FREE)))


def test_chat_without_a_template_says_so():
    with pytest.raises(RequestError, match="no chat template"):
        engine(template=None).chat([{"role": "user", "content": "a"}])


def test_a_conversation_remembers_and_computes_only_what_is_new():
    tested = engine()
    chat = tested.conversation("cd", **FREE)
    first = chat.send("ab").result
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[2]["content"] == first.text
    rows = tested.target.computed
    second = chat.send("ef", max_tokens=3).result
    new = second.usage.prompt_tokens - second.usage.cached_tokens
    assert tested.target.computed - rows == new + 3 - 1
    assert second.timings.prefill_tokens == new
    fresh = engine().chat([*chat.messages[:3], {"role": "user", "content": "ef"}], **FREE)
    assert fresh.tokens[:3] == second.tokens
    chat.clear()
    assert [message["role"] for message in chat.messages] == ["system"]


def test_a_failed_turn_leaves_the_conversation_as_it_was():
    chat = engine(context=20).conversation(**FREE)
    chat.send("ab", max_tokens=4).result  # noqa: B018
    before = list(chat.messages)
    with pytest.raises(RequestError, match="context holds 20"):
        chat.send("a" * 30)
    assert chat.messages == before


def test_closing_an_engine_closes_its_parts():
    template = ToyTemplate(TOKENIZER)
    with engine(template=template) as tested:
        tested.generate("a", max_tokens=1)
    assert tested.target.closed and template.closed


def test_the_plan_names_the_decoder():
    target = ToyTarget(scripted_logits(14, 1, []))
    assert Engine(target, TOKENIZER).plan == {"isa": "toy", "decoder": "ar"}
    block = Engine(target, TOKENIZER, decoder=WindowDecoder(target, 4))
    assert block.plan["decoder"] == "window"


# --- the package ---------------------------------------------------------------------------------


def test_public_names_are_imported_on_first_use():
    code = (
        "import sys; import sparkinfer; "
        "print(sorted({'numpy', 'numba', 'jinja2', 'tokenizers'} & set(sys.modules))); "
        "sparkinfer.Engine; sparkinfer.SamplingParams"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]"]


def test_public_names_are_listed_and_an_unknown_one_is_an_attribute_error():
    assert set(sparkinfer.__all__) == set(dir(sparkinfer))
    assert sparkinfer.Engine is Engine
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = sparkinfer.Engin
