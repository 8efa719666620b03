"""Target: a loaded model that turns tokens into logits, over tapes recorded once per width."""

import threading
from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sparkinfer.backend.base import Backend, Buffer, Tape, Weight
from sparkinfer.errors import RequestError
from sparkinfer.gguf import GGUFFile
from sparkinfer.kernels import run_params as P
from sparkinfer.kernels.attention import chunks as attention_chunks
from sparkinfer.kernels.linear import linear
from sparkinfer.kernels.screen import MOST_ROWS
from sparkinfer.models.commit import commit_tape
from sparkinfer.models.config import MAX_WIDTH, ModelConfig
from sparkinfer.models.intake import Intake
from sparkinfer.models.layers import Run
from sparkinfer.models.memory import LOGIT_ROWS
from sparkinfer.models.readout import Readout
from sparkinfer.models.screening import Screening
from sparkinfer.models.table import Table
from sparkinfer.models.workspace import Workspace
from sparkinfer.sampling.lazy import LazyRow, LazyRows
from sparkinfer.state import Sequence, StateShape

Rows = Literal["last", "all", "none"]
Logits = Any  # float32 [rows, n_vocab], or LazyRows where logits stay on a device
Progress = Callable[[int, int], None]
LoadProgress = Callable[[str, int, int], None]
_POSITION, _ADVANCE, _KEYS, _VALUES, _HEAD_BYTES, _CONV, _ATTENTION_CHUNKS, _CONV_NEXT = (
    offset // 8
    for offset in (
        P.POSITION, P.ADVANCE, P.KEYS, P.VALUES, P.HEAD_BYTES, P.CONV, P.ATTENTION_CHUNKS, P.CONV_NEXT,
    )
)  # fmt: skip


@dataclass(frozen=True)
class Network:
    """Everything a forward needs: blocks in order, final norm, LM head, rotation table."""

    blocks: tuple[tuple[Any, Any], ...]
    output_norm: Buffer
    head: Weight
    rope_table: Buffer
    coarse: Any | None = None  # of the head, where greedy decoding screens it
    embedding: Weight | None = None  # where the host does not write the stream itself


