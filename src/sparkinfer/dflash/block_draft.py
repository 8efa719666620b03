"""BlockDraft: a loaded block-diffusion draft with the context of one sequence."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend.base import Backend, Buffer
from sparkinfer.dflash.base import Ahead, Chain, Features, Proposals
from sparkinfer.dflash.config import DraftConfig
from sparkinfer.dflash.context import ContextRows
from sparkinfer.dflash.network import Choosing, DraftNetwork, Tapes, VectorProduct, links
from sparkinfer.dflash.occurring import Exchanged, Occurring
from sparkinfer.dflash.proposals import (
    BlockProposals,
    Output,
    Selector,
    SelectorProposals,
)
from sparkinfer.errors import RequestError
from sparkinfer.kernels import run_params as P
from sparkinfer.kernels.attention import chunks
from sparkinfer.kernels.greedy_chain import Links
from sparkinfer.models.config import MAX_WIDTH
from sparkinfer.models.table import Table
from sparkinfer.models.weights import Progress

Floats = NDArray[np.float32]
_POSITION, _KEYS, _VALUES, _HEAD_BYTES, _ATTENTION_CHUNKS, _FIRST, _WINDOW_CHUNKS, _ROTATION = (
    offset // 8
    for offset in (
        P.POSITION, P.KEYS, P.VALUES, P.HEAD_BYTES, P.ATTENTION_CHUNKS, P.FIRST, P.WINDOW_CHUNKS, P.ROTATION,
    )
)  # fmt: skip
_MOST_LINKS = 8 * 2**20  # numbers of a Markov head that are kept as float32 beside its table
_MOST_HELD = 8 * 2**20  # the same, of the embeddings of a draft's own vocabulary


class BlockDraft:
    """Implements `dflash.base.Draft`. One call at a time; it shares the backend with its target."""

    def __init__(
        self,
        config: DraftConfig,
        backend: Backend,
        network: DraftNetwork,
        rows: ContextRows,
        output: Output,
        embedding: Table,
        mask: Floats | None,
        plan: Mapping[str, Any],
        selector: Selector | None = None,
        tapped: Buffer | None = None,
        tokens: tuple[Buffer, int] | None = None,
        occurring: Occurring | None = None,
        choosing: Choosing | None = None,
    ) -> None:
        """`embedding` rows and `mask` [n_embd] are multiplied by the draft's `embedding_scale`; without `mask` the
        masked rows are the embedding's of the draft's mask id. Features in `tapped`, memory of the target, are read
        there, and `tokens` is where it expects those of a window that the host has not seen. `occurring` changes the
        rows of the head and `output.ids` with the text. With `choosing` a device chooses the tokens of a block.
        """
        self.config, self.output, self._selector = config, output, selector
        self.name, self.taps, self.max_depth = config.name, config.taps, config.max_depth
        self.prior = config.prior
        self._plan, self._columns = dict(plan), len(config.taps) * config.n_embd
        self._rows, self._backend = rows, backend
        scale = config.embedding_scale
        self._mask = None if mask is None else mask * np.float32(scale)
        chained = selector is None and not output.scaled
        if backend.on_host:
            chained = chained and (output.markov is None or _linkable(output))
        elif choosing is None or not chained:
            chained, choosing = False, None
        simple = selector is None and output.ids is None and output.ordered
        if backend.on_host and chained and output.ids is not None:
            _hold(embedding, output)
        whole = output.ids is not None or output.n_vocab == network.head.outputs
        self.runs_ahead = tokens is not None and whole and (choosing is not None or simple)
        self.tapes = Tapes(
            backend, network, embedding, rows.size, config.eps, scale=scale,
            cache_format=rows.cache.format, tapped=tapped,
            tokens=tokens if self.runs_ahead else None,
            slots=config.max_depth if chained else 0,
            links=_links(backend, output) if chained and backend.on_host else None,
            choosing=choosing, mask=None if mask is None or backend.on_host else _row(backend, mask),
        )  # fmt: skip
        self._begun = (
            0,
            0,
        )  # length and rows of context rows that are there or on their way already
        self._occurring = occurring
        if occurring is not None:
            occurring.link(self.tapes.links)

    @property
    def plan(self) -> Mapping[str, Any]:
        return self._plan

    @property
    def length(self) -> int:
        return self._rows.length

    @property
    def gap(self) -> int:
        return self._rows.first

    def begin(self, tokens: Sequence[int]) -> None:
        if len(tokens) > self._rows.context:
            raise RequestError(
                f"{len(tokens)} tokens exceed the draft's context of {self._rows.context}"
            )
        self._begun = (0, 0)
        self._rows.begin(tokens)
        if self._occurring is not None:
            self._occurring.saw(tokens)

    def extend(self, tokens: Sequence[int], features: Features) -> None:
        """Raises RequestError for features of another shape, too many rows or no room."""
        count, rows, backend = len(tokens), self._rows, self._backend
        if features.shape != (count, self._columns):
            raise RequestError(f"features are {features.shape}, expected {(count, self._columns)}")
        if count > backend.chunk:
            raise RequestError(f"{count} context rows at once, accepted are {backend.chunk}")
        if rows.length + count > rows.context:
            raise RequestError(
                f"{count} more tokens after {rows.length} exceed the draft's context of {rows.context}"
            )
        if 0 < count <= MAX_WIDTH:
            self._extend(tokens, features)
        else:
            done = 0
            for size in pieces(count, backend):
                self._extend(tokens[done : done + size], features[done : done + size])
                done += size
        if self._occurring is not None:
            self._occurring.saw(tokens)

    def extend_ahead(self, count: int) -> None:
        """Start context rows for tokens that the target computes just now, before it is known how many of them stay:
        those that `extend` is given next have their rows then. Only where features are read from the target's memory.
        """
        rows = self._rows
        if self.tapes.tapped is None or rows.length + count > rows.context:
            return
        rows.make_room(count)
        self.tapes.intake.send(self._words(count))
        self.tapes.context(count, tapped=True).start()
        self._begun = rows.length, count

    def _extend(self, tokens: Sequence[int], features: Features) -> None:
        count, there = len(tokens), self._tapped(features)
        (length, begun), self._begun = self._begun, (0, 0)
        if there and length == self._rows.length and count <= begun:
            self._rows.append(tokens)
            return
        if self._backend.on_host:
            self._backend.wait()
        self._rows.make_room(count)
        if not there:
            self.tapes.features.f32.array[:count] = features
        self.tapes.intake.send(self._words(count))
        self.tapes.context(count, tapped=there).start()
        self._rows.append(tokens)

    def propose(self, anchor: int, depth: int) -> Proposals:
        """Raises RequestError for a depth outside 1 .. max_depth or an anchor outside the vocabulary."""
        self._start(anchor, depth)
        if self.tapes.found is not None:
            self._backend.wait()
            chain = Chain(anchor, *self.tapes.chosen(depth))
            return BlockProposals(self.tapes.readout.whole(depth), self.output, chain)
        logits = self.tapes.readout.read(depth)
        if self._selector is None or self.tapes.selected is None:
            return BlockProposals(logits, self.output, self._chain(anchor, depth))
        hidden = self._backend.staging(self.tapes.selected)[:depth, : self.config.selector_rank]
        return SelectorProposals(logits, hidden, self.output, self._selector)

    def propose_ahead(self, anchor: int, depth: int) -> Ahead:
        """Start a block whose likeliest tokens the target takes from the device. Only if it `runs_ahead`."""
        assert self.runs_ahead
        self._start(anchor, depth)
        if self.tapes.found is None:
            return Ahead(lambda: self.tapes.readout.found(depth))
        chosen = self.tapes.chosen
        return Ahead(lambda: chosen(depth)[0], claims=lambda: chosen(depth)[1])

    def _start(self, anchor: int, depth: int) -> None:
        if not 1 <= depth <= self.max_depth:
            raise RequestError(f"depth {depth} is outside 1 .. {self.max_depth}")
        if not 0 <= anchor < self.output.n_vocab:
            raise RequestError(
                f"anchor {anchor} is outside the vocabulary of {self.output.n_vocab}"
            )
        rows, links, markov = self._block_rows(depth), self.tapes.links, self.output.markov
        self.tapes.intake.expand(anchor)  # perhaps while context rows are still computed
        before = markov.before.row(anchor) if links is not None and markov is not None else None
        if self._backend.on_host:
            self._backend.wait()
        self._begun = (0, 0)
        self._rows.make_room(rows)
        self._send(anchor, rows)
        if links is not None and before is not None:
            links.first.array[0] = before
        self.tapes.block(rows, self._first, depth).replay()

    def assume(self, length: int) -> None:
        self._backend.wait()
        self._begun = (0, 0)
        self._rows.assume(length)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Record (and compile) every tape: in a first start that takes seconds, which no request should wait for."""
        counts = [*range(1, MAX_WIDTH + 1), self._backend.chunk]
        depths = range(1, self.max_depth + 1)
        tapes = []
        for rows in counts:
            tapes.append(self.tapes.context(rows))
            if self.tapes.tapped is not None:
                tapes.append(self.tapes.context(rows, tapped=True))
        for depth in depths:
            tapes.append(self.tapes.block(self._block_rows(depth), self._first, depth))
        if self._occurring is not None and isinstance(self._occurring.change, Exchanged):
            tapes.append(self._occurring.change.tape)
        self._backend.prepare(
            tapes, (lambda done, total: progress("compile", done, total)) if progress else None
        )

    def _tapped(self, features: Features) -> bool:
        """Whether these lie at the beginning of the target's."""
        tapped = self.tapes.tapped
        return tapped is not None and self._backend.address(features) == tapped.f32.address

    def _chain(self, anchor: int, depth: int) -> Chain | None:
        picks = self.tapes.picks
        if picks is None:
            return None
        ids, chances = picks.ids.array[0, :depth].tolist(), picks.chances.array[0, :depth].tolist()
        if self.output.ids is not None:
            known = self.output.ids
            ids = [int(known[index]) for index in ids]
        return Chain(anchor, ids, chances)

    def _send(self, anchor: int, rows: int) -> None:
        """The block's parameters and rows: the anchor and masks."""
        intake, words = self.tapes.intake, self._words(rows)
        if self._mask is None or not self._backend.on_host:
            mask = self.config.mask_id if self._mask is None else -1
            intake.send(words, [anchor] + [mask] * (rows - 1))
            return
        intake.send(words, [anchor])
        intake.rows[1:rows] = self._mask

    @property
    def _first(self) -> int:
        """The block's first row that is a slot."""
        return 0 if self.config.from_anchor else 1

    def _block_rows(self, depth: int) -> int:
        return self._first + depth if self.config.shortens else self.config.block

    def _words(self, width: int) -> list[int]:
        """The parameters of a run of `width` rows."""
        rows, heads, p = self._rows, self.config.kv_heads, [0] * P.WORDS
        position, first, cache = rows.length - rows.base, max(0, rows.first - rows.base), rows.cache
        p[_POSITION], p[_ROTATION], p[_FIRST] = position, rows.base, first
        p[_KEYS], p[_VALUES], p[_HEAD_BYTES] = cache.keys, cache.values, cache.plane_bytes
        p[_ATTENTION_CHUNKS] = chunks(position, width, heads, first=first)
        window = self.config.window
        p[_WINDOW_CHUNKS] = window and chunks(position, width, heads, first=first, window=window)
        return p


