"""Trainer: the loop over steps, its checkpoints and its reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sparkinfer.errors import ModelOutputError, RequestError
from sparkinfer.training.anchors import draw_anchors, slots_of
from sparkinfer.training.config import TrainPlan
from sparkinfer.training.corpus import Batches
from sparkinfer.training.draft import DraftModel
from sparkinfer.training.evaluate import Acceptance, HeldOut, acceptance, claimed_slots
from sparkinfer.training.grid import Grid
from sparkinfer.training.loss import block_loss, expected_length, reachable
from sparkinfer.training.schedule import Optimiser
from sparkinfer.training.target import TorchTarget

AGREE_EVERY = 20  # steps between two agreements of several processes on the time that has passed
Report = Callable[[dict[str, Any]], None]


class Trainer:
    """One process of a run. Equal seeds, plans and data give equal drafts on one device, whether interrupted or not."""

    def __init__(
        self,
        target: TorchTarget,
        draft: DraftModel,
        draft_ids: Tensor | None,
        batches: Batches,
        plan: TrainPlan,
        *,
        held_out: HeldOut | None = None,
        report: Report = lambda _entry: None,
    ) -> None:
        """`draft_ids` int64 [outputs]: target ids of the draft's outputs, None for the whole vocabulary."""
        self.target, self.draft, self.batches, self.plan = target, draft, batches, plan
        self.held_out, self.report = held_out, report
        self.device = target.device
        self.head, self.index = output_head(target, draft_ids)
        self.optimiser = Optimiser(draft, plan)
        self.grid = Grid(draft)
        self.step_number, self.seconds = 0, 0.0
        self.curve: list[dict[str, Any]] = []
        self._sums = torch.zeros(3, device=self.device)  # loss, expected length, steps
        self._objective: Callable[..., tuple[Tensor, Tensor]] = self._loss
        self._progress = 0.0

    def compile(self) -> None:
        """Compile the layers and the loss; worth it from about a thousand steps on."""
        for layer in (*self.target.layers, *self.draft.layers):
            layer.compile(dynamic=False)
        self._objective = torch.compile(self._loss, dynamic=False)

    def run(self, checkpoint: Path | None = None) -> None:
        """Train to the end of the plan, from the checkpoint where there is one."""
        if checkpoint is not None and checkpoint.exists():
            self.load(checkpoint)
        started = time.monotonic() - self.seconds
        while not self._finished(started):
            self.step()
            self.seconds = time.monotonic() - started
            self._milestones(checkpoint)
        if self.plan.grid_from < 1:
            self.grid.settle()
        self._record(last=True)
        if checkpoint is not None and _is_first():
            self.save(checkpoint)

    def step(self) -> None:
        """One update."""
        tokens, answers = self.batches(self.step_number)
        random = torch.Generator(self.device).manual_seed(self._seed())
        anchors, real = draw_anchors(answers, self.plan.anchors, random)
        slots = slots_of(tokens, answers, anchors, real, self.draft.shape.depth)
        if self.plan.grid_from < 1 and self._progress >= self.plan.grid_from:
            self.grid.enter()
        with self._autocast():
            soft = self.plan.distill > 0
            features, final = self.target.features(tokens, self.draft.shape.taps, final=soft)
            embedded = F.embedding(tokens.gather(1, anchors), self.target.embedding)
            streams = self.draft(features, embedded, anchors)
            labels, counts = reachable(slots.labels, slots.counts, self.index)
            loss, right = self._objective(
                streams, slots.previous, labels, counts, self._rows(final, anchors)
            )
        loss.backward()
        self.grid.leave()
        average_gradients(self.draft)
        self.optimiser.step(self._progress)
        self.step_number += 1
        self._sums += torch.stack(
            (loss.detach().float(), expected_length(right, real), torch.ones_like(self._sums[0]))
        )

    def evaluate(self) -> Acceptance | None:
        """Acceptance on the held-out conversations."""
        if self.held_out is None:
            return None
        held = self.held_out
        with self._autocast(), torch.compiler.set_stance("force_eager"):
            right, claims = claimed_slots(
                self.draft, self.target, self.head, self.index, held.tokens, held.answers
            )
        return acceptance(right.cpu().numpy(), held, claims=claims.cpu().numpy())

    def save(self, path: Path) -> None:
        """Write a checkpoint; it appears under `path` when it is complete."""
        temporary = path.with_name(f".{path.name}.new")
        state = {
            "draft": self.draft.state_dict(),
            "optimiser": self.optimiser.state(),
            "step": self.step_number,
            "seconds": self.seconds,
            "curve": self.curve,
            "sums": self._sums,
            "progress": self._progress,
        }
        torch.save(state, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint. Raises RequestError for one of another draft."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        try:
            self.draft.load_state_dict(state["draft"])
        except RuntimeError as error:
            raise RequestError(f"{path} belongs to a draft of another shape: {error}") from None
        self.optimiser.load(state["optimiser"])
        self.step_number, self.seconds = state["step"], state["seconds"]
        self.curve, self._sums = state["curve"], state["sums"]
        self._progress = state["progress"]

    def _loss(
        self,
        streams: Tensor,
        previous: Tensor,
        labels: Tensor,
        counts: Tensor,
        final: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        logits = self.draft.logits(streams, previous, self.head)
        soft = None if final is None else F.linear(final, self.head)
        return block_loss(logits, labels, counts, self.plan, soft)

    def _rows(self, final: Tensor | None, anchors: Tensor) -> Tensor | None:
        """The target's normed streams that predict the slots' labels: those of the positions before them [b, n, depth,
        h].
        """
        if final is None:
            return None
        places = anchors[..., None] + torch.arange(self.draft.shape.depth, device=self.device)
        flat = places.clamp(max=final.shape[1] - 1).flatten(1)
        rows = final.gather(1, flat[..., None].expand(-1, -1, final.shape[-1]))
        return rows.view(*places.shape, -1)

    def _seed(self) -> int:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return (self.plan.seed * 1_000_003 + self.step_number) * 64 + rank

    def _autocast(self) -> Any:
        on_gpu = self.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()

    def _finished(self, started: float) -> bool:
        if self.plan.minutes == 0 or self.step_number % AGREE_EVERY == 0:
            share = self.plan.progress(self.step_number, time.monotonic() - started)
            self._progress = _agreed(share, self.device) if self.plan.minutes else share
        return self._progress >= 1

    def _milestones(self, checkpoint: Path | None) -> None:
        plan, step = self.plan, self.step_number
        due = plan.evaluate_every and step % plan.evaluate_every == 0
        if due or step % plan.report_every == 0:
            self._record(evaluate=bool(due))
        if (
            plan.save_every
            and step % plan.save_every == 0
            and checkpoint is not None
            and _is_first()
        ):
            self.save(checkpoint)

    def _record(self, *, evaluate: bool = False, last: bool = False) -> None:
        loss, length, steps = self._sums.tolist()
        if not loss < float("inf"):
            raise ModelOutputError(
                f"the loss is {loss} at step {self.step_number}: lower the learning rate"
            )
        self._sums.zero_()
        entry: dict[str, Any] = {
            "step": self.step_number,
            "seconds": round(self.seconds, 1),
        }
        if steps:
            entry["loss"] = round(loss / steps, 4)
            entry["train_tau"] = round(length / steps, 3)
        if (evaluate or last) and _is_first() and (measured := self.evaluate()) is not None:
            entry["tau"] = {width: round(value, 3) for width, value in measured.tau.items()}
            entry["slots"] = [round(hit / max(1, seen), 3) for seen, hit in measured.slots]
        self.curve.append(entry)
        if _is_first():
            self.report(entry)


def output_head(target: TorchTarget, draft_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The target's head rows for the draft's outputs [outputs, h], and target id -> output number or -1 [n_vocab]."""
    if draft_ids is None:
        return target.head, None
    index = torch.full((target.config.n_vocab,), -1, dtype=torch.long, device=target.device)
    index[draft_ids] = torch.arange(len(draft_ids), device=target.device)
    return target.head[draft_ids].contiguous(), index


def average_gradients(model: torch.nn.Module) -> None:
    """Average over all processes, in one exchange; nothing to do for a single one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _agreed(share: float, device: torch.device) -> float:
    """The largest share among all processes."""
    if not dist.is_initialized():
        return share
    value = torch.tensor(share, dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
