"""What the target is asked while it writes its own training data: beginnings of user turns, and whole ones.

Three of ten turns are left to the model from the first word; four begin with an opener of `questions.json`, which the
model continues; the others are patterns of that file, filled at random. A pattern without closing punctuation is
continued too.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from sparkinfer.chat import ChatTemplate
from sparkinfer.errors import GGUFError, MissingFileError, RequestError
from sparkinfer.tokenizer import Tokenizer

FREE_SHARE, OPENER_SHARE = (
    0.3,
    0.4,
)  # of the turns the model writes from the first word, after an opener
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


def random_turn(rng: random.Random) -> Turn:
    """One start of a user turn."""
    kind = rng.random()
    if kind < FREE_SHARE:
        return Turn("", False, "free")
    domain = rng.choice(domains())
    if kind < FREE_SHARE + OPENER_SHARE:
        return Turn(rng.choice(_questions()["openers"][domain]), False, domain)
    text = _filled(rng.choice(_questions()["patterns"][domain]), rng)
    return Turn(text, text.endswith(_ENDS), domain)


def _filled(pattern: str, rng: random.Random) -> str:
    fill: dict[str, list[str]] = _questions()["fill"]
    numbers = {"a": (10, 400), "b": (10, 999), "c": (2, 20), "square": (2, 30)}
    values: dict[str, str] = {}
    for _, name, _, _ in Formatter().parse(pattern):
        if name is None:
            continue
        if name in numbers:
            number = rng.randint(*numbers[name])
            values[name] = str(number**2 if name == "square" else number)
        else:
            values[name] = rng.choice(fill[name])
    return pattern.format(**values)


def random_turns(count: int, seed: int, excluded: frozenset[str] = frozenset()) -> list[Turn]:
    """`count` starts; none is a whole prompt of `excluded`, the prompts kept for measuring."""
    rng = random.Random(seed)
    turns: list[Turn] = []
    while len(turns) < count:
        turn = random_turn(rng)
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
