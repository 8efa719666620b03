"""A small deterministic language model, its tokenizer and a decoder of several tokens a step."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sparkinfer.decoding import StepResult
from sparkinfer.errors import RequestError
from sparkinfer.sampling import Choice, Sampler, TokenHistory
from sparkinfer.tokenizer import Detokenizer

CONTROL = ("<s>", "<end>", "<turn>")
BOS, END, TURN = range(3)


class ToyTokenizer:
    """Control ids 0..2, then one id per given byte string; encodes the longest one first."""

    def __init__(self, pieces: Sequence[bytes], unused: int = 0) -> None:
        self.pieces = [text.encode() for text in CONTROL] + list(pieces) + [b""] * unused
        self.n_vocab = len(self.pieces)
        self.stop_ids = frozenset({END})
        self._unused = range(self.n_vocab - unused, self.n_vocab)
        texts = sorted((p for p in self.pieces[3:] if p), key=len, reverse=True)
        self._split = re.compile(b"|".join(map(re.escape, texts)))
        self._control = re.compile("|".join(map(re.escape, CONTROL)))

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        ids = [BOS] if add_special else []
        if parse_special and self._control.fullmatch(text):
            return [*ids, CONTROL.index(text)]
        return ids + [self.pieces.index(p, 3) for p in self._split.findall(text.encode())]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids if i > 2).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def is_control(self, token: int) -> bool:
        return token < len(CONTROL)

    def is_unused(self, token: int) -> bool:
        return token in self._unused

    def detokenizer(self, *, skip_special: bool = False) -> Detokenizer:
        return Detokenizer(self, skip_special)  # type: ignore[arg-type]


class ToyTemplate:
    """<turn>content for each message, <turn> at the end to ask for the next."""

    def __init__(self, tokenizer: ToyTokenizer) -> None:
        self.tokenizer = tokenizer
        self.closed = False

    def encode(
        self, messages: Sequence[Mapping[str, str]], *, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        ids = [BOS]
        for message in messages:
            ids += [TURN, *self.tokenizer.encode(message["content"], add_special=False)]
        return [*ids, TURN]

    def close(self) -> None:
        self.closed = True


class ToySequence:
    """Tokens only. With `recurrent` it goes back to snapshots and to nothing else for free."""

    def __init__(self, context: int, recurrent: bool = False) -> None:
        self.context = context
        self.tokens: list[int] = []
        self.recurrent = True if recurrent else None
        self.pending: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def snapshot(self) -> Any:
        return list(self.tokens)

    def restore(self, snapshot: Any) -> None:
        self.tokens = list(snapshot)

    def commit(self, count: int) -> None:
        assert 1 <= count <= len(self.pending)
        self.tokens += self.pending[:count]
        self.pending = []

    def rewind(self, n: int) -> None:
        assert not self.recurrent or n == self.length, "a rewind that computes tokens again"
        assert 0 <= n <= self.length
        del self.tokens[self.length - n :]


def hashed_logits(n_vocab: int) -> Callable[[Sequence[int]], np.ndarray]:
    """Logits that depend on every token before: a state error anywhere changes what follows."""

    def logits(tokens: Sequence[int]) -> np.ndarray:
        key = 0
        for token in tokens:
            key = (key * 1_000_003 + token + 1) % 2**61
        row = np.random.default_rng(key).standard_normal(n_vocab) * 2
        return row.astype(np.float32)

    return logits


def scripted_logits(n_vocab: int, start: int, script: Sequence[int]) -> Callable[..., np.ndarray]:
    """Logits that make greedy decoding emit `script` after a prompt of `start` tokens, then END."""

    def logits(tokens: Sequence[int]) -> np.ndarray:
        row = np.zeros(n_vocab, dtype=np.float32)
        index = len(tokens) - start
        row[script[index] if 0 <= index < len(script) else END] = 9.0
        return row

    return logits


class ToyTarget:
    """A target over a function from all tokens so far to the next token's logits."""

    def __init__(
        self,
        logits: Callable[[Sequence[int]], np.ndarray],
        context: int = 256,
        *,
        recurrent: bool = False,
        chunk: int = 4,
    ) -> None:
        self.logits = logits
        self.context = context
        self.recurrent = recurrent
        self.chunk = chunk
        self.computed = 0  # rows, prompt included
        self.max_width = 16
        self.taps: tuple[int, ...] = ()
        self.states: list[ToySequence] = []
        self.before_forward: Callable[[], None] = lambda: None
        self.closed = False

    @property
    def plan(self) -> dict[str, Any]:
        return {"isa": "toy"}

    def new_state(self) -> ToySequence:
        self.states.append(ToySequence(self.context, self.recurrent))
        return self.states[-1]

    def forward(
        self, state: ToySequence, tokens: Sequence[int], *, rows: str = "last", verify: bool = False
    ) -> np.ndarray:
        if state.length + len(tokens) > state.context:
            raise RequestError(f"{state.length} + {len(tokens)} tokens > context {state.context}")
        self.before_forward()
        self.computed += len(tokens)
        whole = [*state.tokens, *tokens]
        if verify:
            state.pending = list(tokens)
        else:
            state.tokens, state.pending = whole, []
        if rows == "none":
            return np.empty((0, 0), np.float32)
        first = len(whole) if rows == "last" else len(whole) - len(tokens) + 1
        return np.stack([self.logits(whole[:end]) for end in range(first, len(whole) + 1)])

    def prefill(
        self, state: ToySequence, tokens: Sequence[int], progress: Any = None
    ) -> np.ndarray:
        assert tokens, "nothing to prefill"
        for start in range(0, len(tokens), self.chunk):
            row = self.forward(state, tokens[start : start + self.chunk])[0]
            if progress:
                progress(min(start + self.chunk, len(tokens)), len(tokens))
        return row

    def set_taps(self, layers: Sequence[int]) -> None:
        self.taps = tuple(layers)

    def tapped(self, rows: int) -> np.ndarray:
        """One feature a row: the number of rows computed so far."""
        return np.full((rows, len(self.taps)), self.computed, np.float32)

    def feature_rows(self, rows: int) -> np.ndarray:
        return np.empty((rows, len(self.taps)), np.float32)

    def close(self) -> None:
        self.closed = True


