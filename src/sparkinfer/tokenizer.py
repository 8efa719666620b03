"""Byte-level BPE from GGUF metadata, and text from tokens as they arrive."""

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import Any

from .errors import GGUFError, RequestError
from .pretokenizers import build
from .vocabulary import (
    BYTE_TO_CHAR,
    CHAR_TO_BYTE,
    MetadataFile,
    TokenType,
    Vocabulary,
    is_unicode,
    read_vocabulary,
    without_gc,
)

# Tokens that end a turn or a text in some model family, besides the file's own end-of-sequence.
END_TEXTS = frozenset(
    "<|endoftext|>\n<|end_of_text|>\n<|eot_id|>\n<|eom_id|>\n<|im_end|>\n<|end|>\n<|return|>\n"
    "<|call|>\n<end_of_turn>\n<end_of_utterance>\n<｜end▁of▁sentence｜>\n</s>\n<eos>\n<EOT>\n_<EOT>\n"
    "[EOT]\n[EOS]".splitlines()
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Text to token ids and back.

    Control tokens (`<|im_end|>`) are never found in text unless `parse_special` is set.
    User-defined tokens (`<think>`) are ordinary vocabulary with a fixed cut and are always found,
    as in training. Text is not normalised: decode(encode(x)) == x.
    """

    def __init__(self, vocabulary: Vocabulary, source: object = "tokenizer") -> None:
        """`source` names the origin in errors.

        Raises: GGUFError if the merges contradict the tokens.
        """
        self.vocabulary = vocabulary
        self.n_vocab = len(vocabulary.tokens)
        self.bos_id: int | None = vocabulary.ids.get("bos")
        self.eos_id: int = vocabulary.ids["eos"]
        self.add_bos = vocabulary.add_bos
        self.add_eos = vocabulary.add_eos
        self.control = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
        self.user_defined = vocabulary.of_type(TokenType.USER_DEFINED)
        self.stop_ids = _stop_ids(vocabulary, self.control | self.user_defined)
        self._special = _Cutter(self.control | self.user_defined)
        self._user_defined = _Cutter(self.user_defined)
        texts = _spellable(vocabulary)
        self._known_bytes = bytes(b for b, c in BYTE_TO_CHAR.items() if c in texts)
        self._bpe = _build_bpe(vocabulary, texts, source)

    @classmethod
    def from_gguf(cls, file: MetadataFile) -> "Tokenizer":
        """The tokenizer of an open model file. Raises: GGUFError, UnsupportedError."""
        return cls(read_vocabulary(file), file.path)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of `text`; `add_special` adds the begin and end tokens that the file asks for.

        Raises: RequestError for text that is not Unicode or holds a byte without a token.
        """
        _check_unicode(text)
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        for piece in self.split(text, parse_special=parse_special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                self._check_bytes(piece)
                ids += self._bpe.encode(piece, add_special_tokens=False).ids
        if add_special and self.add_eos:
            ids.append(self.eos_id)
        return ids

    def split(self, text: str, *, parse_special: bool) -> Iterator[str | int]:
        """Cut out user-defined tokens (if asked also control tokens) as ids; the rest is text."""
        return (self._special if parse_special else self._user_defined).split(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD.

        `skip_special` leaves control tokens out.
        Raises: RequestError for an id outside the vocabulary.
        """
        kept = (i for i in ids if not (skip_special and self.is_control(i)))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to the text; nothing for an unused one.

        Raises: RequestError for an id outside the vocabulary.
        """
        text, kind = self.vocabulary.tokens[self._checked(token)], self.vocabulary.types[token]
        if kind == TokenType.NORMAL:
            return _normal_bytes(text)
        if kind == TokenType.UNUSED:
            return b""
        byte = _BYTE_TOKEN.fullmatch(text) if kind == TokenType.BYTE else None
        return bytes.fromhex(byte[1]) if byte else _utf8(text)

    def is_control(self, token: int) -> bool:
        """Whether the token only steers the model. Raises: RequestError (id outside)."""
        return self.vocabulary.types[self._checked(token)] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def is_unused(self, token: int) -> bool:
        """Whether the token is padding, never to be sampled. Raises: RequestError (id outside)."""
        return self.vocabulary.types[self._checked(token)] == TokenType.UNUSED

    def detokenizer(self, *, skip_special: bool = False) -> "Detokenizer":
        """A fresh incremental decoder."""
        return Detokenizer(self, skip_special)

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.n_vocab:
            raise RequestError(
                f"token id {token} is outside 0..{self.n_vocab - 1} (the vocabulary)"
            )
        return token

    def _check_bytes(self, text: str) -> None:
        unknown = text.encode("utf-8").translate(None, self._known_bytes)
        if unknown:
            char = next(c for c in text if unknown[:1] in c.encode("utf-8"))
            raise RequestError(
                f"the model has no token for byte 0x{unknown[0]:02X} "
                f"of the character U+{ord(char):04X}; remove it from the text"
            )


class Detokenizer:
    """Text of a growing sequence of tokens: pushes and flush joined are decode() of the whole.

    A character is held back until its last byte has come.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that this token completes. Raises: RequestError (id outside)."""
        if self._skip_special and self._tokenizer.is_control(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """End of the text: U+FFFD for a character that stays incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(
            f"the text has half a surrogate pair (U+{code:04X}) at character {error.start}; "
            "give valid Unicode"
        ) from None


class _Cutter:
    """Finds the given texts in a string: leftmost first, then longest."""

    def __init__(self, ids: dict[str, int]) -> None:
        self._ids = ids
        texts = sorted(filter(None, ids), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None

    def split(self, text: str) -> Iterator[str | int]:
        pieces = self._pattern.split(text) if self._pattern else [text]
        for i, piece in enumerate(pieces):
            if piece:
                yield self._ids[piece] if i % 2 else piece


def _spellable(vocabulary: Vocabulary) -> dict[str, int]:
    """Text to id of the tokens that plain text can become; a text that is not UTF-8 is not one."""
    texts = vocabulary.of_type(TokenType.NORMAL, TokenType.USER_DEFINED)
    if is_unicode("".join(texts)):
        return texts
    return {text: token for text, token in texts.items() if is_unicode(text)}


def _stop_ids(vocabulary: Vocabulary, special: dict[str, int]) -> frozenset[int]:
    named = {vocabulary.ids[n] for n in ("eos", "eot", "eom") if n in vocabulary.ids}
    return frozenset(named | {i for text, i in special.items() if text in END_TEXTS})


def _normal_bytes(text: str) -> bytes:
    try:
        return bytes([CHAR_TO_BYTE[c] for c in text])
    except KeyError:
        return _utf8(text)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _build_bpe(vocabulary: Vocabulary, texts: dict[str, int], source: object) -> Any:
    """The library's tokenizer over `texts`, the tokens that text can become.

    A merge that would make a control or unused token is left out, so that text cannot spell one.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers.models import BPE

    ignore_merges = vocabulary.pre.ignore_merges
    with without_gc():
        try:
            model = BPE(vocab=texts, merges=vocabulary.merges, ignore_merges=ignore_merges)
        except Exception:  # the library's plain one: a merge with an unknown token
            merges = _possible_merges(vocabulary, texts, source)
            model = BPE(vocab=texts, merges=merges, ignore_merges=ignore_merges)
    library = Library(model)
    library.pre_tokenizer = build(vocabulary.pre)
    return library


def _possible_merges(
    vocabulary: Vocabulary, texts: dict[str, int], source: object
) -> list[tuple[str, str]]:
    """The merges without those that take or make a token which text cannot become."""
    barred = set(vocabulary.tokens) - texts.keys()
    kept = []
    for left, right in vocabulary.merges:
        parts = (left, right, left + right)
        missing = [text for text in parts if text not in texts]
        if not missing:
            kept.append((left, right))
        elif barred.isdisjoint(missing):
            raise GGUFError(
                f"{source}: tokenizer.ggml.merges has {left[:40]!r} + {right[:40]!r}, "
                f"but {missing[0][:80]!r} is not a token"
            )
    return kept
