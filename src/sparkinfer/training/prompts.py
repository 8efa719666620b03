"""What the target is asked while it writes its own training data: beginnings of user turns, and whole ones.

By default a fifth of the turns are left to the model from the first word. Half begin with an opener of
`questions.json`, which the model continues; in every second of these a word of the tokenizer's vocabulary follows the
opener, so that the questions are about twenty thousand different things. The others are patterns of that file, filled
at random, words of the vocabulary included. A pattern without closing punctuation is continued too. `shares` says how
often a domain comes up: prose is harder to foresee than sums, so there is more of it. A later turn may also ask about
the answer before it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from sparkinfer.chat import ChatTemplate
from sparkinfer.errors import GGUFError, MissingFileError, RequestError
from sparkinfer.tokenizer import Tokenizer
from sparkinfer.training.config import PATTERNS

# Of the turns: left to the model, an opener, an opener and a word; the rest (PATTERNS) are patterns.
FREE_SHARE, OPENER_SHARE, WORD_SHARE = 0.2, 0.25, 0.25
FOLLOW_UP_SHARE = 0.4  # of later turns
FALLBACK_WORDS = ("water", "a house", "the sun", "music", "paper", "time")
_WORD = re.compile(r" [a-z]{4,14}")
_ANY = ("any", "any2", "any3", "any4")  # fields that a word of the vocabulary fills
_ENDS = (".", "?", "!", "'")
_MARKS = ("QZXQ", "WVKW")  # stand for message text while a template is taken apart


@dataclass(frozen=True)
class Turn:
    """The start of a user turn; `complete` turns go to the model as they are."""

    text: str
    complete: bool
    domain: str


@dataclass(frozen=True)
class Frame:
    """The chat template, cut where messages go: token ids before the first user turn, between a user turn and its
    answer, and between an answer (its end token included) and the next user turn.
    """

    opening: tuple[int, ...]
    answer: tuple[int, ...]
    following: tuple[int, ...]
    stop_ids: frozenset[int]


def read_frame(template: ChatTemplate, tokenizer: Tokenizer) -> Frame:
    """Cut the template up. Raises GGUFError for one that does not show messages as they are."""
    one, two = _MARKS
    turns = [{"role": "user", "content": one}]
    longer = [*turns, {"role": "assistant", "content": two}, {"role": "user", "content": one}]
    opening, _, answer = template.render(turns).partition(one)
    between = template.render(longer).partition(two)[2].partition(one)[0]
    if not answer or not between:
        raise GGUFError("the chat template hides or rewrites messages: give prompts as raw text")

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special=False, parse_special=True))

    first, following = encode(opening), encode(between)
    if tokenizer.add_bos and tokenizer.bos_id is not None and first[:1] != (tokenizer.bos_id,):
        first = (tokenizer.bos_id, *first)
    if following and following[0] in tokenizer.stop_ids:
        following = following[1:]  # the answer ends with it
    return Frame(first, encode(answer), following, tokenizer.stop_ids)


@cache
def _questions() -> dict[str, Any]:
    questions: dict[str, Any] = json.loads(Path(__file__).with_name("questions.json").read_text())
    return questions


def domains() -> tuple[str, ...]:
    return tuple(_questions()["patterns"])


def _shares() -> list[int]:
    """How often each domain is asked about, in the order of `domains`."""
    shares: dict[str, int] = _questions()["shares"]
    return [shares[domain] for domain in domains()]


def vocabulary_words(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Tokens that look like a lower-case word of its own; a few are only the beginning of one."""
    texts = (tokenizer.decode([token]) for token in range(tokenizer.n_vocab))
    return tuple(text[1:] for text in texts if _WORD.fullmatch(text))


def random_turn(
    rng: random.Random, words: Sequence[str], *, later: bool = False, patterns: float = PATTERNS
) -> Turn:
    """One start of a user turn; a `later` one may follow up on an answer. `patterns`: the share of these."""
    words = words or FALLBACK_WORDS
    if later and rng.random() < FOLLOW_UP_SHARE:
        text = _filled(rng.choice(_questions()["followups"]), rng, words)
        return Turn(text, text.endswith(_ENDS), "follow-up")
    kind = rng.random()
    kind = kind * (1 - PATTERNS) / (1 - patterns) if kind < 1 - patterns else 1.0
    if kind < FREE_SHARE:
        return Turn("", False, "free")
    domain = rng.choices(domains(), _shares())[0]
    if kind < FREE_SHARE + OPENER_SHARE + WORD_SHARE:
        text = rng.choice(_questions()["openers"][domain])
        if kind >= FREE_SHARE + OPENER_SHARE:
            text = f"{text.rstrip()} {rng.choice(words)}"
        return Turn(text, False, domain)
    text = _filled(rng.choice(_questions()["patterns"][domain]), rng, words)
    return Turn(text, text.endswith(_ENDS), domain)


_NUMBERS = {
    "a": (10, 400),
    "b": (10, 999),
    "c": (2, 20),
    "d": (2, 20),
    "e": (2, 30),
    "square": (2, 30),
}


def _filled(pattern: str, rng: random.Random, words: Sequence[str]) -> str:
    """The pattern with a random value for every field; values may have fields themselves."""
    fill: dict[str, list[str]] = _questions()["fill"]
    values: dict[str, str] = {}
    for _, name, _, _ in Formatter().parse(pattern):
        if name is None or name in values:
            continue
        if name in _ANY:
            values[name] = rng.choice(words)
        elif name in _NUMBERS:
            number = rng.randint(*_NUMBERS[name])
            values[name] = str(number**2 if name == "square" else number)
        elif name in ("c2", "c3"):  # multiples of c, which stands before them
            values[name] = str(int(values["c"]) * int(name[1]))
        else:
            values[name] = _filled(rng.choice(fill[name]), rng, words)
    return pattern.format(**values)


def random_turns(
    count: int,
    seed: int,
    excluded: frozenset[str] = frozenset(),
    words: Sequence[str] = (),
    *,
    later: bool = False,
    patterns: float = PATTERNS,
) -> list[Turn]:
    """`count` starts; none is a whole prompt of `excluded`, the prompts kept for measuring."""
    rng = random.Random(seed)
    turns: list[Turn] = []
    while len(turns) < count:
        turn = random_turn(rng, words, later=later, patterns=patterns)
        if turn.text not in excluded:
            turns.append(turn)
    return turns


@dataclass(frozen=True)
class Prompt:
    """A prompt of a file, as a user wrote it."""

    text: str
    domain: str


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file with `prompt` and perhaps `domain`, or of a text file with one a line.

    Raises MissingFileError, RequestError.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise MissingFileError(f"{path}: {error.strerror}; expected a file of prompts") from error
    prompts = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise RequestError(f"{path} has no prompts: expected one a line")
    return prompts


def _prompt(path: Path, number: int, line: str) -> Prompt:
    if path.suffix != ".jsonl":
        return Prompt(line.strip(), "prompts")
    try:
        entry = json.loads(line)
        text, domain = entry["prompt"], entry.get("domain", "prompts")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(
            f'{path}, line {number}: expected {{"prompt": ..., "domain": ...}}'
        ) from None
    if not isinstance(text, str) or not text or not isinstance(domain, str):
        raise RequestError(f"{path}, line {number}: prompt and domain must be text")
    return Prompt(text, domain)
