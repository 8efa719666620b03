"""The tokenizer part of a GGUF file's metadata, checked before anything is built from it."""

import gc
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from os import PathLike
from typing import Any, Protocol, TypeVar, cast

from .errors import GGUFError, UnsupportedError
from .pretokenizers import PreTokenizer, pre_tokenizer

T = TypeVar("T")
_NOT_NORMAL = re.compile(rb"[^\x01]")


class MetadataFile(Protocol):
    """What is needed of an open model file; arrays are lists, tokens may have surrogate escapes."""

    @property
    def path(self) -> str | PathLike[str]: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _byte_characters() -> dict[int, str]:
    """GPT-2's stand-in for each byte: itself if printable, else the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(printable)]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(hidden)}


BYTE_TO_CHAR: Mapping[int, str] = _byte_characters()
CHAR_TO_BYTE: Mapping[str, int] = {c: b for b, c in BYTE_TO_CHAR.items()}


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8 (it has no half of a surrogate pair)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def without_gc() -> Iterator[None]:
    """100,000s of new small objects set off collections that find nothing and cost a third."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Vocabulary:
    """A checked vocabulary: `tokens[id]` is the file's text of a token, `types[id]` its TokenType.

    No text occurs twice. `merges` are pairs of token texts, best first; `ids` holds every
    `tokenizer.ggml.<name>_token_id`.
    """

    tokens: list[str]
    types: bytes
    merges: list[tuple[str, str]]
    pre: PreTokenizer
    ids: Mapping[str, int]
    add_bos: bool
    add_eos: bool

    def of_type(self, *types: TokenType) -> dict[str, int]:
        """Text to id of the tokens of these types."""
        others = [match.start() for match in _NOT_NORMAL.finditer(self.types)]
        if TokenType.NORMAL not in types:
            return {self.tokens[i]: i for i in others if self.types[i] in types}
        found = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        for i in others:
            if self.types[i] not in types:
                del found[self.tokens[i]]
        return found


class _Keys:
    """Typed reads of `tokenizer.ggml.*`; errors name the file, the key and what was expected."""

    def __init__(self, file: MetadataFile) -> None:
        self.path = file.path
        self.metadata = file.metadata

    def error(self, why: str) -> GGUFError:
        return GGUFError(f"{self.path}: {why}")

    def get(self, name: str, kind: type[T], default: T) -> T:
        key = f"tokenizer.ggml.{name}"
        value = self.metadata.get(key, default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(f"{key} is {type(value).__name__}, expected {kind.__name__}")
        return value

    def require(self, name: str, kind: type[T]) -> T:
        if f"tokenizer.ggml.{name}" not in self.metadata:
            raise self.error(f"tokenizer.ggml.{name} is missing: the file has no usable tokenizer")
        return self.get(name, kind, kind())

    def array(self, name: str, kind: type[T]) -> list[T]:
        """A required array whose elements all have the type `kind`."""
        key = f"tokenizer.ggml.{name}"
        value = self.metadata.get(key)
        if value is None:
            raise self.error(f"{key} is missing: the file has no usable tokenizer")
        if not isinstance(value, list):
            found = type(value).__name__
            raise self.error(f"{key} is {found}, expected an array of {kind.__name__}")
        others = set(map(type, value)) - {kind}
        if others:
            names = ", ".join(sorted(t.__name__ for t in others))
            raise self.error(f"{key} has elements of {names}, expected {kind.__name__}")
        return value


def read_vocabulary(file: MetadataFile) -> Vocabulary:
    """The vocabulary of an open model file.

    Raises: GGUFError for a missing, mistyped or contradictory entry; UnsupportedError for another
    kind of tokenizer or an unknown pre-tokenizer.
    """
    keys = _Keys(file)
    model = keys.require("model", str)
    if model != "gpt2":
        raise UnsupportedError(
            f"{file.path}: tokenizer.ggml.model = {model[:80]!r} is not supported; "
            "known: gpt2 (byte-level BPE)"
        )
    if keys.get("add_space_prefix", bool, False):
        raise UnsupportedError(
            f"{file.path}: tokenizer.ggml.add_space_prefix = true is not supported for model gpt2"
        )
    tokens = keys.array("tokens", str)
    if not tokens:
        raise keys.error("tokenizer.ggml.tokens is empty")
    if len(set(tokens)) != len(tokens):
        twice = next(text for text, count in Counter(tokens).items() if count > 1)
        raise keys.error(f"tokenizer.ggml.tokens has {twice[:80]!r} more than once")
    rule = pre_tokenizer(keys.require("pre", str))
    ids = _token_ids(keys, len(tokens))
    add_bos = keys.get("add_bos_token", bool, rule.add_bos)
    add_eos = keys.get("add_eos_token", bool, False)
    _check_needed(keys, ids, add_bos)
    types = _token_types(keys, len(tokens))
    _check_scores(keys, len(tokens))
    return Vocabulary(tokens, types, _merges(keys), rule, ids, add_bos, add_eos)


def _token_types(keys: _Keys, n_tokens: int) -> bytes:
    types = keys.array("token_type", int)
    if len(types) != n_tokens:
        raise keys.error(f"tokenizer.ggml.token_type has {len(types)} entries, not {n_tokens}")
    unknown = sorted(set(types) - set(TokenType))
    if unknown:
        raise keys.error(f"tokenizer.ggml.token_type has the value {unknown[0]}, known: 1 to 6")
    return bytes(types)


def _check_scores(keys: _Keys, n_tokens: int) -> None:
    if "tokenizer.ggml.scores" not in keys.metadata:
        return
    n_scores = len(keys.array("scores", float))
    if n_scores != n_tokens:
        raise keys.error(f"tokenizer.ggml.scores has {n_scores} entries, not {n_tokens}")


def _token_ids(keys: _Keys, n_tokens: int) -> dict[str, int]:
    prefix, suffix = "tokenizer.ggml.", "_token_id"
    ids = {}
    for key in keys.metadata:
        if key.startswith(prefix) and key.endswith(suffix):
            name = key[len(prefix) : -len(suffix)]
            ids[name] = keys.get(name + suffix, int, 0)
            if not 0 <= ids[name] < n_tokens:
                raise keys.error(
                    f"{key} = {ids[name]} is outside 0..{n_tokens - 1} (the vocabulary)"
                )
    return ids


def _check_needed(keys: _Keys, ids: Mapping[str, int], add_bos: bool) -> None:
    if "eos" not in ids:
        raise keys.error("tokenizer.ggml.eos_token_id is missing: generation could not end")
    if add_bos and "bos" not in ids:
        raise keys.error("tokenizer.ggml.bos_token_id is missing, but prompts must start with it")


def _merges(keys: _Keys) -> list[tuple[str, str]]:
    """Pairs in order of rank; of a repeated pair the first rank counts."""
    lines = list(dict.fromkeys(keys.array("merges", str)))
    with without_gc():
        pairs = [tuple(line.split(" ")) for line in lines]
    if lines and (set(map(len, pairs)) != {2} or not all(map(all, pairs))):
        bad = next(line for line, pair in zip(lines, pairs, strict=True) if not _is_pair(pair))
        raise keys.error(f"tokenizer.ggml.merges has {bad[:80]!r}, expected 'left right'")
    return cast(list[tuple[str, str]], pairs)


def _is_pair(parts: tuple[str, ...]) -> bool:
    return len(parts) == 2 and all(parts)
