"""The part of a draft's vocabulary that waits until the text has it.

A draft's head is read for every slot, so its rows are dear, and rare tokens pay only where they have come up: a name
in the question, a word of the answer's topic. Of such a vocabulary the first tokens, the active ones, always have a
row; the others share ROOM more, each given to one that occurs, in place of the one that has not occurred for longest.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend.base import Backend, Weight
from sparkinfer.kernels.exchange_rows import Rows as Places
from sparkinfer.kernels.exchange_rows import exchange_rows
from sparkinfer.kernels.greedy_chain import Links
from sparkinfer.kernels.linear import pack_weight
from sparkinfer.kernels.linear.weights import PackedWeight
from sparkinfer.models.table import Table
from sparkinfer.quant.formats import QUANT_FORMATS

_LARGEST = 65504.0  # of float16
ROOM = 512  # rows for tokens that occur
Change = Callable[[Mapping[int, int]], None]  # by place, the output that gets it


@dataclass(frozen=True)
class Rows:
    """A matrix with a row for each output of the draft: row `numbers[o]` of `table` (None: o) is output o's."""

    table: Table
    numbers: NDArray[np.int64] | None = None
    exact: bool = False  # expand to float32
    half: bool = False  # else to float16

    @property
    def kind(self) -> str:
        return "F32" if self.exact else "F16" if self.half else self.table.type_name

    def blocks(self, outputs: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Their rows as GGUF blocks, uint8 [n, block bytes]."""
        numbers = outputs if self.numbers is None else self.numbers[outputs]
        if self.exact:
            rows = self.table.take(numbers).view(np.uint8)
        elif self.half:
            rows = self.table.take(numbers).clip(-_LARGEST, _LARGEST).astype(np.float16)
        else:
            rows = self.table.rows[numbers]
        return rows.view(np.uint8).reshape(-1, QUANT_FORMATS[self.kind].block_bytes)

    def pack(self, backend: Backend, outputs: NDArray[np.int64]) -> Weight:
        """These rows as a weight."""
        blocks = self.blocks(outputs)
        return pack_weight(backend, self.kind, blocks, len(outputs), self.table.width)


def first_shown(active: int, outputs: int) -> NDArray[np.int64]:
    """The outputs that have rows at first: the active ones (0: all), and the first of the others."""
    return np.arange(min(active + ROOM, outputs) if active else outputs)


class Repacked:
    """Weights of the host, of which the tiles are packed anew that have another row."""

    def __init__(
        self, weights: Sequence[tuple[PackedWeight, Rows]], shown: NDArray[np.int64]
    ) -> None:
        """`shown`: the outputs of the weights' rows, by the time that they change."""
        self._weights, self._shown = weights, shown

    def __call__(self, changed: Mapping[int, int]) -> None:
        """Nothing that reads the weights may run meanwhile."""
        for weight, rows in self._weights:
            for tile in {place // weight.lanes for place in changed}:
                there = self._shown[tile * weight.lanes : (tile + 1) * weight.lanes]
                weight.put(tile, rows.blocks(there), len(there))


class Exchanged:
    """Rows on a device, which has those of all outputs and copies them to their places when it is told to."""

    def __init__(self, backend: Backend, most: int, pairs: Sequence[tuple[Places, Places]]) -> None:
        """`pairs`: what is read, and the like for all outputs. At most `most` places change at once."""
        changes = backend.buffer(1, 1 + 2 * most, np.int64)
        self._mailbox, recorder = backend.mailbox(changes), backend.recorder(1)
        exchange_rows(recorder, changes, most, pairs)
        self.tape, self._pairs = recorder.finish(), pairs

    def __call__(self, changed: Mapping[int, int]) -> None:
        """In order with what was started before and what is started after."""
        self._mailbox.send([len(changed), *(n for change in changed.items() for n in change)])
        self.tape.replay()


class Occurring:
    """Which outputs have rows, kept in step with a text, and the places where they stand."""

    def __init__(
        self,
        ids: NDArray[np.int64],
        active: int,
        shown: NDArray[np.int64],
        change: Change,
        before: Table | None,
    ) -> None:
        """`ids` are the target's of all outputs. `shown`: the outputs of the weights' rows, changed in place, as
        `shown_ids` is; then `change` puts the rows there. `before` has a row for each target id of what a Markov head
        starts from.
        """
        self._ids, self._shown, self.change, self._before = ids, shown, change, before
        self.shown_ids = ids[shown]
        self._links: Links | None = None
        waiting = range(active, len(ids))
        self._waiting = dict(zip(ids[active:].tolist(), waiting, strict=True))
        places = range(active, len(shown))
        self._places = OrderedDict(zip(shown[active:].tolist(), places, strict=True))

    def link(self, links: Links | None) -> None:
        """`links.before` has the rows of `before` for what is shown; they change with it."""
        self._links = links

    def saw(self, tokens: Sequence[int]) -> None:
        """These tokens have come up in the text. Nothing that reads a host's weights may run meanwhile."""
        changed = {}
        for token in tokens:
            output = self._waiting.get(token)
            if output is None:
                continue
            if output in self._places:
                self._places.move_to_end(output)
                continue
            _, place = self._places.popitem(last=False)
            self._places[output] = place
            self._shown[place], self.shown_ids[place] = output, token
            if self._links is not None and self._before is not None:
                self._links.before.array[place] = self._before.row(token)
            changed[place] = output
        if changed:
            self.change(changed)
