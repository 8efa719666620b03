"""How text is cut into words before byte-pair merging, by the file's `tokenizer.ggml.pre` name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .errors import UnsupportedError

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_WORD = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_MARKED_WORD = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+"
_ASCII_SIGN_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK = (
    rf"{_ASCII_SIGN_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One cutting rule.

    `patterns` are regular expressions (Oniguruma syntax), applied in order: each one cuts every
    piece that the ones before it left; matches and what lies between them become pieces.
    `ignore_merges`: a piece that is a whole vocabulary entry becomes that token without merging.
    `add_bos`: what the absence of `tokenizer.ggml.add_bos_token` means.
    Source: the patterns of llama.cpp (llama-vocab.cpp) for the same names, checked against it.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2_RULE = PreTokenizer((_GPT2,))
_DIGIT_GPT2_RULE = PreTokenizer((r"\p{N}", _GPT2))
_QWEN2_RULE = PreTokenizer((rf"{_WORD}|\p{{N}}|{_TAIL}",))
_QWEN35_RULE = PreTokenizer(
    (rf"{_MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",)
)
_TRIPLE_RULE = PreTokenizer((rf"{_WORD}|\p{{N}}{{1,3}}|{_TAIL}",))
_LLAMA3_RULE = replace(_TRIPLE_RULE, ignore_merges=True, add_bos=True)

_RULES: tuple[tuple[PreTokenizer, str], ...] = (
    (_GPT2_RULE, "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat"),
    (_DIGIT_GPT2_RULE, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (_LLAMA3_RULE, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (_TRIPLE_RULE, "dbrx smaug-bpe chatglm-bpe"),
    (replace(_TRIPLE_RULE, ignore_merges=True), "glm4"),
    (_QWEN2_RULE, "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2"),
    (_QWEN35_RULE, "qwen35"),
    (
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
        "default",
    ),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (
        PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK)),
        "deepseek-v3 hunyuan-dense joyai-llm",
    ),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: rule for rule, names in _RULES for name in names.split()
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rule called `name` in files.

    Raises: UnsupportedError for a name without a rule; a near one would be wrong without a sign.
    """
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(f"tokenizer.ggml.pre = {name[:80]!r} is not known; known: {known}")
    return rule


def build(rule: PreTokenizer) -> Any:
    """The rule as an object of the `tokenizers` library, followed by the byte-to-character step."""
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in rule.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, byte_level])
