"""The draft's network on the target's backend: its weights, and the tapes of context rows and of blocks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend.base import Activation, Backend, Buffer, CacheFormat, Tape, Weight
from sparkinfer.dflash.layers import DraftLayer
from sparkinfer.kernels.greedy_chain import (
    Links,
    Picks,
    TokenLinks,
    TokenPicks,
    greedy_chain,
    picks,
)
from sparkinfer.kernels.linear import linear
from sparkinfer.kernels.quantise import quantise
from sparkinfer.kernels.rope import cache_rows
from sparkinfer.models.config import MAX_WIDTH
from sparkinfer.models.intake import Intake
from sparkinfer.models.layers import Run
from sparkinfer.models.readout import Readout
from sparkinfer.models.table import Table
from sparkinfer.models.workspace import Workspace


@dataclass(frozen=True)
class DraftNetwork:
    """Weights of a draft; `head` may be the target's, `selection` [rank, n_embd] is for a selector of candidates."""

    fc: Weight
    hidden_norm: Buffer
    layers: tuple[DraftLayer, ...]
    norm: Buffer
    head: Weight
    rope_table: Buffer
    selection: Weight | None = None
    embedding: Weight | None = None  # where the host does not write the stream itself


@dataclass(frozen=True)
class Choosing:
    """What a device needs to choose tokens: `known` as `TokenPicks` has it; `before` and `after` as `TokenLinks` has
    them, None without a Markov head.
    """

    known: Buffer | None = None
    before: Buffer | None = None
    after: Weight | None = None


