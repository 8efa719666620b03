"""From the logits of a block to tokens of the target: scaling, a reduced vocabulary and the Markov head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.dflash.base import Logits
from sparkinfer.quant.formats import QUANT_FORMATS, dequantize

LEAST = np.float32(-1e30)  # logit of an id that the draft cannot propose


@dataclass(frozen=True)
class Table:
    """Rows of a matrix in a file, read one at a time: uint8 [rows, row bytes]."""

    type_name: str
    rows: NDArray[np.uint8]

    def take(self, ids: Any) -> NDArray[np.float32]:
        """Some rows (a list or a slice) as float32 [n, width]."""
        block = QUANT_FORMATS[self.type_name].block_bytes
        rows = self.rows[ids]
        values = dequantize(self.type_name, rows.reshape(-1, block))
        return np.asarray(values, np.float32).reshape(len(rows), -1)


@dataclass(frozen=True)
class MarkovHead:
    """Adds W1[previous] W2^T to a slot's logits.

    `before` is W1 [target ids, rank]; `product` multiplies a vector [rank] with W2 [draft ids, rank] and may overwrite
    its last result.
    """

    before: Table
    product: Callable[[NDArray[np.float32]], NDArray[np.float32]]

    def bias(self, previous: int) -> NDArray[np.float32]:
        """float32 [draft ids], valid until the next call."""
        return self.product(self.before.take([previous])[0])


@dataclass(frozen=True)
class Output:
    """What turns raw logits [draft ids] into logits over the target's ids."""

    n_vocab: int
    ids: NDArray[np.int64] | None = None  # target's id of each draft id; None: they are the same
    multiplier: float = 1.0
    softcap: float = 0.0
    markov: MarkovHead | None = None

    def logits(self, raw: Logits, previous: int) -> Logits:
        """Final logits over the draft's ids. A new array, unless nothing changes them."""
        if self.multiplier != 1.0:
            raw = raw * np.float32(self.multiplier)
        if self.softcap > 0:
            raw = np.tanh(raw / np.float32(self.softcap)) * np.float32(self.softcap)
        if self.markov is not None:
            raw = raw + self.markov.bias(previous)
        return raw

    def best(self, raw: Logits, previous: int) -> int:
        """Scaling that keeps the order is not computed."""
        ordered = self.markov is None and self.multiplier > 0
        index = int(np.argmax(raw if ordered else self.logits(raw, previous)))
        return index if self.ids is None else int(self.ids[index])

    def row(self, raw: Logits, previous: int) -> Logits:
        """Finite logits over the target's ids, a new array."""
        values = self.logits(raw, previous)
        if self.ids is None:
            out = values.copy() if values is raw else values
        else:
            out = np.full(self.n_vocab, LEAST, np.float32)
            out[self.ids] = values
        return np.nan_to_num(out, copy=False, nan=LEAST, posinf=-LEAST, neginf=LEAST)


@dataclass(frozen=True)
class BlockProposals:
    """Raw logits of a block's slots, float32 [depth, draft ids], overwritten by the draft's next call."""

    raw: Logits
    output: Output

    @property
    def depth(self) -> int:
        return len(self.raw)

    def best(self, slot: int, previous: int) -> int:
        return self.output.best(self.raw[slot], previous)

    def row(self, slot: int, previous: int) -> Logits:
        return self.output.row(self.raw[slot], previous)
