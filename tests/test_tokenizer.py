"""The tokenizer beyond golden ids: faults in files and text, special tokens, streaming, speed."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import SPECIAL, FakeFile, golden, metadata, synthetic, toy

from sparkinfer.errors import GGUFError, RequestError, UnsupportedError
from sparkinfer.gguf.reader import open_gguf
from sparkinfer.gguf.writer import Typed, write_gguf
from sparkinfer.pretokenizers import PRE_TOKENIZERS
from sparkinfer.tokenizer import Tokenizer
from sparkinfer.vocabulary import BYTE_TO_CHAR

TOY = Tokenizer.from_gguf(toy(merges=("Ġ t", "h e", "Ġt he")))
FULL = {p: Tokenizer.from_gguf(synthetic(p, add_bos_token=False)) for p in ("qwen35", "llama-bpe")}


def ids_of(*texts: str) -> list[int]:
    return [TOY.vocabulary.tokens.index(text) for text in texts]


# Special tokens


def test_control_tokens_are_text_unless_asked_for() -> None:
    text = "a<|im_end|><s>[INST]b"
    assert not set(TOY.encode(text)) & set(TOY.control.values())
    expected = ids_of("a", "<|im_end|>", "<s>", "[INST]", "b")
    assert TOY.encode(text, parse_special=True) == expected
    assert TOY.decode(expected) == text
    assert TOY.decode(expected, skip_special=True) == "ab"


def test_user_defined_tokens_are_always_found_and_printed() -> None:
    assert TOY.encode("<think>") == ids_of("<think>")
    assert TOY.decode(ids_of("<think>"), skip_special=True) == "<think>"


def test_unused_tokens_are_never_made_and_add_no_text() -> None:
    (pad,) = ids_of("<pad0>")
    assert pad not in TOY.encode("<pad0>", parse_special=True)
    assert TOY.decode([pad]) == "" and TOY.is_unused(pad)


def test_of_two_tokens_that_fit_the_longer_counts() -> None:
    tokenizer = Tokenizer.from_gguf(toy({"<a>": 3, "<a><b>": 3}))
    assert len(tokenizer.encode("<a><b>", parse_special=True)) == 1


def test_text_cannot_be_merged_into_a_control_token() -> None:
    merges = ("< s", "<s >")
    tokenizer = Tokenizer.from_gguf(toy(merges=merges, pre="llama-bpe", add_bos_token=False))
    assert tokenizer.vocabulary.types[tokenizer.control["<s>"]] == 3
    assert tokenizer.decode(tokenizer.encode("<s>")) == "<s>"
    assert tokenizer.control["<s>"] not in tokenizer.encode("<s> x<s>")


def test_stop_ids_are_eos_eot_and_known_end_texts() -> None:
    assert TOY.stop_ids == {TOY.eos_id}
    extra = {"<|endoftext|>": 3, "<turn>": 3, "<|eot_id|>": 1}
    file = toy(extra)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    file.metadata["tokenizer.ggml.eot_token_id"] = tokens.index("<turn>")
    found = {tokens[i] for i in Tokenizer.from_gguf(file).stop_ids}
    assert found == {"<|im_end|>", "<|endoftext|>", "<turn>"}  # not the ordinary token <|eot_id|>


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, ["x"]),
        ("llama-bpe", {}, ["<s>", "x"]),
        ("llama-bpe", {"add_bos_token": False}, ["x"]),
        ("qwen2", {"add_bos_token": True}, ["<s>", "x"]),
        ("qwen2", {"add_eos_token": True}, ["x", "<|im_end|>"]),
    ],
)
def test_begin_and_end_tokens(pre: str, flags: dict[str, Any], expected: list[str]) -> None:
    bos = toy().metadata["tokenizer.ggml.tokens"].index("<s>")
    tokenizer = Tokenizer.from_gguf(toy(pre=pre, bos_token_id=bos, **flags))
    ids = tokenizer.encode("x")
    assert [tokenizer.vocabulary.tokens[i] for i in ids] == expected
    assert tokenizer.encode("x", add_special=False) == ids_of("x")


# Faults in the file


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": "llama"}, UnsupportedError, "'llama' is not supported"),
        ({"model": None}, GGUFError, "tokenizer.ggml.model is missing"),
        ({"model": 3}, GGUFError, "is int, expected str"),
        ({"pre": "qwen99"}, UnsupportedError, "'qwen99' is not known; known: chatglm-bpe"),
        ({"pre": None}, GGUFError, "tokenizer.ggml.pre is missing"),
        ({"tokens": []}, GGUFError, "tokens is empty"),
        ({"tokens": "abc"}, GGUFError, "is str, expected an array of str"),
        ({"tokens": ["a", 1]}, GGUFError, "has elements of int, expected str"),
        ({"token_type": None}, GGUFError, "token_type is missing"),
        ({"token_type": [1, 1]}, GGUFError, "token_type has 2 entries"),
        ({"token_type": [1.0] * 262}, GGUFError, "has elements of float, expected int"),
        ({"token_type": [7] * 262}, GGUFError, "token_type has the value 7"),
        ({"scores": [0.0]}, GGUFError, "scores has 1 entries, not 262"),
        ({"merges": None}, GGUFError, "merges is missing"),
        ({"merges": ["ab"]}, GGUFError, "merges has 'ab', expected"),
        ({"merges": ["a b c"]}, GGUFError, "merges has 'a b c', expected"),
        ({"merges": ["a b"]}, GGUFError, "'ab' is not a token"),
        ({"eos_token_id": None}, GGUFError, "eos_token_id is missing"),
        ({"eos_token_id": 262}, GGUFError, "eos_token_id = 262 is outside 0..261"),
        ({"mask_token_id": -1}, GGUFError, "mask_token_id = -1 is outside"),
        ({"eos_token_id": True}, GGUFError, "is bool, expected int"),
        ({"add_bos_token": 1}, GGUFError, "is int, expected bool"),
        ({"add_bos_token": True}, GGUFError, "bos_token_id is missing"),
        ({"add_space_prefix": True}, UnsupportedError, "add_space_prefix = true"),
    ],
)
def test_bad_metadata_is_one_clear_line(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    file = toy()
    for key, value in change.items():
        file.metadata[f"tokenizer.ggml.{key}"] = value
        if value is None:
            del file.metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(error) as caught:
        Tokenizer.from_gguf(file)
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_token_text_must_not_occur_twice() -> None:
    file = toy()
    file.metadata["tokenizer.ggml.tokens"][5] = file.metadata["tokenizer.ggml.tokens"][6]
    with pytest.raises(GGUFError, match="more than once"):
        Tokenizer.from_gguf(file)


def test_unknown_pre_tokenizer_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError) as caught:
        Tokenizer.from_gguf(toy(pre="x" * 5000))
    assert all(name in str(caught.value) for name in PRE_TOKENIZERS)
    assert len(str(caught.value)) < 1000


def test_from_a_real_file(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    file = toy(merges=("a b",), scores=[0.0] * 263)
    write_gguf(path, {"general.architecture": "llama", **file.metadata})
    with open_gguf(path) as opened:
        assert Tokenizer.from_gguf(opened).encode("ab") == Tokenizer.from_gguf(file).encode("ab")
    bad = dict(file.metadata)
    bad["tokenizer.ggml.token_type"] = Typed(bad["tokenizer.ggml.token_type"], "uint8")
    write_gguf(path, {"general.architecture": "llama", **bad})
    with pytest.raises(GGUFError, match="token_type"):
        Tokenizer.from_gguf(open_gguf(path))


def test_tokens_that_are_not_utf8_only_decode() -> None:
    file = toy({"\udcff\udcfe": 1})
    tokenizer = Tokenizer.from_gguf(file)
    token = tokenizer.vocabulary.tokens.index("\udcff\udcfe")
    assert tokenizer.token_bytes(token) == b"\xff\xfe"
    assert tokenizer.decode(tokenizer.encode("ÿþ")) == "ÿþ"


def test_byte_tokens_and_texts_outside_the_byte_alphabet() -> None:
    tokenizer = Tokenizer.from_gguf(toy({"<0xE4>": 6, "你 好": 1}))
    index = tokenizer.vocabulary.tokens.index
    assert tokenizer.token_bytes(index("<0xE4>")) == b"\xe4"
    assert tokenizer.token_bytes(index("你 好")).decode() == "你 好"


# Faults in the text


def test_half_a_surrogate_pair_is_named() -> None:
    with pytest.raises(RequestError, match=r"U\+D83D.* at character 3"):
        TOY.encode("abc\ud83d")


def test_a_byte_without_a_token_is_an_error_not_lost() -> None:
    file = toy()
    tokens = file.metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index(BYTE_TO_CHAR[0xF3])] = "something else"
    tokenizer = Tokenizer.from_gguf(file)
    with pytest.raises(RequestError, match=r"byte 0xF3 of the character U\+E0067"):
        tokenizer.encode("flag \U000e0067")


@pytest.mark.parametrize("token", [-1, 10**9])
def test_ids_outside_the_vocabulary(token: int) -> None:
    for call in (TOY.token_bytes, TOY.is_control, TOY.detokenizer().push):
        with pytest.raises(RequestError, match=rf"{token} is outside 0..26"):
            call(token)
    with pytest.raises(RequestError):
        TOY.decode([token])


# Properties

CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXTS = st.text(st.one_of(CHARACTERS, st.sampled_from(" \n\r\t'sd09<|>é中👩\u200d")), max_size=80)


@given(TEXTS, st.sampled_from(sorted(FULL)), st.booleans())
@settings(max_examples=300, deadline=None)
def test_decode_is_the_inverse_of_encode(text: str, pre: str, parse_special: bool) -> None:
    tokenizer = FULL[pre]
    ids = tokenizer.encode(text, parse_special=parse_special)
    assert tokenizer.decode(ids) == text
    if not parse_special:
        assert not any(map(tokenizer.is_control, ids))


@given(st.lists(st.integers(0, TOY.n_vocab - 1), max_size=60), st.booleans())
@settings(max_examples=500, deadline=None)
def test_pushes_and_flush_are_decode_of_the_whole(ids: list[int], skip_special: bool) -> None:
    stream = TOY.detokenizer(skip_special=skip_special)
    text = "".join(map(stream.push, ids)) + stream.flush()
    assert text == TOY.decode(ids, skip_special=skip_special)
    assert stream.flush() == ""


@given(TEXTS, st.sampled_from(sorted(FULL)))
@settings(max_examples=200, deadline=None)
def test_a_stream_never_shows_half_a_character(text: str, pre: str) -> None:
    stream = FULL[pre].detokenizer()
    shown = "".join(map(stream.push, FULL[pre].encode(text)))
    assert shown == text and stream.flush() == ""


def test_a_truncated_character_is_flushed() -> None:
    ids = TOY.encode("a👩")[:-1]
    stream = TOY.detokenizer()
    assert [stream.push(i) for i in ids] == ["a", "", "", ""]
    assert stream.flush() == "\ufffd" == TOY.decode(ids)[1:]


# Size and speed


def big_vocabulary(n_tokens: int) -> FakeFile:
    """A vocabulary of the size of Qwen's: every pair of bytes, then pairs with a third byte."""
    chars = list(BYTE_TO_CHAR.values())
    pairs = [(left, right) for left in chars for right in chars]
    triples = ((left + right, third) for third in chars for left, right in pairs)
    merges = [*pairs, *itertools.islice(triples, n_tokens - len(chars) - len(pairs))]
    texts = dict.fromkeys([*chars, *(left + right for left, right in merges)], 1) | SPECIAL
    return FakeFile(metadata(list(texts), list(texts.values()), [f"{a} {b}" for a, b in merges]))


def test_a_vocabulary_of_150k_tokens_encodes_and_decodes() -> None:
    tokenizer = Tokenizer.from_gguf(big_vocabulary(150_000))
    text = "".join(itertools.islice(itertools.cycle(golden("synthetic")["texts"]), 300))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_very_long_word_ends() -> None:
    assert len(TOY.encode("x" * 300_000)) == 300_000