def pieces(count: int, backend: Backend) -> list[int]:
    """How `count` context rows are split: every piece has a tape of its own, so few sizes are used on the host."""
    if count == backend.chunk:
        return [count]
    rest = [count % MAX_WIDTH] if count % MAX_WIDTH else []
    if backend.on_host:
        return [MAX_WIDTH] * (count // MAX_WIDTH) + rest
    return ([count - count % MAX_WIDTH] if count >= MAX_WIDTH else []) + rest


def _row(backend: Backend, values: Floats) -> Buffer:
    buffer = backend.buffer(1, len(values))
    backend.upload(buffer, values[None])
    return buffer


def _linkable(output: Output) -> bool:
    """Whether a tape can chain the slots: the Markov head's product is a weight, and its rows are not too many."""
    head = output.markov
    if head is None or not isinstance(head.product, VectorProduct):
        return False
    weight = head.product.weight
    return weight.outputs * weight.inputs <= _MOST_LINKS


def _hold(embedding: Table, output: Output) -> None:
    """Keep what a window of these ids needs of the tables on the host."""
    assert output.ids is not None
    if len(output.ids) * embedding.width <= _MOST_HELD:
        embedding.hold(output.ids)
        if output.markov is not None:
            output.markov.before.hold(output.ids)


def _links(backend: Backend, output: Output) -> Links | None:
    head = output.markov
    if head is None or not isinstance(head.product, VectorProduct):
        return None
    weight = head.product.weight
    ids = slice(weight.outputs) if output.ids is None else output.ids
    return links(backend, head.before.take(ids), weight)