class Tapes:
    """Everything a draft records, made when first asked for, and the buffers that replays read and write."""

    def __init__(
        self,
        backend: Backend,
        network: DraftNetwork,
        table: Table,
        context: int,
        eps: float,
        *,
        scale: float = 1.0,
        cache_format: CacheFormat = "f16",
        tapped: Buffer | None = None,
        tokens: tuple[Buffer, int] | None = None,
        slots: int = 0,
        links: Links | None = None,
        choosing: Choosing | None = None,
        mask: Buffer | None = None,
    ) -> None:
        """`table`: the embedding, whose rows are multiplied by `scale`; `cache_format`: of the draft's own keys and
        values; `tapped`: where the target leaves its features, `tokens` where a block leaves its likeliest ones for the
        target; `mask` as `Intake` has it.

        Blocks of up to `slots` slots choose their likeliest tokens too (0: they leave that), with `links` between them
        on the host, and on a device with what `choosing` holds.
        """
        self.backend, self.network = backend, network
        self._context, self._eps, self._cache_format = context, eps, cache_format
        self._long, self._short = Workspace(backend, backend.chunk), Workspace(backend, MAX_WIDTH)
        self.features: Activation = backend.activation(
            backend.chunk, network.fc.inputs, quantised=network.fc.quantised
        )
        self._tokens = tokens
        self.tapped = None if tapped is None else Activation(tapped, self.features.q8)
        self.x = self._short.buffer("x", network.fc.outputs)
        self.intake = Intake(backend, self.x, table, network.embedding, scale=scale, mask=mask)
        self.params = self.intake.params
        self.logits = self._short.buffer("logits", network.head.padded_outputs)
        self.readout = Readout(backend, self.logits, network.head.outputs)
        self.links = links
        self.picks: Picks | None = None
        if slots and choosing is None:
            self.picks = picks(backend, slots, network.head.outputs)
        self.found: TokenPicks | None = None
        self._token_links: TokenLinks | None = None
        if slots and choosing is not None:
            found = backend.buffer(slots, 2, np.int64)
            self.found = TokenPicks(found, choosing.known, tokens)
            anchor, before, after = self.intake.column(0), choosing.before, choosing.after
            if before is not None and after is not None and anchor is not None:
                self._token_links = TokenLinks(before, after, anchor)
        self.selected: Buffer | None = None
        if network.selection is not None:
            self.selected = self._short.buffer("selected", network.selection.padded_outputs)
        self._contexts: dict[tuple[int, bool], Tape] = {}
        self._blocks: dict[tuple[int, int, int], Tape] = {}

    def context(self, rows: int, *, tapped: bool = False) -> Tape:
        """From `features` (or `tapped`) to `rows` rows of every layer's keys and values."""
        key = (rows, tapped)
        if key not in self._contexts:
            source = self.tapped if tapped else self.features
            assert source is not None
            self._contexts[key] = self._record_context(rows, source)
        return self._contexts[key]

    def block(self, rows: int, first: int, depth: int) -> Tape:
        """From `rows` rows of `x` to logits of the `depth` rows from `first` on, and to `picks`."""
        key = (rows, first, depth)
        if key not in self._blocks:
            self._blocks[key] = self._record_block(*key)
        return self._blocks[key]

    def _run(self, rows: int, space: Workspace, x: Buffer) -> Run:
        return Run(
            self.backend.recorder(rows, self._cache_format), space, x, self.params, self.network.rope_table,
            self._context, self._eps,
        )  # fmt: skip

    def _record_context(self, rows: int, features: Activation) -> Tape:
        network, space = self.network, self._long
        run = self._run(rows, space, space.buffer("mixed features", network.fc.padded_outputs))
        if network.fc.quantised:
            quantise(run.recorder, features)
        linear(run.recorder, features, [network.fc], [run.x])
        attentions = [layer.attention for layer in network.layers]
        weights = [weight for a in attentions for weight in (a.k, a.v)]
        buffers = [
            space.buffer(f"{what} {layer}", weight.padded_outputs)
            for layer, a in enumerate(attentions)
            for what, weight in (("k", a.k), ("v", a.v))
        ]
        linear(run.recorder, run.norm(network.hidden_norm, weights), weights, buffers)
        with run.recorder.together():
            for a, k, v in zip(attentions, buffers[::2], buffers[1::2], strict=True):
                cache_rows(run.recorder, k, v, a.shape, network.rope_table, self.params, a.k_norm)
        return run.recorder.finish()

    def _record_block(self, rows: int, first: int, depth: int) -> Tape:
        network = self.network
        run = self._run(rows, self._short, self.x)
        self.intake.record(run.recorder)
        for layer in network.layers[:-1]:
            layer.record(run)
        run = network.layers[-1].record_last(run, first, depth)
        readers, results = [network.head], [self.logits]
        if network.selection is not None and self.selected is not None:
            readers, results = [*readers, network.selection], [*results, self.selected]
        linear(run.recorder, run.norm(network.norm, readers), readers, results)
        ids = network.head.outputs
        if self.found is not None:
            greedy_chain(run.recorder, self.logits, ids, self._token_links, self.found)
            run.recorder.deliver(self.found.found)
            return run.recorder.finish()
        self.readout.record(run.recorder, self.params, self._tokens)
        if self.selected is not None:
            run.recorder.deliver(self.selected)
        if self.picks is not None:
            greedy_chain(run.recorder, self.logits, ids, self.links, self.picks)
        return run.recorder.finish()

    def chosen(self, depth: int) -> tuple[list[int], list[float]]:
        """Tokens and their probabilities of the first slots of a device's block that has been waited for."""
        assert self.found is not None
        found = self.backend.staging(self.found.found)[:depth]
        return found[:, 0].tolist(), found[:, 1].astype(np.int32).view(np.float32).tolist()


class VectorProduct:
    """`weight` times one vector [inputs] at a time, on the backend's threads; the result is overwritten by the next."""

    def __init__(self, backend: Backend, weight: Weight) -> None:
        self._x = backend.activation(1, weight.inputs, quantised=weight.quantised)
        self._out = backend.buffer(1, weight.padded_outputs)
        self.weight = weight  # a tape knows addresses only
        self._backend = backend
        recorder = backend.recorder(1)
        recorder.receive(self._x.f32)
        if weight.quantised:
            quantise(recorder, self._x)
        linear(recorder, self._x, [weight], [self._out])
        recorder.deliver(self._out)
        self._tape = recorder.finish()
        self._given, self._result = backend.staging(self._x.f32), backend.staging(self._out)

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        self._backend.wait()
        self._given[0] = x
        self._tape.replay()
        self._backend.wait()
        result: NDArray[np.float32] = self._result[0, : self.weight.outputs]
        return result


def links(backend: Backend, before: NDArray[np.float32], after: Weight) -> Links:
    """What chains slots: rows of `before` float32 [ids, rank] are the inputs of `after`."""
    ids, rank = before.shape
    rows = backend.buffer(ids, rank)
    backend.upload(rows, before)
    x = backend.activation(1, rank, quantised=after.quantised, private=True)
    return Links(rows, backend.buffer(1, rank), after, x)
