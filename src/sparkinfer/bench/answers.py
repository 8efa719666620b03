"""Answers of one engine through different decoders, all over the same state, none profiting from another's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sparkinfer.bench.prompts import Prompt
from sparkinfer.decoding import PREFILL_PATH, Decoder
from sparkinfer.engine import Engine, PathCount, Result

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Side:
    """One way to decode. `prepare` is called before each answer with the prompt's number."""

    name: str
    decoder: Decoder
    depth: int = 0  # drafted tokens a step; 0 if the decoder chooses them
    prepare: Callable[[int], None] | None = None


def encode(engine: Engine, prompt: Prompt) -> list[int]:
    """Return the prompt's tokens: as a chat where the model has a template, else as plain text."""
    if engine.template is None:
        return engine.tokenizer.encode(prompt.text)
    return engine.encode_chat([{"role": "user", "content": prompt.text}])


def answer(
    engine: Engine, side: Side, prompt: Sequence[int], number: int, **options: Any
) -> Result:
    """Return a side's answer to prompt `number`, computed from its first token.

    Raises: as `Engine.generate`.
    """
    before = engine.decoder
    if side.prepare is not None:
        side.prepare(number)
    engine.decoder = side.decoder
    try:
        return engine.generate(prompt, **{"reuse_prefix": False, **options})
    finally:
        engine.decoder = before


def decoding_steps(result: Result) -> PathCount:
    """Return the sum over all steps after the prompt's own token."""
    total = PathCount()
    for path, count in result.paths.items():
        if path.partition("/")[0] != PREFILL_PATH:
            merge(total, count)
    return total


def merge(total: PathCount, more: PathCount) -> None:
    """Add the counts of `more` to `total`."""
    for item in fields(PathCount):
        setattr(total, item.name, getattr(total, item.name) + getattr(more, item.name))


def tokens_a_step(steps: PathCount) -> float | None:
    """Return the mean of accepted + 1 over decoding steps, plain ones included; None without any.

    A step that the end of the output cut counts in full.
    """
    return (steps.steps + steps.accepted) / steps.steps if steps.steps else None
