"""Generation: one request running, iterated piece by piece, with a Result at the end."""

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType, TracebackType

from sparkinfer.decoding import Decoder, Progress, StepResult
from sparkinfer.engine.output import Output
from sparkinfer.engine.prefix import PrefixCache
from sparkinfer.engine.request import Request
from sparkinfer.engine.result import Delta, FinishReason, PathCount, Result, Timings, Usage
from sparkinfer.errors import RequestError
from sparkinfer.sampling import Sampler, TokenHistory


class _Cancelled(Exception):
    """Leaves a prefill between two chunks."""


class Generation(Iterator[Delta]):
    """Iterate for the pieces of text as they come; `result` is complete after the last one.

    Nothing runs before the first piece is asked for. `cancel` (from any thread, or a signal
    handler) ends it at the next step or prefill chunk and keeps what there is. A KeyboardInterrupt
    inside a step is raised, and leaves a `result` with the text so far.
    """

    def __init__(
        self,
        request: Request,
        decoder: Decoder,
        prefix: PrefixCache,
        sampler: Sampler,
        output: Output,
        *,
        busy: threading.Lock,
        progress: Progress | None = None,
        on_finish: Callable[[Result], None] | None = None,
        load_seconds: float = 0.0,
    ) -> None:
        self.request = request
        self._decoder = decoder
        self._prefix = prefix
        self._sampler = sampler
        self._output = output
        self._progress = progress
        self._on_finish = on_finish
        self._busy = busy
        self._cancelled = False
        self._begun = False
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._cached = 0
        self._computed = 0  # prompt tokens, so far
        self._paths: dict[str, PathCount] = {}
        self._parts: Counter[str] = Counter()
        self._clock = _Clock(load_seconds)

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> Delta:
        if self._result is not None or self._error is not None:
            raise StopIteration
        if not self._busy.acquire(blocking=False):
            raise RequestError(
                "the engine is in the middle of another step; use one thread at a time"
            )
        try:
            with self._clock:
                delta = self._advance()
        except KeyboardInterrupt:
            self._prefix.invalidate()
            self._end("cancelled")
            raise
        except BaseException as error:
            self._prefix.invalidate()
            self._error = error
            raise
        finally:
            self._busy.release()
        if self._output.finish_reason is not None:
            self._close()
        if not (delta.text or delta.tokens):
            raise StopIteration
        return delta

    @property
    def result(self) -> Result:
        """The result; runs the generation to its end first if need be.

        Raises: what a step raised, if one did.
        """
        for _ in self:
            pass
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Ask the generation to end at the next step; no effect once it has ended."""
        self._cancelled = True

    def _advance(self) -> Delta:
        """One step: the first one also computes the prompt."""
        if not self._begun and not self._cancelled:
            self._begun = True
            self._prefill()
        if self._cancelled and self._output.finish_reason is None:
            self._output.finish("cancelled")
        if self._output.finish_reason is not None:
            return Delta(self._output.take())
        step = self._decoder.step(self._output.room)
        return self._commit(step)

    def _prefill(self) -> None:
        prompt = self.request.prompt
        started = perf_counter()
        state, self._cached = self._prefix.acquire(prompt, reuse=self.request.reuse_prefix)
        rest = prompt[self._cached :]
        try:
            history = TokenHistory(prompt)
            self._decoder.begin(state, rest, self._sampler, history, self._report)
            self._computed = len(rest)
        except _Cancelled:
            pass  # between two chunks: the state is whole, and `_advance` sees the flag
        self._clock.prefilled(perf_counter() - started, self._computed)

    def _report(self, done: int, total: int) -> None:
        self._prefix.passed(done - self._computed, total - done)
        self._computed = done
        if self._progress is not None:
            self._progress(done, total)
        if self._cancelled and done < total:
            raise _Cancelled

    def _commit(self, step: StepResult) -> Delta:
        """Take a step's tokens one by one; what follows the end never reaches the state."""
        logprobs = step.logprobs or (None,) * len(step.tokens)
        kept = 0
        for token, logprob in zip(step.tokens, logprobs, strict=True):
            kept += 1
            if self._output.push(token, logprob):
                break
        self._decoder.commit(kept)
        self._count(step, kept)
        return Delta(self._output.take(), step.tokens[:kept], step.logprobs[:kept])

    def _count(self, step: StepResult, kept: int) -> None:
        name = f"{step.path}/{step.mode}" if step.mode else step.path
        self._paths.setdefault(name, PathCount()).add(step, kept)
        self._parts.update(step.seconds)
        self._clock.stepped(kept)

    def _end(self, reason: FinishReason) -> None:
        if self._output.finish_reason is None:
            self._output.finish(reason)
        self._close()

    def _close(self) -> None:
        output = self._output
        assert output.finish_reason is not None
        self._result = Result(
            text=output.text,
            tokens=tuple(output.tokens),
            logprobs=tuple(output.logprobs),
            finish_reason=output.finish_reason,
            stop=output.stop,
            usage=Usage(len(self.request.prompt), self._cached, len(output.tokens)),
            timings=self._clock.timings(dict(self._parts)),
            paths=self._paths,
            seed=self._sampler.seed,
            speculation=self._decoder.report() if self._begun else None,
        )
        if self._on_finish is not None:
            self._on_finish(self._result)


class _Clock:
    """Adds up the time inside `__next__`, so that a slow consumer is not counted."""

    def __init__(self, load_seconds: float) -> None:
        self._load = load_seconds
        self._total = 0.0
        self._entered = 0.0
        self._first: float | None = None  # of the total, at the end of the first step
        self._first_tokens = 0
        self._tokens = 0
        self._prefill = (0.0, 0)

    def __enter__(self) -> None:
        self._entered = perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._total += perf_counter() - self._entered

    def prefilled(self, seconds: float, tokens: int) -> None:
        self._prefill = (seconds, tokens)

    def stepped(self, tokens: int) -> None:
        self._tokens += tokens
        if self._first is None:
            self._first = self._total + perf_counter() - self._entered
            self._first_tokens = tokens

    def timings(self, parts: dict[str, float]) -> Timings:
        first = self._first or 0.0
        later = self._tokens - self._first_tokens
        return Timings(
            load_s=self._load,
            prefill_s=self._prefill[0],
            prefill_tokens=self._prefill[1],
            ttft_s=first,
            decode_s=self._total - first if later else 0.0,
            decode_tokens=later,
            total_s=self._total,
            parts=parts,
        )


@contextmanager
def cancel_on_interrupt(generation: Generation) -> Iterator[None]:
    """While inside, the first Ctrl-C cancels the generation at a step's end, the second raises.

    In a thread other than the main one signals cannot be taken over, and nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous)
        generation.cancel()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