Draft = Callable[["WindowDecoder", int], list[int]]


def oracle_draft(decoder: "WindowDecoder", count: int) -> list[int]:
    """What the target will choose, for a toy target: every draft is accepted."""
    history, tokens = decoder.history, []
    for _ in range(count):
        row = decoder.target.logits([*history.prompt, *history.output])
        tokens.append(decoder.sampler.choose(row, history).token)
        history.push(tokens[-1])
    history.pop(count)
    return tokens


class WindowDecoder:
    """Drafts a window, verifies it in one forward and returns what the target itself chooses.

    Windows have `width` rows, the first one `offset`; neither looks at the limit.
    """

    name = "window"

    def __init__(
        self, target: Any, width: int, offset: int | None = None, draft: Draft = oracle_draft
    ) -> None:
        self.target, self.width, self.offset, self.draft = target, width, offset or width, draft
        self.thrown_away = 0

    def begin(
        self,
        state: Any,
        tokens: Sequence[int],
        sampler: Sampler,
        history: TokenHistory,
        progress: Any = None,
    ) -> None:
        self.state, self.sampler, self.history = state, sampler, history
        self.first: Any = self.target.prefill(state, tokens, progress).copy()
        self.rows = self.offset

    def step(self, limit: int) -> StepResult:
        if self.first is not None:
            choices, self.first, self.window = [self._choose(self.first)], None, 0
            return self._result(choices, "prefill", 0)
        room = self.state.context - self.state.length
        self.window, self.rows = max(1, min(self.rows, room)), self.width
        drafts = self.draft(self, self.window - 1)
        window = [self.history.output[-1], *drafts]
        rows = self.target.forward(self.state, window, rows="all", verify=True)
        choices = [self._choose(rows[0])]
        while len(choices) < self.window and choices[-1].token == drafts[len(choices) - 1]:
            choices.append(self._choose(rows[len(choices)]))
        return self._result(choices, self.name, self.window)

    def commit(self, count: int) -> None:
        self.thrown_away += self.made - count
        self.history.pop(self.made - count)
        if self.window:
            self.state.commit(count)

    @property
    def plan(self) -> dict[str, Any]:
        return {}

    def describe(self) -> None:
        return None

    def report(self) -> None:
        return None

    def _choose(self, row: Any) -> Choice:
        choice = self.sampler.choose(row, self.history)
        self.history.push(choice.token)
        return choice

    def _result(self, choices: list[Choice], path: str, rows: int) -> StepResult:
        self.made = len(choices)
        return StepResult(
            tokens=tuple(choice.token for choice in choices),
            logprobs=tuple(choice.logprob for choice in choices if choice.logprob),
            path=path,
            mode="graph" if rows else "",
            rows=rows,
            drafted=max(0, rows - 1),
            accepted=len(choices) - 1,
        )
