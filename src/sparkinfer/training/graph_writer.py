"""GraphWriter: lock-step generation on a GPU with the whole step of a batch as one CUDA graph.

What changes from step to step (position, seed, stages, the tokens drawn) lies in device memory, so the graph that was
recorded once serves every position of every batch. The choice of a token reads float32 logits: in bfloat16 near
ties would go to the lower id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkinfer.errors import ModelOutputError
from sparkinfer.training.config import DataPlan
from sparkinfer.training.decode_kernels import attend, choose
from sparkinfer.training.generate import Conversations, Script
from sparkinfer.training.target import KeyValues, Layer, TorchTarget, rms_norm, rope_table

_STATE = ("stage", "piece", "place", "length")
_CHECKED_ROWS, _AGREEMENT = 8, 0.9


class GraphWriter:
    """Writes batches of as many rows as the first script has. `graph` False runs the same step without recording."""

    def __init__(
        self,
        target: TorchTarget,
        script: Script,
        stop_ids: Sequence[int],
        plan: DataPlan,
        *,
        graph: bool = True,
    ) -> None:
        rows, device = len(script.first), target.device
        self.target, self.plan, self.stop_ids, self.device = target, plan, stop_ids, device
        self._warm = torch.zeros(rows, dtype=torch.bool, device=device)
        self.state = Conversations(script, stop_ids, plan, self._warm, None)
        self._first = [getattr(self.state, name).clone() for name in _STATE]
        self._cache = KeyValues(target, rows, plan.length)
        self._tokens = torch.zeros(rows, plan.length, dtype=torch.long, device=device)
        self._answers = torch.zeros(rows, plan.length, dtype=torch.bool, device=device)
        self._drawn = torch.zeros(rows, dtype=torch.long, device=device)
        self._at = torch.zeros(1, dtype=torch.long, device=device)
        self._keys = torch.zeros(1, dtype=torch.int32, device=device)
        self._seed = torch.zeros(1, dtype=torch.long, device=device)
        c = target.config
        self._cos, self._sin = rope_table(
            c.head_size, c.rope_base, torch.arange(plan.length, device=device)
        )
        self._checked = False
        self._graph = self._record() if graph else None

    def serves(self, script: Script) -> bool:
        """Take the script for the next batch, if it fits the memory of the first one."""
        return self.state.given.replace(script)

    @torch.no_grad()
    def write(self, seed: int) -> tuple[Tensor, Tensor]:
        """Tokens and answer marks, int64 and bool [rows, length] on the CPU.

        Raises ModelOutputError when the first batch's answers are not what whole forwards of the target give.
        """
        self._restart(seed)
        for _ in range(self.plan.length):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        if not self._checked:
            self._check()
        return self._tokens.cpu(), self._answers.cpu()

    def _restart(self, seed: int) -> None:
        torch.manual_seed(seed)
        for name, value in zip(_STATE, self._first, strict=True):
            getattr(self.state, name).copy_(value)
        self._warm.copy_(torch.rand(self._warm.shape, device=self.device) < self.plan.warm_share)
        for counter in (self._at, self._keys, self._drawn):
            counter.zero_()
        self._seed.fill_(seed * self.plan.length)
        self._answers.zero_()

    @torch.no_grad()
    def _record(self) -> torch.cuda.CUDAGraph:
        self._restart(0)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles what is compiled, and settles the libraries' workspaces
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def _step(self) -> None:
        """One token of every row, from what was drawn after the last one."""
        token, answers = self._advanced()
        self._tokens.index_copy_(1, self._at, token[:, None])
        self._answers.index_copy_(1, self._at, answers[:, None])
        logits = self._forward(token)
        heats, cool = self.state.heats()
        drawn = choose(logits, heats, cool.to(torch.int8), self._seed, math.log(self.plan.min_p))
        self._drawn.copy_(drawn)
        for counter in (self._at, self._keys, self._seed):
            counter += 1

    def _advanced(self) -> tuple[Tensor, Tensor]:
        """The state's step, its results kept in the memory that the graph reads next time."""
        kept = {name: getattr(self.state, name) for name in _STATE}
        token, answers = self.state.advance(self._drawn)
        for name, memory in kept.items():
            memory.copy_(getattr(self.state, name))
            setattr(self.state, name, memory)
        return token, answers

    def _forward(self, token: Tensor) -> Tensor:
        """Logits [rows, n_vocab] after one token of every row."""
        target, rows = self.target, len(token)
        cos, sin = (table.index_select(0, self._at) for table in (self._cos, self._sin))
        x = F.embedding(token, target.embedding)[:, None]
        for layer, keys, values in zip(
            target.layers, self._cache.keys, self._cache.values, strict=True
        ):
            assert isinstance(layer, Layer)
            q, k, v = (part[:, :, 0].contiguous() for part in layer._heads(x, cos, sin))
            attended = attend(q, k, v, keys, values, self._keys)
            x = layer._rest(x, attended.view(rows, 1, -1))
        return _product(rms_norm(x[:, 0], target.output_norm, target.config.eps), target.head)

    def _check(self) -> None:
        """Compare greedy answers with whole forwards: near ties may differ, nothing else."""
        rows = torch.nonzero(~self._warm)[:_CHECKED_ROWS, 0]
        tokens, own = self._tokens[rows], self._answers[rows]
        with torch.compiler.set_stance("force_eager"):  # not worth compiling for these lengths
            best = self.target.logits(tokens).argmax(-1)
        places = own[:, 1:]
        agreed = float((tokens[:, 1:][places] == best[:, :-1][places]).float().mean())
        if places.any() and agreed < _AGREEMENT:
            raise ModelOutputError(
                f"{agreed:.1%} of the recorded step's greedy tokens are the target's: expected {_AGREEMENT:.0%} or more"
            )
        self._checked = True


def _product(x: Tensor, head: Tensor) -> Tensor:
    """x [rows, h] times the head [n_vocab, h], in float32."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, head.T, out_dtype=torch.float32)
    return F.linear(x, head).float()
