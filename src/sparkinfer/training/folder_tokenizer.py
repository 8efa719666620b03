"""tokenizer.json of a model folder under GGUF's keys.

Only byte-level BPE is there, as in GGUF files. A folder does not name its cutting rule as a GGUF file does: it is the
known rule that cuts probing texts alike, and the finished tokenizer must give the folder's own ids for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparkinfer.errors import GGUFError, UnsupportedError
from sparkinfer.pretokenizers import PRE_TOKENIZERS, build
from sparkinfer.tokenizer import Tokenizer
from sparkinfer.training.folder_config import read_json
from sparkinfer.vocabulary import TokenType

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
PROBES = (
    "Hello, world! It's 5 o'clock; we've had 12,345.678 visitors (in 2024).",
    "  two  spaces\tand a tab\n\nnew\r\nline   \n   end  ",
    "I'll DON'T can't WE'RE 'twas rock'n'roll",
    "def f(x):\n    return x**2 + 10  # comment\n\n\n\tif a != b: print('\\n')",
    "Überraschung Ελληνικά русский язык 中文字符 日本語かな 한국어 العربية हिन्दी",
    "e-mail@example.com https://a.b/c?d=e&f=100% $3.50 a_b __init__ 1st 22nd 333rd 4444",
    "😀 🚀🚀 … — “quoted” ‘single’ ½ ² ٣ ５",
    "<html><b>x</b></html> {\"a\": [1, 2, 3]} ``` ~~~ ^^^ |||",
    "\u0301 a\u0328 x\u00a0y \u3000 z",
)  # fmt: skip


def tokenizer_metadata(folder: Path, n_vocab: int) -> dict[str, Any]:
    """GGUF's keys of the tokenizer and the chat template, for a model of `n_vocab` tokens.

    Raises: MissingFileError, GGUFError for a damaged file, UnsupportedError for another kind of tokenizer.
    """
    path = folder / TOKENIZER
    stored = read_json(path)
    settings_path = folder / SETTINGS
    settings = read_json(settings_path) if settings_path.is_file() else {}
    _check_kind(path, stored)
    texts, types = _tokens(path, stored, n_vocab)
    library = _library(path)
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": _rule(path, library, bool(stored["model"].get("ignore_merges", False))),
        "tokens": texts,
        "token_type": types,
        "merges": [_merge(path, pair) for pair in stored["model"].get("merges", [])],
        **_special(folder, texts, settings),
    }
    first = library.encode("a").ids
    plain = library.encode("a", add_special_tokens=False).ids
    values["add_bos_token"] = "bos_token_id" in values and first[:1] == [values["bos_token_id"]]
    values["add_eos_token"] = len(first) > len(plain) and first[-1:] == [values["eos_token_id"]]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    template = _template(folder, settings)
    return metadata | ({"tokenizer.chat_template": template} if template else {})


def check_same_ids(folder: Path, tokenizer: Tokenizer) -> None:
    """Raises UnsupportedError where the folder's own tokenizer gives other ids for the probing texts."""
    library = _library(folder / TOKENIZER)
    for text in PROBES:
        text = library.normalizer.normalize_str(text) if library.normalizer else text
        wanted = library.encode(text, add_special_tokens=False).ids
        if wanted != tokenizer.encode(text, add_special=False):
            raise UnsupportedError(
                f"{folder / TOKENIZER} gives other ids than the tokenizer built from it, for {text[:24]!r}"
            )


def _check_kind(path: Path, stored: dict[str, Any]) -> None:
    model = stored.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise GGUFError(f"{path} has no vocabulary")
    byte_level = "ByteLevel" in json.dumps(stored.get("pre_tokenizer"))
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback") or not byte_level:
        kind = model.get("type", "BPE")
        raise UnsupportedError(
            f"{path} is no byte-level BPE (its kind: {kind}), which is the only kind supported"
        )
    normalizer = stored.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise UnsupportedError(
            f"{path} normalises text by {normalizer.get('type')}; accepted: nothing or NFC"
        )


def _tokens(path: Path, stored: dict[str, Any], n_vocab: int) -> tuple[list[str], list[int]]:
    """Text and type of every id; ids without a token are unused."""
    texts = [f"[PAD{number}]" for number in range(n_vocab)]
    types = [int(TokenType.UNUSED)] * n_vocab

    def put(token: object, text: object, kind: TokenType) -> None:
        if type(token) is not int or not isinstance(text, str) or not 0 <= token < n_vocab:
            raise GGUFError(
                f"{path}: token {text!r:.40} has id {token!r}, outside 0..{n_vocab - 1}"
            )
        texts[token], types[token] = text, int(kind)

    for text, token in stored["model"]["vocab"].items():
        put(token, text, TokenType.NORMAL)
    for added in stored.get("added_tokens") or []:
        kind = TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
        put(added.get("id"), added.get("content"), kind)
    return texts, types


def _merge(path: Path, pair: object) -> str:
    """`left right`: files have either the line or the pair."""
    if isinstance(pair, list) and len(pair) == 2:
        return " ".join(pair)
    if not isinstance(pair, str):
        raise GGUFError(f"{path}: the merge {pair!r:.40} is neither a line nor a pair")
    return pair


def _library(path: Path) -> Any:
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_file(str(path))
    except Exception as error:  # the library's plain one
        raise GGUFError(f"{path} cannot be read: {error}") from None


def _rule(path: Path, library: Any, ignore_merges: bool) -> str:
    """The name of the rule that cuts the probing texts as the folder's tokenizer does."""

    def pieces(cutter: Any) -> list[list[str]]:
        return [[text for text, _ in cutter.pre_tokenize_str(probe)] for probe in PROBES]

    wanted = pieces(library.pre_tokenizer)
    for name, rule in PRE_TOKENIZERS.items():
        if rule.ignore_merges == ignore_merges and pieces(build(rule)) == wanted:
            return name
    raise UnsupportedError(f"{path} cuts text before merging as none of the known rules does")


def _special(folder: Path, texts: list[str], settings: dict[str, Any]) -> dict[str, int]:
    """Ids of the tokens that begin and end a text, as the tokenizer's settings or the configuration name them."""
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    config = {**config, **(inner if isinstance(inner, dict) else {})}
    places = {text: token for token, text in enumerate(texts)}
    found: dict[str, int] = {}
    for name in ("bos", "eos"):
        text = settings.get(f"{name}_token")
        text = text.get("content") if isinstance(text, dict) else text
        token = places.get(text) if isinstance(text, str) else config.get(f"{name}_token_id")
        token = token[0] if isinstance(token, list) and token else token
        if type(token) is int and 0 <= token < len(texts):
            found[f"{name}_token_id"] = token
    if "eos_token_id" not in found:
        raise GGUFError(f"{folder}: neither {SETTINGS} nor config.json names an end token (eos)")
    return found


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / TEMPLATE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {each.get("name"): each.get("template") for each in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
