"""The tokens before the one to be chosen, with the counts that penalties need."""

from collections.abc import Sequence

import numpy as np

from sparkinfer.sampling.arrays import Ids


class TokenHistory:
    """Prompt and output of one request; `push` and `pop` are O(1).

    A decoder that judges several rows at once pushes each drafted token before the next row and
    pops what was not accepted, so every row sees the tokens before it as if they were committed.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = tuple(prompt)
        self.output: list[int] = []
        self._counts: dict[int, int] = {}
        self._fresh: dict[int, None] = {}  # output ids that the prompt does not hold, in order
        self._prompt_ids: Ids | None = None
        self._prompt_set: frozenset[int] = frozenset()

    @property
    def position(self) -> int:
        """Absolute position of the next token: the number of tokens before it."""
        return len(self.prompt) + len(self.output)

    def push(self, token: int) -> None:
        """Append one output token."""
        self.output.append(token)
        count = self._counts.get(token, 0)
        self._counts[token] = count + 1
        if count == 0 and self._prompt_ids is not None and token not in self._prompt_set:
            self._fresh[token] = None

    def pop(self, count: int = 1) -> None:
        """Forget the last `count` output tokens."""
        assert 0 <= count <= len(self.output), (count, len(self.output))
        for _ in range(count):
            token = self.output.pop()
            left = self._counts[token] - 1
            if left:
                self._counts[token] = left
            else:
                del self._counts[token]
                self._fresh.pop(token, None)

    def seen(self) -> Ids:
        """Distinct ids of prompt and output, int64 [m], each once."""
        if self._prompt_ids is None:
            self._prompt_set = frozenset(self.prompt)
            self._prompt_ids = np.array(sorted(self._prompt_set), dtype=np.int64)
            self._fresh = {token: None for token in self._counts if token not in self._prompt_set}
        fresh = np.fromiter(self._fresh, dtype=np.int64, count=len(self._fresh))
        return np.concatenate([self._prompt_ids, fresh])

    def counts(self) -> tuple[Ids, Ids]:
        """Distinct output ids and how often each occurred, both int64 [m]."""
        size = len(self._counts)
        ids = np.fromiter(self._counts, dtype=np.int64, count=size)
        return ids, np.fromiter(self._counts.values(), dtype=np.int64, count=size)
