"""Target: a loaded model that turns tokens into logits, over tapes recorded once per width."""

import threading
from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend.base import Backend, Buffer, Tape, Weight
from sparkinfer.errors import RequestError
from sparkinfer.gguf import GGUFFile
from sparkinfer.kernels import run_params as P
from sparkinfer.kernels.attention import chunks as attention_chunks
from sparkinfer.kernels.linear import linear
from sparkinfer.models.commit import commit_tape
from sparkinfer.models.config import MAX_WIDTH, ModelConfig
from sparkinfer.models.layers import Run
from sparkinfer.models.table import Table
from sparkinfer.models.workspace import Workspace
from sparkinfer.state import Sequence, StateShape

Rows = Literal["last", "all", "none"]
Logits = NDArray[np.float32]
Progress = Callable[[int, int], None]
LoadProgress = Callable[[str, int, int], None]
CHUNK = 64  # rows of a prefill chunk


@dataclass(frozen=True)
class Network:
    """Everything a forward needs: blocks in order, final norm, LM head, rotation table."""

    blocks: tuple[tuple[Any, Any], ...]
    output_norm: Buffer
    head: Weight
    rope_table: Buffer


class Target:
    """One loaded model. One forward at a time; `Sequence` holds what differs between sequences."""

    max_width = MAX_WIDTH

    def __init__(
        self,
        file: GGUFFile,
        config: ModelConfig,
        backend: Backend,
        network: Network,
        state_shape: StateShape,
        context: int,
        plan: dict[str, Any],
        weight_bytes_per_token: int,
    ) -> None:
        self.file, self.config, self.backend, self.network = file, config, backend, network
        self.state_shape, self.context, self.plan = state_shape, context, plan
        self.weight_bytes_per_token = weight_bytes_per_token
        self.taps: tuple[int, ...] = ()
        self._workspace = Workspace(backend, CHUNK)
        self._x = self._workspace.buffer("x", config.n_embd)
        self._params = backend.buffer(1, P.WORDS, np.int64)
        self._tapes: dict[tuple[int, Rows, tuple[int, ...]], Tape] = {}
        self._commit: Tape | None = None
        name = "token_embd.weight"
        self.embedding = Table(file.tensors[name].type_name, file.blocks(name))
        self._busy = threading.Lock()

    def new_state(self, context: int | None = None) -> Sequence:
        """An empty sequence of at most `context` tokens (default and most: the target's)."""
        size = self.context if context is None else context
        if not 1 <= size <= self.context:
            raise RequestError(
                f"context {size} is outside 1 .. {self.context}, what this target was loaded for"
            )
        return Sequence(self.state_shape, size, advance=self._advance, apply=self._apply)

    def forward(
        self, state: Sequence, tokens: Ids[int], *, rows: Rows = "last", verify: bool = False
    ) -> Logits:
        """Run tokens through the model; float32 logits [n, n_vocab] for the last, all or no rows.

        Advances `state`; with `verify` (at most `max_width` tokens) the state stays as it is until `state.commit`.
        The result and `tapped` are overwritten by the next forward. Raises RequestError for a bad token or no room.
        """
        self._check(state, tokens, verify)
        with self._busy:
            if verify:
                result: Logits = self._run(state, tokens, rows, advance=False)
                state.hold(tokens)
                return result
            parts: list[Logits] = []
            for start in range(0, len(tokens), CHUNK):
                chunk = tokens[start : start + CHUNK]
                wanted = "none" if rows == "last" and start + CHUNK < len(tokens) else rows
                state.begin()
                result = self._run(state, chunk, wanted, advance=True)
                state.extend(chunk)
                parts.append(result.copy() if rows == "all" and len(tokens) > CHUNK else result)
            return np.concatenate(parts) if len(parts) > 1 and rows == "all" else parts[-1]

    def prefill(
        self, state: Sequence, tokens: Ids[int], progress: Progress | None = None
    ) -> Logits:
        """Advance by a prompt; the logits of its last token [n_vocab]. `progress(done, total)` after each chunk."""
        self._check(state, tokens, verify=False)
        total, result = len(tokens), None
        for start in range(0, total, CHUNK):
            chunk = tokens[start : start + CHUNK]
            result = self.forward(state, chunk, rows="last" if start + CHUNK >= total else "none")
            if progress:
                progress(start + len(chunk), total)
        assert result is not None
        last: Logits = result[0]
        return last

    def set_taps(self, layers: Ids[int]) -> None:
        """Keep the residual stream after these layers (in this order) in every later forward; read it with `tapped`."""
        bad = [layer for layer in layers if not 0 <= layer < self.config.n_layers]
        if bad:
            raise RequestError(f"tap layers {bad} are outside 0 .. {self.config.n_layers - 1}")
        self.taps = tuple(layers)

    def tapped(self, rows: int) -> NDArray[np.float32]:
        """float32 [rows, taps x n_embd]: the residual stream after each tapped layer, side by side, of the last
        forward's (last chunk's) first rows. A view that the next forward overwrites.
        """
        if not self.taps:
            return np.empty((rows, 0), np.float32)
        features: NDArray[np.float32] = self._features().array[:rows]
        return features

    def warm_up(self, widths: Ids[int], progress: LoadProgress | None = None) -> None:
        """Record (and compile) the tapes of these widths ahead of use; `progress("compile", done, total)`."""
        for done, width in enumerate(widths, 1):
            self._tape(width, "all" if 1 < width <= MAX_WIDTH else "last")
            if progress:
                progress("compile", done, len(widths))

    def close(self) -> None:
        """Stop the threads and let go of the file."""
        with self._busy:
            self.backend.close()
            self.file.close()

    def _check(self, state: Sequence, tokens: Ids[int], verify: bool) -> None:
        if not tokens:
            raise RequestError("no tokens to run: at least one is needed")
        if state.shape != self.state_shape:
            raise RequestError("the sequence was made by a target of another shape")
        bad = next((t for t in tokens if not 0 <= t < self.config.n_vocab), None)
        if bad is not None:
            raise RequestError(f"token {bad} is outside the vocabulary of {self.config.n_vocab}")
        if verify and len(tokens) > MAX_WIDTH:
            raise RequestError(f"a window of {len(tokens)} rows is wider than {MAX_WIDTH}")
        state.room(len(tokens))

    def _run(self, state: Sequence, tokens: Ids[int], rows: Rows, *, advance: bool) -> Logits:
        width = len(tokens)
        tape = self._tape(width, rows)
        self.embedding.write(tokens, self._x.array)
        self._set_params(state, width, advance)
        tape.replay()
        count = {"last": 1, "all": width, "none": 0}[rows]
        logits: Logits = self._logits().array[:count, : self.config.n_vocab]
        return logits

    def _set_params(self, state: Sequence, width: int, advance: bool) -> None:
        p = self._params.array[0]
        p[P.POSITION // 8] = state.length
        p[P.ADVANCE // 8] = advance
        p[P.KEYS // 8], p[P.VALUES // 8], p[P.HEAD_BYTES // 8] = (
            state.kv.keys,
            state.kv.values,
            state.kv.plane_bytes,
        )
        p[P.ATTENTION_CHUNKS // 8] = attention_chunks(state.length, width, self.config.kv_heads)
        if state.recurrent is not None:
            r = state.recurrent
            arrays = (r.conv, r.delta, r.conv_record, r.key_record, r.delta_record, r.decay_record)
            p[P.CONV // 8 : P.CONV // 8 + 6] = [a.ctypes.data for a in arrays]

    def _logits(self) -> Buffer:
        return self._workspace.buffer("logits", self.network.head.padded_outputs)

    def _features(self) -> Buffer:
        return self._workspace.buffer("features", len(self.taps) * self.config.n_embd)

    def _tape(self, width: int, rows: Rows) -> Tape:
        key = (width, rows, self.taps)
        if key not in self._tapes:
            self._tapes[key] = self._record(width, rows)
        return self._tapes[key]

    def _record(self, width: int, rows: Rows) -> Tape:
        network = self.network
        run = Run(
            self.backend.recorder(width), self._workspace, self._x, self._params, network.rope_table, self.context,
            self.config.eps,
        )  # fmt: skip
        for index, (mixer, feed_forward) in enumerate(network.blocks):
            mixer.record(run)
            feed_forward.record(run)
            for place, layer in enumerate(self.taps):
                if layer == index:
                    run.copy_stream(_columns(self._features(), place, self.config.n_embd))
        if rows != "none":
            if rows == "last":
                run = replace(run, x=self._x.part(width - 1, 1))
                run.recorder.rows = 1
            linear(
                run.recorder,
                run.norm(network.output_norm, [network.head]),
                [network.head],
                [self._logits()],
            )
        return run.recorder.finish()

    def _advance(self, state: Sequence, tokens: Ids[int]) -> None:
        self.forward(state, tokens, rows="none")

    def _apply(self, state: Sequence, count: int) -> None:
        """Commit `count` recorded rows of the recurrent layers."""
        assert self.state_shape.recurrent is not None
        with self._busy:
            if self._commit is None:
                self._commit = commit_tape(self.backend, self.state_shape.recurrent, self._params)
            self._set_params(state, count, advance=False)
            self._params.array[0, P.COMMIT_ROWS // 8] = count
            self._commit.replay()


def _columns(buffer: Buffer, place: int, width: int) -> Buffer:
    """The columns `place` x `width` .. of a shared buffer as a buffer."""
    first = place * width
    return replace(
        buffer,
        array=buffer.array[:, first : first + width],
        address=buffer.address + 4 * first,
        width=width,
    )
