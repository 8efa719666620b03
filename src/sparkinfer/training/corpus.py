"""Corpus: conversations as rows of tokens with their answers marked, on disk and as shuffled batches."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkinfer.errors import GGUFError, MissingFileError
from sparkinfer.tokenizer import Tokenizer
from sparkinfer.training.config import DataPlan
from sparkinfer.training.generate import Script, converse, make_script
from sparkinfer.training.prompts import Frame, Turn, random_turns, vocabulary_words
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

    def without(self, sequences: Sequence[Sequence[int]]) -> Corpus:
        """The rows in which none of these sequences of tokens occurs."""
        kept = np.ones(len(self), np.bool_)
        for sequence in sequences:
            if not 0 < len(sequence) <= self.tokens.shape[1]:
                continue
            counts = self._counts[list(sequence)]
            rarest = int(counts.argmin())
            rows, places = np.nonzero(self.tokens == sequence[rarest])
            places -= rarest
            fits = (places >= 0) & (places + len(sequence) <= self.tokens.shape[1])
            rows, places = rows[fits], places[fits]
            found = self.tokens[rows[:, None], places[:, None] + np.arange(len(sequence))]
            kept[rows[(found == np.asarray(sequence)).all(1)]] = False
        return self if kept.all() else Corpus(self.tokens[kept], self.answers[kept])

    @cached_property
    def _counts(self) -> npt.NDArray[np.int64]:
        """How often every token occurs, up to the highest id that could."""
        size = max(1 << 18, int(self.tokens.max(initial=0)) + 1)
        return np.bincount(self.tokens.ravel(), minlength=size)

    def frequent(
        self, count: int, n_vocab: int, always: Sequence[int] = ()
    ) -> npt.NDArray[np.int32]:
        """The `count` most frequent answer tokens in ascending order, `always` among them."""
        return np.sort(self.ranked(count, n_vocab, always))

    def ranked(self, count: int, n_vocab: int, always: Sequence[int] = ()) -> npt.NDArray[np.int32]:
        """The same, the most frequent first, after `always`."""
        ranked = np.bincount(self.tokens[self.answers], minlength=n_vocab).astype(np.int64)
        ranked[list(always)] = np.iinfo(np.int64).max
        # Ties go to the lower id, so that the choice is the same everywhere.
        order = np.lexsort((np.arange(n_vocab), -ranked))[:count]
        return order.astype(np.int32)

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
    compiled: bool = False,
) -> Corpus:
    """Let the target write `plan.rows` conversations.

    `prompts` replaces the built-in starts of user turns; no conversation has one of `excluded`.
    """
    parts: list[Corpus] = []
    batches = conversation_batches(
        target, tokenizer, frame, plan, seed, prompts=prompts, excluded=excluded, compiled=compiled
    )
    for part in batches:
        parts.append(part)
        if progress:
            progress("conversations", min(plan.rows, plan.batch * len(parts)), plan.rows)
    return Corpus.joined(parts)


def conversation_batches(
    target: TorchTarget,
    tokenizer: Tokenizer,
    frame: Frame,
    plan: DataPlan,
    seed: int,
    *,
    prompts: Sequence[Turn] = (),
    excluded: frozenset[str] = frozenset(),
    compiled: bool = False,
) -> Iterator[Corpus]:
    """The conversations of `write_conversations`, a batch at a time; the caller may stop at any of them."""
    stop, words = sorted(frame.stop_ids), vocabulary_words(tokenizer)
    whole = [tokenizer.encode(text, add_special=False) for text in sorted(excluded)]
    sizes = [min(plan.batch, plan.rows - start) for start in range(0, plan.rows, plan.batch)]

    def script_of(number: int) -> Script:
        number_seed = _number(seed, number)
        turns = _turns(sizes[number], LATER_TURNS, number_seed, plan, prompts, excluded, words)
        first, later = (
            [(tokenizer.encode(t.text, add_special=False), t.complete) for t in some]
            for some in turns
        )
        return make_script(first, later, frame)

    writer = _Writer(target, stop, plan, compiled)
    # The next batch's questions are made while the device writes this one's answers.
    with ThreadPoolExecutor(1) as ahead:
        waiting = ahead.submit(script_of, 0)
        for number in range(len(sizes)):
            script = waiting.result()
            if number + 1 < len(sizes):
                waiting = ahead.submit(script_of, number + 1)
            tokens, answers = writer(script, _number(seed, number))
            yield Corpus(tokens.numpy().astype(np.uint32), answers.numpy()).without(whole)


def _number(seed: int, batch: int) -> int:
    return seed * 1_000_003 + batch


class _Writer:
    """Batches of conversations: on a GPU, where asked to compile, by a recorded step, else by `converse`.

    A hybrid target's state is not of the kind that the recorded step writes.
    """

    def __init__(
        self, target: TorchTarget, stop: Sequence[int], plan: DataPlan, compiled: bool
    ) -> None:
        self.target, self.stop, self.plan, self.compiled = target, stop, plan, compiled
        self._recorded = compiled and target.device.type == "cuda" and target.recordable
        self._graph: Any = None
        if compiled:
            target.compile_append()

    def __call__(self, script: Script, seed: int) -> tuple[Tensor, Tensor]:
        if not self._recorded:
            return converse(self.target, script, self.stop, self.plan, seed, compiled=self.compiled)
        if self._graph is None or not self._graph.serves(script):
            from sparkinfer.training.graph_writer import GraphWriter

            self._graph = None  # gives its memory back first
            self._graph = GraphWriter(self.target, script, self.stop, self.plan)
        written: tuple[Tensor, Tensor] = self._graph.write(seed)
        return written


def _turns(
    first: int,
    later: int,
    seed: int,
    plan: DataPlan,
    prompts: Sequence[Turn],
    excluded: frozenset[str],
    words: Sequence[str],
) -> tuple[list[Turn], list[Turn]]:
    """Starts of first and of later user turns."""
    if not prompts:
        share = plan.patterns
        turns = random_turns(first, seed, excluded, words, patterns=share)
        return turns, random_turns(
            later, seed + 500_000, excluded, words, later=True, patterns=share
        )
    fit = [turn for turn in prompts if turn.text not in excluded]
    chosen = random.Random(seed).choices(fit, k=first + later)
    return chosen[:first], chosen[first:]
