"""Training a small hybrid model from scratch on conversations that a teacher wrote.

The model learns the next token of every position; with `distill` part of the loss is the cross-entropy with the
teacher's distribution, computed in the same step. The teacher's tokenizer and chat template become the model's own.

    python -m sparkinfer.training.pretrain --teacher MODEL.gguf --data FOLDER --output FOLDER --minutes 5
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sparkinfer.errors import ModelOutputError, RequestError
from sparkinfer.training.config import TrainPlan
from sparkinfer.training.corpus import Batches, Corpus
from sparkinfer.training.hybrid import HybridModel
from sparkinfer.training.schedule import Optimiser
from sparkinfer.training.target import TorchTarget
from sparkinfer.training.trainer import average_gradients

Report = Callable[[dict[str, Any]], None]
EVALUATED_ROWS = 8  # at a time: their logits are whole


def read_conversations(folder: Path) -> Corpus:
    """All conversations-*.npz of a folder, cut to the shortest length. Raises RequestError where there are none."""
    paths = sorted(folder.glob("conversations-*.npz"))
    if not paths:
        raise RequestError(f"{folder} has no conversations-*.npz: write some with sparkinfer train")
    parts = [Corpus.load(path) for path in paths]
    length = min(part.tokens.shape[1] for part in parts)
    return Corpus.joined([Corpus(p.tokens[:, :length], p.answers[:, :length]) for p in parts])


@torch.no_grad()
def embedding_of(teacher: TorchTarget, width: int) -> Tensor:
    """The teacher's embedding in its `width` strongest directions, float32 [n_vocab, width], scaled to small logits.

    Raises RequestError where the teacher is narrower.
    """
    table = teacher.embedding.float()
    if table.shape[1] < width:
        raise RequestError(
            f"the teacher's embedding has {table.shape[1]} columns, the model needs {width}: use a fresh one"
        )
    _, vectors = torch.linalg.eigh((table.T @ table).double())
    reduced = table @ vectors[:, -width:].to(table.dtype)
    return reduced * (0.04 / reduced.square().mean().sqrt())


def next_token_loss(
    streams: Tensor, head: Tensor, tokens: Tensor, soft: Tensor | None, share: float
) -> tuple[Tensor, Tensor]:
    """The objective, and the mean cross-entropy of the true next tokens.

    streams [b, n, h] normed; head [n_vocab, h]; tokens [b, n]; soft [b, n, n_vocab], the teacher's logits. The last
    position has no next token and does not count.
    """
    scores = F.log_softmax(F.linear(streams, head).float(), -1)
    labels = F.pad(tokens[:, 1:], (0, 1))
    losses = -scores.gather(-1, labels[..., None])[..., 0]
    hard = losses[:, :-1].mean()
    if soft is None:
        return hard, hard.detach()
    matched = -(soft.float().softmax(-1) * scores).sum(-1)[:, :-1].mean()
    return (1 - share) * hard + share * matched, hard.detach()


class Pretrainer:
    """One process of a run."""

    def __init__(
        self,
        model: HybridModel,
        teacher: TorchTarget | None,
        batches: Batches,
        plan: TrainPlan,
        *,
        balance: float = 0.01,
        held_out: Tensor | None = None,
        report: Report = lambda _entry: None,
        started: float | None = None,
    ) -> None:
        """`held_out` int64 [rows, length] on the device; `started`: the clock's zero, by default now."""
        self.model, self.teacher, self.batches, self.plan = model, teacher, batches, plan
        self.balance, self.held_out, self.report = balance, held_out, report
        self.device = model.device
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        self.optimiser = Optimiser(model, plan)
        self.step_number = 0
        self.started = time.monotonic() if started is None else started
        self.first_step = 0.0  # seconds after the start, when the first step was done
        self.curve: list[dict[str, Any]] = []
        self._sums = torch.zeros(
            4, device=self.device
        )  # objective, next-token loss, balance, steps
        self._objective: Callable[..., tuple[Tensor, Tensor]] = next_token_loss
        self._compiled: list[tuple[Any, str]] = []  # layers and their compiled methods

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def compile(self) -> None:
        """Compile the layers and the loss."""
        for layer in self.model.layers:
            self._compiled.append((layer, "run"))
            layer.run = torch.compile(layer.run, dynamic=False)
        if self.teacher is not None:
            for layer in self.teacher.layers:
                self._compiled.append((layer, "forward"))
                layer.forward = torch.compile(layer.forward, dynamic=False)
        self._objective = torch.compile(next_token_loss, dynamic=False)

    def interpret(self) -> None:
        """Take `compile` back."""
        for layer, method in self._compiled:
            delattr(layer, method)
        self._compiled.clear()
        self._objective = next_token_loss
        torch.compiler.reset()

    def run(self, on_milestone: Callable[[], None] = lambda: None) -> None:
        """Train to the end of the plan; `on_milestone` is called every `plan.save_every` steps.

        Raises ModelOutputError when the loss is no number any more.
        """
        while (progress := self._progress()) < 1:
            self.step(progress)
            if self.step_number == 1:
                self.first_step = self.seconds
            plan, step = self.plan, self.step_number
            due = bool(plan.evaluate_every) and step % plan.evaluate_every == 0
            if due or step % plan.report_every == 0:
                self.record(evaluate=due)
            if plan.save_every and step % plan.save_every == 0:
                on_milestone()
        self.record(evaluate=True)

    def step(self, progress: float) -> None:
        """One update at a share `progress` of the run."""
        tokens, _ = self.batches(self.step_number)
        with self._autocast():
            soft = self._soft(tokens)
            streams, uneven = self.model(tokens)
            loss, hard = self._objective(streams, self.model.head, tokens, soft, self.plan.distill)
            total = loss + self.balance * uneven
        total.backward()
        average_gradients(self.model)
        self.optimiser.step(progress)
        self.step_number += 1
        parts = (loss.detach(), hard, uneven.detach(), torch.ones_like(self._sums[0]))
        self._sums += torch.stack([part.float() for part in parts])

    @torch.no_grad()
    def evaluate(self, model: TorchTarget | None = None) -> dict[str, float]:
        """Of the model, or another one, on the held-out rows: the next-token loss, the share of tokens that are its
        first choice, and the share of positions where it and the teacher would choose the same.
        """
        if self.held_out is None:
            return {}
        model = model or self.model
        sums = torch.zeros(3, device=self.device)
        with self._autocast(), torch.compiler.set_stance("force_eager"):
            for rows in self.held_out.split(EVALUATED_ROWS):
                scores = model.logits(rows)[:, :-1].float()
                labels, best = rows[:, 1:], scores.argmax(-1)
                sums[0] += F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
                sums[1] += (best == labels).sum()
                soft = self._soft(rows)
                if soft is not None:
                    sums[2] += (soft[:, :-1].argmax(-1) == best).sum()
        count = self.held_out[:, 1:].numel()
        names = ("held_out_loss", "held_out_right", "teacher_agrees")
        values = dict(zip(names, (sums / count).tolist(), strict=True))
        return values if self.teacher is not None else {k: values[k] for k in names[:2]}

    def record(self, *, evaluate: bool = False) -> None:
        """Add an entry to the curve. Raises ModelOutputError for a loss that is no number."""
        objective, hard, uneven, steps = self._sums.tolist()
        if not objective < float("inf"):
            raise ModelOutputError(
                f"the loss is {objective} at step {self.step_number}: lower the learning rate"
            )
        self._sums.zero_()
        entry: dict[str, Any] = {"step": self.step_number, "seconds": round(self.seconds, 1)}
        if steps:
            entry["objective"] = round(objective / steps, 4)
            entry["loss"] = round(hard / steps, 4)
            entry["balance"] = round(uneven / steps, 3)
        if evaluate and is_first():
            entry |= {name: round(value, 4) for name, value in self.evaluate().items()}
        self.curve.append(entry)
        if is_first():
            self.report(entry)

    def _soft(self, tokens: Tensor) -> Tensor | None:
        """The teacher's logits [b, n, n_vocab]."""
        if self.teacher is None:
            return None
        with torch.no_grad():
            _, final = self.teacher.features(tokens, (0,), final=True)
            assert final is not None
            return F.linear(final, self.teacher.head)

    def _progress(self) -> float:
        """The share of the run that is done; the time before the end of the first step is no part of it."""
        plan = self.plan
        if not plan.minutes:
            return self.step_number / plan.steps
        whole = max(1e-3, 60 * plan.minutes - self.first_step)
        share = max(self.step_number / plan.steps, (self.seconds - self.first_step) / whole)
        if self.seconds >= 60 * plan.minutes:
            share = 1.0
        if dist.is_initialized():
            value = torch.tensor(share, dtype=torch.float64, device=self.device)
            dist.all_reduce(value, dist.ReduceOp.MAX)
            share = float(value)
        return min(share, 1.0)

    def _autocast(self) -> Any:
        on_gpu = self.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()


def is_first() -> bool:
    """True in the process that reports and writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def short_products() -> Iterator[None]:
    """Products of float32 matrices in TF32 where the GPU has it: the recurrence's, which stay outside bfloat16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


if __name__ == "__main__":
    from sparkinfer.training.pretrain_run import main

    main()
