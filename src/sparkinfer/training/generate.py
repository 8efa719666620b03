"""Lock-step generation: a batch of conversations that the target writes itself, one token of every row at a time.

Every row runs through stages: tokens that are given (a header, a prompt, the beginning of a user turn), a user turn
that the model continues, an answer. After an answer the row goes on with the next user turn, so no row idles and none
needs padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparkinfer.errors import RequestError
from sparkinfer.training.config import DataPlan
from sparkinfer.training.prompts import Frame
from sparkinfer.training.target import TorchTarget

GIVEN, USER, ANSWER, DONE = range(4)
GIVEN_WIDTH = 128  # given tokens are kept in a table of a multiple of this width


@dataclass(frozen=True)
class Piece:
    """Given tokens and the stage after them."""

    tokens: tuple[int, ...]
    then: int


@dataclass(frozen=True)
class Script:
    """What rows are given: each starts with one of `first` (its own number), and after an answer goes on with a
    random one of `later`, or ends where there is none. `answer` is what follows a user turn that the model wrote.
    """

    first: Sequence[Piece]
    later: Sequence[Piece]
    answer: Piece


def make_script(
    first: Sequence[tuple[Sequence[int], bool]],
    later: Sequence[tuple[Sequence[int], bool]],
    frame: Frame,
) -> Script:
    """A script of starts of user turns, (tokens, whether complete)."""

    def piece(head: tuple[int, ...], turn: tuple[Sequence[int], bool]) -> Piece:
        tokens, complete = turn
        if complete:
            return Piece((*head, *tokens, *frame.answer), ANSWER)
        return Piece((*head, *tokens), USER)

    return Script(
        [piece(frame.opening, turn) for turn in first],
        [piece(frame.following, turn) for turn in later],
        Piece(frame.answer, ANSWER),
    )


def pick(logits: Tensor, noise: Tensor, heat: Tensor, log_min_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, and tokens drawn at the temperatures `heat` [rows, 1], of logits [rows, n_vocab].

    `noise` is exponential. Tokens less likely than min-p times the likeliest are left out.
    """
    wide = logits.float()
    best, greedy = wide.max(-1, keepdim=True)
    kept = wide >= best + heat * log_min_p
    scores = torch.where(kept, wide / heat - noise.log(), -torch.inf)
    return greedy[:, 0], scores.argmax(-1)


