"""Prompts by domain: the built-in ones, or those of a JSONL file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sparkinfer.errors import MissingFileError, OptionError

_MOST = 10_000  # prompts of a file
DOMAINS = ("chat", "code", "maths", "lists", "repetition", "languages")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question to a model and the kind of text its answer is."""

    domain: str
    text: str


_CHAT = (
    "Why do cats purr? Answer in a few sentences.",
    "My neighbour plays loud music at night. Write a short and friendly note to her.",
    "Explain to a child of eight how a rainbow comes about.",
    "What should I look at when I buy a used bicycle?",
)
_CODE = (
    "Write a Python function that returns the longest common prefix of a list of strings.",
    "Write a C function that reverses a singly linked list in place.",
    "Write a Python class for a stack with push, pop, peek and a docstring for each method.",
    "Write an SQL query that lists each customer with the number and the total of the orders.",
)
_MATHS = (
    "A train travels 180 km in 2 hours and 15 minutes. What is its average speed? Show the steps.",
    "Solve 3x + 7 = 2x - 5 and check the result.",
    "What is 48 times 37? Work it out step by step.",
    "A rectangle is twice as long as wide and has an area of 98. How long is it? Show the steps.",
)
_LISTS = (
    "List ten European capitals with their countries, one a line.",
    "Name the months of the year with their number of days, as a numbered list.",
    "Give a packing list for a weekend in the mountains, sorted by kind.",
    "List the planets of the solar system in order, each with one fact.",
)
_REPETITION = (
    "Write the sentence 'The quick brown fox jumps over the lazy dog.' twelve times.",
    "Count from 1 to 60, separated by commas.",
    "Repeat this text word for word: The harbour lies in the north of the town. Ships from many"
    " countries come to the harbour, and the goods of many countries lie in the halls of the"
    " harbour. In the evening the lights of the harbour can be seen from every hill of the town.",
    "Print the multiplication table of 7 from 7 x 1 to 7 x 20, one product a line.",
)
_LANGUAGE = (
    "Écris un petit texte sur une journée au bord de la mer.",
    "Erkläre in einfachen Worten, wie ein Kühlschrank funktioniert.",
    "Describe en español cómo se prepara una tortilla de patatas.",
    "Translate into Italian: We arrive on Tuesday and would like a room with a view of the lake.",
)


def builtin_prompts(count: int | None = None) -> tuple[Prompt, ...]:
    """Return the built-in prompts, domains in turn, so that the first ones cover all of them.

    Raises: OptionError if there are fewer than `count`.
    """
    columns = (_CHAT, _CODE, _MATHS, _LISTS, _REPETITION, _LANGUAGE)
    rows = zip(*columns, strict=True)
    every = [
        Prompt(domain, text) for row in rows for domain, text in zip(DOMAINS, row, strict=True)
    ]
    return _first(every, count, "there are {} built-in prompts")


def file_prompts(path: Path, count: int | None = None) -> tuple[Prompt, ...]:
    """Return the prompts of a JSONL file, {"prompt": ..., "domain": ...} a line, domains in turn.

    Without a domain a prompt belongs to "other".
    Raises: MissingFileError; OptionError with the line that is wrong.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise MissingFileError(f"cannot read the prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text at byte {error.start}") from error
    prompts = [_parsed(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not 1 <= len(prompts) <= _MOST:
        raise OptionError(f"{path} has {len(prompts)} prompts; expected 1 to {_MOST}")
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    turns = [prompt for row in zip_longest(*domains.values()) for prompt in row if prompt]
    return _first(turns, count, f"{path} has {{}} prompts")


def _first(prompts: Sequence[Prompt], count: int | None, words: str) -> tuple[Prompt, ...]:
    if count is not None and not 1 <= count <= len(prompts):
        raise OptionError(f"--prompts {count} is not accepted; {words.format(len(prompts))}")
    return tuple(prompts[:count])


def _parsed(path: Path, number: int, line: str) -> Prompt:
    expected = f'{path} line {number} is not {{"prompt": TEXT, "domain": NAME}}'
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise OptionError(f"{expected}: {error}") from error
    if not isinstance(fields, dict):
        raise OptionError(expected)
    text, domain = fields.get("prompt"), fields.get("domain", "other")
    if not (isinstance(text, str) and text and isinstance(domain, str) and domain):
        raise OptionError(expected)
    return Prompt(domain, text)
