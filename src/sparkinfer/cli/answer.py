"""Print a generation as it comes, and the one line that closes it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from sparkinfer.cli.console import (
    EXIT_INTERRUPTED,
    interrupt_ends_at_once,
    progress,
    status,
    write_answer,
)
from sparkinfer.cli.speculation import closing_words
from sparkinfer.options import Options

if TYPE_CHECKING:
    from sparkinfer.engine import Engine, Generation, Result

_ENDS = {
    "stop": "the answer is complete",
    "length": "cut at -n",
    "context": "the context is full (-c)",
    "cancelled": "interrupted",
}


def stream(
    start: Callable[[Callable[[int, int], None]], "Generation"],
    options: Options,
    *,
    write: Callable[[str], None] = write_answer,
) -> "Result":
    """Write the pieces of a generation as they come and return its result.

    `start` is called with a function that takes the prompt's progress (done, total). The first
    Ctrl-C ends the answer after the step it is in, the second one the process.
    """
    from sparkinfer.engine import cancel_on_interrupt

    with interrupt_ends_at_once():
        with progress(options) as report:
            generation = start(lambda done, total: report("reading the prompt", done, total))
            with cancel_on_interrupt(generation):
                first = next(generation, None)
        if first is not None:
            write(first.text)
        with cancel_on_interrupt(generation):
            for delta in generation:
                write(delta.text)
        return generation.result


def exit_code(result: "Result") -> int:
    return EXIT_INTERRUPTED if result.finish_reason == "cancelled" else 0


def closing_line(result: "Result", start: str) -> str:
    """Return counts and speeds of a finished answer, and what speculation gained.

    `start` is what `Engine.speculation` said before.
    """
    times, usage = result.timings, result.usage
    prompt = f"prompt {usage.prompt_tokens} tokens"
    if usage.cached_tokens:
        prompt += f" ({usage.cached_tokens} kept from before)"
    if times.prefill_tok_s:
        prompt += f" at {times.prefill_tok_s:.0f} tok/s"
    answer = f"answer {usage.completion_tokens} tokens"
    if times.decode_tok_s:
        answer += f" at {times.decode_tok_s:.0f} tok/s"
    first = f"first token after {times.ttft_s:.2f} s"
    gain = f"speculation: {closing_words(result, start)}"
    return " · ".join([prompt, first, answer, _ENDS[result.finish_reason], gain])


def show_logprobs(engine: "Engine", result: "Result") -> None:
    """Print one line a token: its text, log-probability and alternatives."""

    def text_of(token: int) -> str:
        pieces = engine.tokenizer.detokenizer()
        return repr(pieces.push(token) + pieces.flush())

    for row in result.logprobs:
        others = "  ".join(f"{text_of(token)} {value:.3f}" for token, value in row.top)
        status(f"{text_of(row.token)} {row.logprob:.3f}  [{others}]")
