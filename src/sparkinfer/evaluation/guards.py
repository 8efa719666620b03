"""Guards: plain decode and prefill speed at every context of the scope, which a change may not lower."""

import random
from collections.abc import Sequence

from sparkinfer.evaluation.record import Guard
from sparkinfer.evaluation.tasks import Task

GUARD_TOKENS = 48  # decoded at each context
_NOUNS = (
    "river garden winter letter window captain market teacher mountain harbour engine violin doctor"
    " forest kitchen island painter bridge lantern orchard station village soldier mirror valley"
)
_VERBS = "watched followed described carried repaired remembered painted sold measured lost"
_ADJECTIVES = "old quiet narrow bright heavy famous broken distant green early strange calm"


def context_text(seed: int, words: int) -> str:
    """Return at least `words` words: sentences that are drawn anew each, so that no stretch is a copy of another."""
    draw = random.Random(f"context:{seed}")
    nouns, verbs, adjectives = (text.split() for text in (_NOUNS, _VERBS, _ADJECTIVES))
    parts: list[str] = []
    count = 0
    while count < words:
        sentence = (
            f"In the {draw.choice(adjectives)} {draw.choice(nouns)} the {draw.choice(nouns)}"
            f" {draw.choice(verbs)} {draw.randrange(2, 99)} {draw.choice(adjectives)}"
            f" things near the {draw.choice(nouns)} of the {draw.choice(nouns)}."
        )
        parts.append(sentence)
        count += len(sentence.split())
    return " ".join(parts)


def guard_tasks(guard: Guard, ids: Sequence[int]) -> list[Task]:
    """Return a guard's requests; `ids` are at least as many tokens as its longest context."""
    return [
        Task(
            f"guard/{guard.model}/{context}",
            guard.cell(context),
            tuple(ids[:context]),
            GUARD_TOKENS,
            speculate=False,
            guard=True,
        )
        for context in guard.contexts
    ]
