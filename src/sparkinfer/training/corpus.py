"""Corpus: conversations as rows of tokens with their answers marked, on disk and as shuffled batches."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkinfer.errors import GGUFError, MissingFileError
from sparkinfer.tokenizer import Tokenizer
from sparkinfer.training.config import DataPlan
from sparkinfer.training.generate import converse, make_script
from sparkinfer.training.prompts import Frame, Turn, random_turns
from sparkinfer.training.target import TorchTarget

LATER_TURNS = 4096  # different starts of second and later turns in a batch
Ids = npt.NDArray[np.uint32]
Marks = npt.NDArray[np.bool_]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Corpus:
    """`tokens` uint32 [rows, length]; `answers` bool: tokens that the target chose in an answer."""

    tokens: Ids
    answers: Marks

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def answer_tokens(self) -> int:
        return int(self.answers.sum())

    def save(self, path: Path) -> None:
        """Write an .npz; it appears under `path` when it is complete."""
        narrow = self.tokens.max(initial=0) < 1 << 16
        temporary = path.with_name(f".{path.name}.{os.getpid()}.npz")
        try:
            np.savez_compressed(
                temporary,
                tokens=self.tokens.astype(np.uint16 if narrow else np.uint32),
                answers=np.packbits(self.answers, axis=1),
            )
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @staticmethod
    def load(path: Path) -> Corpus:
        """Raises MissingFileError, and GGUFError for a file of another kind."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                tokens = stored["tokens"].astype(np.uint32)
                answers = np.unpackbits(stored["answers"], axis=1, count=tokens.shape[1])
        except OSError as error:
            raise MissingFileError(f"cannot read the conversations {path}: {error}") from error
        except (ValueError, KeyError, IndexError) as error:
            raise GGUFError(f"{path} is not a file of conversations: {error}") from error
        return Corpus(tokens, answers.astype(np.bool_))

    @staticmethod
    def joined(parts: Sequence[Corpus]) -> Corpus:
        return Corpus(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.answers for part in parts]),
        )

    def frequent(
        self, count: int, n_vocab: int, always: Sequence[int] = ()
    ) -> npt.NDArray[np.int32]:
        """The `count` most frequent answer tokens in ascending order, `always` among them."""
        ranked = np.bincount(self.tokens[self.answers], minlength=n_vocab).astype(np.int64)
        ranked[list(always)] = np.iinfo(np.int64).max
        # Ties go to the lower id, so that the choice is the same everywhere.
        order = np.lexsort((np.arange(n_vocab), -ranked))[:count]
        return np.sort(order).astype(np.int32)

    def coverage(self, ids: npt.NDArray[Any]) -> float:
        """The share of the answers' tokens that are among `ids`."""
        return float(np.isin(self.tokens[self.answers], ids).mean()) if self.answers.any() else 0.0


class Batches:
    """Rows of a corpus on the device, in an order that follows from the seed and the number of the step alone."""

    def __init__(
        self,
        corpus: Corpus,
        rows: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.tokens = torch.from_numpy(corpus.tokens.astype(np.int32)).to(device)
        self.answers = torch.from_numpy(corpus.answers).to(device)
        self.rows, self.seed, self.rank, self.world = rows, seed, rank, world
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens int64 and answers bool, [rows, length]."""
        count = len(self.tokens)
        first = (step * self.world + self.rank) * self.rows
        picks = [self._row(first + offset, count) for offset in range(self.rows)]
        chosen = torch.tensor(picks, device=self.tokens.device)
        return self.tokens[chosen].long(), self.answers[chosen]

    def _row(self, place: int, count: int) -> int:
        epoch, index = divmod(place, count)
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(count)
            self._epoch = epoch
        return int(self._order[index])


def write_conversations(
    target: TorchTarget,
    tokenizer: Tokenizer,
    frame: Frame,
    plan: DataPlan,
    seed: int,
    *,
    prompts: Sequence[Turn] = (),
    excluded: frozenset[str] = frozenset(),
    progress: Progress | None = None,
    enough: Callable[[], bool] = lambda: False,
    compiled: bool = False,
) -> Corpus:
    """Let the target write `plan.rows` conversations, fewer when `enough()` is true after a batch.

    `prompts` replaces the built-in starts of user turns; none of `excluded` is used.
    """
    parts: list[Corpus] = []
    made, stop = 0, sorted(frame.stop_ids)
    if compiled:
        target.compile_append()
    while made < plan.rows and not (parts and enough()):
        rows, number = min(plan.batch, plan.rows - made), seed * 1_000_003 + len(parts)
        turns = _turns(rows + LATER_TURNS, number, prompts, excluded)
        encoded = [(tokenizer.encode(t.text, add_special=False), t.complete) for t in turns]
        script = make_script(encoded[:rows], encoded[rows:], frame)
        tokens, answers = converse(target, script, stop, plan, number, compiled=compiled)
        parts.append(Corpus(tokens.numpy().astype(np.uint32), answers.numpy()))
        made += rows
        if progress:
            progress("conversations", made, plan.rows)
    return Corpus.joined(parts)


def _turns(count: int, seed: int, prompts: Sequence[Turn], excluded: frozenset[str]) -> list[Turn]:
    if not prompts:
        return random_turns(count, seed, excluded)
    return random.Random(seed).choices(
        [turn for turn in prompts if turn.text not in excluded], k=count
    )