@dataclass
class _Ahead:
    """A run that was started for the likeliest token after a state (`stamp`), before the host knows which that is."""

    stamp: tuple[int, int]
    serial: int
    place: int
    taps: tuple[int, ...]
    token: int | None = None  # once the host knows it


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
        self._tapped: Any = None
        self._workspace = Workspace(backend, backend.chunk)
        self._x = self._workspace.buffer("x", config.n_embd)
        logits = backend.buffer(min(LOGIT_ROWS, backend.chunk), network.head.padded_outputs)
        self._readout = Readout(backend, logits, config.n_vocab, largest=True)
        self._screening: Screening | None = None
        if network.coarse is not None:
            self._screening = Screening(
                backend, network.head, network.coarse, logits, config.n_vocab
            )
        self._whole_heads: dict[int, Tape] = {}
        self._tapes: dict[tuple[int, Rows, tuple[int, ...], bool, int], Tape] = {}
        self._commit: Tape | None = None
        name = "token_embd.weight"
        self.embedding = Table(file.tensors[name].type_name, file.blocks(name))
        self._intake = Intake(backend, self._x, self.embedding, network.embedding)
        self._ahead: _Ahead | None = None
        self._busy = threading.Lock()

    def new_state(self, context: int | None = None) -> Sequence:
        """An empty sequence of at most `context` tokens (default and most: the target's)."""
        size = self.context if context is None else context
        if not 1 <= size <= self.context:
            raise RequestError(
                f"context {size} is outside 1 .. {self.context}, what this target was loaded for"
            )
        return Sequence(
            self.state_shape, size, advance=self._advance, apply=self._apply, memory=self.backend
        )

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
            most = min(LOGIT_ROWS, self.backend.chunk) if rows == "all" else self.backend.chunk
            chunks = self._chunks(tokens, most)
            parts: list[Logits] = []
            for index, chunk in enumerate(chunks):
                wanted = "none" if rows == "last" and index + 1 < len(chunks) else rows
                state.begin()
                result = self._run(state, chunk, wanted, advance=True)
                state.extend(chunk)
                parts.append(np.array(result) if rows == "all" and len(chunks) > 1 else result)
            return np.concatenate(parts) if len(parts) > 1 and rows == "all" else parts[-1]

    def best(
        self, state: Sequence, tokens: Ids[int], *, rows: Rows = "last", verify: bool = False
    ) -> Logits:
        """`forward` for a caller that mostly wants each row's largest logit: the same rows, as `LazyRows` where that
        spares work. A row's other logits are computed when it is asked for them.
        """
        width = len(tokens)
        most = 1 if rows == "last" else MOST_ROWS
        unfit = self._screening is None or width > most or rows == "none"
        if unfit or self._screening is None or not self._screening.pays():
            return self.picked(self.forward(state, tokens, rows=rows, verify=verify))
        self._check(state, tokens, verify)
        with self._busy:
            if not verify:
                state.begin()
            tape = self._tape(width, rows, screened=True)
            self._intake.send(self._words(state, width, not verify), tokens)
            tape.replay()
            picks = self._screening.picks(width)
            if verify:
                state.hold(tokens)
            else:
                state.extend(tokens)
        return LazyRows(picks.tolist(), _Whole(self, width), self.config.n_vocab)

    @property
    def screened(self) -> dict[str, float] | None:
        """What `best` has screened since the load (`Screening.counts`); None where it never does."""
        return self._screening.counts() if self._screening else None

    def whole_head(self, width: int) -> Logits:
        """All logits of the last forward's `width` rows, of which `best` gave the largest."""
        with self._busy:
            tape = self._whole_heads.get(width)
            if tape is None:
                run = self._run_of(width)
                self._head(run)
                tape = self._whole_heads[width] = run.recorder.finish()
            tape.replay()
            return self._readout.read(width)

    def picked(self, rows: Logits) -> Logits:
        """What the last forward gave, as rows of which the largest logits are known already where that can be."""
        return self._readout.picked(len(rows)) if self._readout.holds(rows) else rows

    @property
    def next_tokens(self) -> tuple[Buffer, int] | None:
        """Where a device may write the tokens after an anchor for `verify_ahead`: a buffer of one row and its column.

        None where that cannot be.
        """
        return self._intake.column(1) if self.asynchronous else None

    def verify_ahead(
        self, state: Sequence, anchor: int, count: int, drafts: Ids[int] | None
    ) -> Callable[[Callable[[], Ids[int]]], tuple[list[int], Logits]]:
        """Start `forward` with `verify` for a window of `anchor` and `count` drafts, which nobody need know yet.

        Without `drafts` they are what the device writes to `next_tokens` before. The result waits: it is given what
        tells the drafts then, and gives the window's tokens and logits.
        """
        window = [anchor, *([0] * count if drafts is None else drafts)]
        self._check(state, window, verify=True)
        with self._busy:
            tape, words = self._tape(len(window), "all"), self._words(state, len(window), False)
            self.backend.join()
            self._intake.send(words, window if drafts is not None else [anchor])
            state.hold(window)  # their rows are about to be overwritten
            tape.replay()
            self.backend.mark()
            serial = self._intake.serial

        def finish(told: Callable[[], Ids[int]]) -> tuple[list[int], Logits]:
            with self._busy:
                rows = self._readout.read(len(window), serial=serial)
                tokens = [anchor, *told()]
                state.hold(tokens)
                return tokens, rows

        return finish

    @property
    def runs_ahead(self) -> bool:
        """Whether `row_after` can start a run before the host knows its token."""
        return self.asynchronous and self._intake.column(0) is not None

    def row_after(self, state: Sequence, token: int, *, ahead: bool) -> LazyRow:
        """`forward` of one token: its row. Only if it `runs_ahead`.

        `ahead`: most likely the row's best token comes next. So its run is started too, before this one's row is
        waited for. It leaves the state alone: a recurrent state is brought forward into a second one, and the two
        change places when that token does come. Raises RequestError for a bad token or no room.
        """
        self._check(state, [token], verify=False)
        with self._busy:
            known, self._ahead = self._ahead, None
            run = known if known is not None and self._holds(known, state, token) else None
            if run is None:
                run = _Ahead(state.stamp, 0, 0, self.taps)
                self._send(state, [token], advance=True, apart=True)
                self._tape(1, "last").replay()
                run.serial = self._intake.serial
            state.begin()
            if state.recurrent is not None:
                state.recurrent.change_places()
            state.extend([token])
            following = None
            if ahead and state.length < state.context:
                following = _Ahead(state.stamp, self._intake.passed(), 1 - run.place, self.taps)
                state.expect()
                self._tape(1, "last", place=following.place).replay()
            row: LazyRow = self._readout.read(1, run.place, run.serial)[0]
            if following is not None:
                following.token, self._ahead = row.best, following
            return row

    def _holds(self, run: _Ahead, state: Sequence, token: int) -> bool:
        """Whether a run ahead is this token's after this state, and the last one there was."""
        same = run.stamp == state.stamp and run.token == token
        return same and run.serial == self._intake.serial and run.taps == self.taps

    def prefill(
        self, state: Sequence, tokens: Ids[int], progress: Progress | None = None
    ) -> Logits:
        """Advance by a prompt; the logits of its last token [n_vocab]. `progress(done, total)` after each chunk."""
        self._check(state, tokens, verify=False)
        total, done, result = len(tokens), 0, None
        for chunk in self._chunks(tokens, self.backend.chunk):
            done += len(chunk)
            result = self.forward(state, chunk, rows="last" if done == total else "none")
            if progress:
                progress(done, total)
        assert result is not None
        return result[0]

    def set_taps(self, layers: Ids[int]) -> None:
        """Keep the residual stream after these layers (in this order) in every later forward; read it with `tapped`."""
        if layers == self.taps:
            return
        bad = [layer for layer in layers if not 0 <= layer < self.config.n_layers]
        if bad:
            raise RequestError(f"tap layers {bad} are outside 0 .. {self.config.n_layers - 1}")
        self.taps = tuple(layers)
        self._tapped = self.features(len(layers)).array if layers else None

    def tapped(self, rows: int) -> Any:
        """float32 [rows, taps x n_embd]: the residual stream after each tapped layer, side by side, of the last
        forward's (last chunk's) first rows, in the backend's memory. A view that the next forward overwrites.
        """
        return np.empty((rows, 0), np.float32) if self._tapped is None else self._tapped[:rows]

    def features(self, taps: int) -> Buffer:
        """Where forwards write the residual stream after `taps` tapped layers, side by side."""
        return self._workspace.buffer("features", taps * self.config.n_embd)

    @property
    def asynchronous(self) -> bool:
        """Whether what is only started runs while the host does something else."""
        return self.backend.asynchronous

    def feature_rows(self, rows: int) -> Any:
        """Memory for what `tapped` gives, of its kind."""
        return self.backend.zeros((rows, len(self.taps) * self.config.n_embd))

    def warm_up(self, widths: Ids[int], progress: LoadProgress | None = None) -> None:
        """Record (and compile) the tapes of these widths ahead of use; `progress("compile", done, total)`."""
        tapes = []
        for width in widths:
            rows: Rows = "all" if 1 < width <= MAX_WIDTH else "last"
            tapes.append(self._tape(width, rows))
            if width == 1 and self.runs_ahead and not self.taps:
                tapes.append(self._tape(width, rows, place=1))
            if self._screening is not None and width <= MOST_ROWS:
                tapes.append(self._tape(width, rows, screened=True))
        if any(self.config.recurrent):
            tapes.append(self._commit_tape())
        self.backend.prepare(
            tapes, (lambda done, total: progress("compile", done, total)) if progress else None
        )

    def wait(self) -> None:
        """Return when everything that was started has run."""
        self.backend.wait()

    def close(self) -> None:
        """Stop the threads and let go of the file."""
        with self._busy:
            self.backend.close()
            self.file.close()

    def _check(self, state: Sequence, tokens: Ids[int], verify: bool) -> None:
        if not tokens:
            raise RequestError("no tokens to run: at least one is needed")
        if state.shape is not self.state_shape and state.shape != self.state_shape:
            raise RequestError("the sequence was made by a target of another shape")
        if min(tokens) < 0 or max(tokens) >= self.config.n_vocab:
            bad = next(t for t in tokens if not 0 <= t < self.config.n_vocab)
            raise RequestError(f"token {bad} is outside the vocabulary of {self.config.n_vocab}")
        if verify and len(tokens) > MAX_WIDTH:
            raise RequestError(f"a window of {len(tokens)} rows is wider than {MAX_WIDTH}")
        state.room(len(tokens))

    def _chunks(self, tokens: Ids[int], most: int) -> list[Ids[int]]:
        """Runs of at most `most` rows. On a device wide runs have a multiple of 16 rows: fewer kinds of kernels."""
        if self.backend.on_host or len(tokens) <= MAX_WIDTH:
            return [tokens[start : start + most] for start in range(0, len(tokens), most)]
        wide = len(tokens) // MAX_WIDTH * MAX_WIDTH
        chunks = [tokens[start : min(wide, start + most)] for start in range(0, wide, most)]
        return [*chunks, tokens[wide:]] if wide < len(tokens) else chunks

    def _run(self, state: Sequence, tokens: Ids[int], rows: Rows, *, advance: bool) -> Logits:
        width = len(tokens)
        if not self.backend.on_host and 1 < width <= MAX_WIDTH:
            rows_run: Rows = "all"  # one graph a width
        else:
            rows_run = rows
        tape = self._tape(width, rows_run)
        self._send(state, tokens, advance=advance)
        tape.replay()
        if not advance:
            self.backend.mark()
        serial = self._intake.serial
        if rows == "none":
            return self._readout.buffer.array[:0]
        if rows == "last":
            return self._readout.read(1, width - 1 if rows_run == "all" else 0, serial)
        return self._readout.read(width, serial=serial)

    def _send(
        self, state: Sequence, tokens: Ids[int], *, advance: bool, apart: bool = False
    ) -> None:
        """Give the next run its parameters and tokens; `apart`: it leaves recurrent states in the spare ones."""
        self.backend.join()
        words = self._words(state, len(tokens), advance)
        if apart and state.recurrent is not None:
            words[_CONV_NEXT : _CONV_NEXT + 2] = state.recurrent.spare()
        self._intake.send(words, tokens)

    def _words(self, state: Sequence, width: int, advance: bool) -> list[int]:
        """The parameters of a run."""
        p, kv, length = [0] * P.WORDS, state.kv, state.length
        p[_POSITION], p[_ADVANCE], p[_KEYS], p[_VALUES] = length, advance, kv.keys, kv.values
        p[_HEAD_BYTES] = kv.plane_bytes
        p[_ATTENTION_CHUNKS] = attention_chunks(length, width, self.config.kv_heads)
        if state.recurrent is not None:
            p[_CONV : _CONV + 6] = state.recurrent.addresses
            p[_CONV_NEXT : _CONV_NEXT + 2] = state.recurrent.live
        return p

    def _tape(self, width: int, rows: Rows, *, screened: bool = False, place: int = 0) -> Tape:
        """`place`: the row of the readout for the last row's logits."""
        key = (width, rows, self.taps, screened, place)
        tape = self._tapes.get(key) or self._record(width, rows, screened, place)
        if self.backend.on_host or width <= MAX_WIDTH or width == self.backend.chunk:
            self._tapes[key] = tape
        return tape

    def _run_of(self, width: int) -> Run:
        return Run(
            self.backend.recorder(width, self.state_shape.kv.format), self._workspace, self._x, self._intake.params,
            self.network.rope_table, self.context, self.config.eps,
        )  # fmt: skip

    def _record(self, width: int, rows: Rows, screened: bool, place: int) -> Tape:
        network, run = self.network, self._run_of(width)
        self._intake.record(run.recorder)
        for index, (mixer, feed_forward) in enumerate(network.blocks):
            mixer.record(run)
            feed_forward.record(run)
            for tap, layer in enumerate(self.taps):
                if layer == index:
                    tapped = self.features(len(self.taps))
                    run.copy_stream(_columns(tapped, tap, self.config.n_embd))
        if rows != "none":
            if rows == "last":
                run = replace(run, x=self._x.part(width - 1, 1))
                run.recorder.rows = 1
            if screened and self._screening is not None:
                x = run.norm(network.output_norm, [network.head])
                self._screening.record(run.recorder, x)
            else:
                self._head(run, place)
                # A single row leaves what a run of its best token needs, where that can be.
                follows = width == 1 and rows == "last" and self.runs_ahead
                self._readout.record(
                    run.recorder,
                    self._intake.params,
                    row=place,
                    follows=P.WORDS if follows else None,
                )
        return run.recorder.finish()

    def _head(self, run: Run, place: int = 0) -> None:
        """All logits of the run's rows, in the readout's rows from `place` on."""
        head, out = self.network.head, self._readout.buffer
        x = run.norm(self.network.output_norm, [head])
        linear(run.recorder, x, [head], [out.part(place, 1) if place else out])

    def _advance(self, state: Sequence, tokens: Ids[int]) -> None:
        self.forward(state, tokens, rows="none")

    def _apply(self, state: Sequence, count: int) -> None:
        """Commit `count` recorded rows of the recurrent layers."""
        with self._busy:
            tape, words = self._commit_tape(), self._words(state, count, advance=False)
            words[P.COMMIT_ROWS // 8] = count
            with self.backend.beside():  # what a draft does next reads no state
                self._intake.send(words)
                tape.replay()

    def _commit_tape(self) -> Tape:
        assert self.state_shape.recurrent is not None
        if self._commit is None:
            self._commit = commit_tape(
                self.backend, self.state_shape.recurrent, self._intake.params
            )
        return self._commit


class _Whole:
    """Brings the rows of a screened forward, of which the first that is asked for has all computed."""

    def __init__(self, target: Target, width: int) -> None:
        self._target, self._width = target, width
        self._rows: Logits = None

    def __call__(self, row: int) -> Any:
        if self._rows is None:
            self._rows = self._target.whole_head(self._width)
        return self._rows[row]


def _columns(buffer: Buffer, place: int, width: int) -> Buffer:
    """The columns `place` x `width` .. of a shared buffer as a buffer."""
    first = place * width
    return replace(
        buffer,
        array=buffer.array[:, first : first + width],
        address=buffer.address + 4 * first,
        width=width,
    )