class _Given:
    """The pieces of a script as a table on the device: tokens [pieces, width], lengths and next stages [pieces]."""

    def __init__(self, script: Script, device: torch.device) -> None:
        longest = max(len(piece.tokens) for piece in _pieces(script))
        self.width = -(-longest // GIVEN_WIDTH) * GIVEN_WIDTH
        tokens, lengths, then = self._table(script)
        self.later, self.n_later = 1 + len(script.first), len(script.later)
        self.tokens, self.lengths = tokens.to(device), lengths.to(device)
        self.then = then.to(device)

    def replace(self, script: Script) -> bool:
        """Take another script's pieces in the same memory; False where they do not fit."""
        counts = (1 + len(script.first), len(script.later))
        longest = max(len(piece.tokens) for piece in _pieces(script))
        if counts != (self.later, self.n_later) or longest > self.width:
            return False
        for own, value in zip(
            (self.tokens, self.lengths, self.then), self._table(script), strict=True
        ):
            own.copy_(value)
        return True

    def _table(self, script: Script) -> tuple[Tensor, Tensor, Tensor]:
        pieces = _pieces(script)
        if not all(piece.tokens for piece in pieces):
            raise RequestError("the chat template writes nothing before a turn: cannot generate")
        table = np.zeros((len(pieces), self.width), np.int64)
        for row, piece in enumerate(pieces):
            table[row, : len(piece.tokens)] = piece.tokens
        return (
            torch.from_numpy(table),
            torch.tensor([len(piece.tokens) for piece in pieces]),
            torch.tensor([piece.then for piece in pieces]),
        )


def _pieces(script: Script) -> list[Piece]:
    return [script.answer, *script.first, *script.later]


class Conversations:
    """The state of a batch, advanced by one token a row. Deterministic for a generator's seed on one device."""

    def __init__(
        self,
        script: Script,
        stop_ids: Sequence[int],
        plan: DataPlan,
        warm: Tensor,
        random: torch.Generator | None,
        *,
        compiled: bool = False,
    ) -> None:
        """`warm` [rows] marks the rows whose answers are drawn instead of greedy; no generator: the device's own."""
        self.device, rows = warm.device, len(script.first)
        self.plan, self.warm, self.random = plan, warm, random
        self.given = _Given(script, self.device)
        self._pick = torch.compile(pick, dynamic=False) if compiled else pick
        self.stop = torch.tensor(list(stop_ids), device=self.device)
        self.stage = torch.full((rows,), GIVEN, device=self.device)
        self.piece = torch.arange(1, rows + 1, device=self.device)
        self.place = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.length = torch.zeros(rows, dtype=torch.long, device=self.device)  # of this turn
        ends = [t for t in script.answer.tokens[:1] if t in stop_ids] or list(stop_ids)
        self.pad = ends[0]

    def next(self, logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next token of every row, and which of them are answers' own tokens, given logits [rows, n_vocab]."""
        return self.advance(torch.zeros_like(self.piece) if logits is None else self._draw(logits))

    def advance(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of every row, and which of them are answers' own tokens, where the model drew `drawn`."""
        ends = torch.isin(drawn, self.stop)
        self._leave_user(ends)
        cut = (self.stage == ANSWER) & (self.length >= self.plan.answer_limit)
        self._follow(cut)  # an answer that was cut off: its end is given, not learnt
        given = self.stage == GIVEN
        width = self.given.tokens.shape[1] - 1
        forced = self.given.tokens[self.piece, self.place.clamp(max=width)]
        token = torch.where(given, forced, drawn)
        token = torch.where(cut | (self.stage == DONE), self.pad, token)
        answers = (self.stage == ANSWER) & ~cut
        self.length += answers | (self.stage == USER)
        self._after_given(given & ~cut)
        self._follow(answers & ends)
        return token, answers

    def _draw(self, logits: Tensor) -> Tensor:
        """Greedy for answers of cool rows; else by temperature, tokens below min-p left out."""
        noise = torch.empty(logits.shape, device=self.device).exponential_(generator=self.random)
        heats, cool = self.heats()
        greedy, sampled = self._pick(logits, noise, heats[:, None], math.log(self.plan.min_p))
        return torch.where(cool, greedy, sampled)

    def heats(self) -> tuple[Tensor, Tensor]:
        """The rows' temperatures, float32, and which rows take the likeliest token instead, both [rows]."""
        heats = torch.where(self.stage == USER, 1.0, self.plan.warm_temperature)
        return heats, (self.stage == ANSWER) & ~self.warm

    def _leave_user(self, ends: Tensor) -> None:
        over = (self.stage == USER) & (ends | (self.length >= self.plan.user_limit))
        self._give(over, torch.zeros_like(self.piece))

    def _after_given(self, given: Tensor) -> None:
        self.place += given
        done = given & (self.place >= self.given.lengths[self.piece])
        self.stage = torch.where(done, self.given.then[self.piece], self.stage)
        self.length = torch.where(done, torch.zeros_like(self.length), self.length)

    def _follow(self, ended: Tensor) -> None:
        if not self.given.n_later:
            self.stage = torch.where(ended, DONE, self.stage)
            return
        shape, first = ended.shape, self.given.later
        picks = torch.randint(
            first, first + self.given.n_later, shape, generator=self.random, device=self.device
        )
        self._give(ended, picks)

    def _give(self, rows: Tensor, pieces: Tensor) -> None:
        self.stage = torch.where(rows, GIVEN, self.stage)
        self.piece = torch.where(rows, pieces, self.piece)
        self.place = torch.where(rows, torch.zeros_like(self.place), self.place)


@torch.inference_mode()
def converse(
    target: TorchTarget,
    script: Script,
    stop_ids: Sequence[int],
    plan: DataPlan,
    seed: int,
    *,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Tokens and answer marks, int64 and bool [rows, plan.length] on the CPU, of one row for each of `script.first`."""
    rows = len(script.first)
    random = torch.Generator(target.device).manual_seed(seed)
    warm = torch.rand(rows, generator=random, device=target.device) < plan.warm_share
    state = Conversations(script, stop_ids, plan, warm, random, compiled=compiled)
    cache = target.new_cache(rows, plan.length)
    tokens = torch.zeros(rows, plan.length, dtype=torch.long, device=target.device)
    answers = torch.zeros(rows, plan.length, dtype=torch.bool, device=target.device)
    logits = None
    for position in range(plan.length):
        tokens[:, position], answers[:, position] = state.next(logits)
        if position + 1 < plan.length:
            logits = target.step(tokens[:, position], cache, position)
    return tokens.cpu(), answers.cpu()
