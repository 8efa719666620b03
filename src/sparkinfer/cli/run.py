"""`sparkinfer run`: one prompt, one streamed answer."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkinfer.cli.console import status, write_answer
from sparkinfer.cli.flags import ProcessFlags, verb
from sparkinfer.cli.sampling_flags import RequestFlags, RequestParts
from sparkinfer.errors import MissingFileError, OptionError
from sparkinfer.options import Options

if TYPE_CHECKING:
    from sparkinfer.engine import Engine, Generation, Result

NO_MODEL = (
    "no model given; -m takes a GGUF file, hf:user/repo[:quant],"
    " or smollm2 (135M parameters, fetched on first use)"
)


@verb(RequestFlags(), ProcessFlags("threads", "context", "activations", "isa", "cache_dir"))
def command(
    *,
    words: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The prompt, as -p gives it.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", help="A GGUF file, a known name or hf:user/repo[:quant]."),
    ] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt.")] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="Read the prompt from a file; - is stdin.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("-sys", "--system", "--system-prompt", help="System message.")
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", "-no-cnv", help="Continue the text itself, without a chat template."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    print_plan: Annotated[
        bool, typer.Option("--print-plan", help="Show what was resolved for this machine.")
    ] = False,
    request: RequestParts,
    options: Options,
) -> int:
    """Answer one prompt. The answer goes to standard output, all else to standard error."""
    from sparkinfer.cli.answer import closing_line, exit_code, show_logprobs, stream
    from sparkinfer.cli.loading import load_engine

    if model is None:
        raise OptionError(NO_MODEL)
    text = read_prompt([words, prompt], file)
    if raw and system is not None:
        raise OptionError("--system needs the chat template that --raw leaves out")
    with load_engine(model, options) as engine:
        if print_plan:
            show_plan(engine)
        write = _ignore if as_json else write_answer
        result = stream(_start(engine, text, system, raw, request), options, write=write)
        if as_json:
            print_json(engine, result, options)
        else:
            write_answer("\n")
            if request.sampling.logprobs is not None:
                show_logprobs(engine, result)
        status(closing_line(result))
    return exit_code(result)


def _start(
    engine: "Engine", text: str, system: str | None, raw: bool, request: RequestParts
) -> Callable[[Callable[[int, int], None]], "Generation"]:
    def start(report: Callable[[int, int], None]) -> "Generation":
        if raw:
            prompt: Any = text
        else:
            messages = [] if system is None else [{"role": "system", "content": system}]
            prompt = engine.encode_chat([*messages, {"role": "user", "content": text}])
        return engine.stream(
            prompt,
            progress=report,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            stop=request.stop,
        )

    return start


def read_prompt(given: list[str | None], file: Path | None) -> str:
    """Return the one prompt: of the arguments, a file, or what is piped in."""
    prompts = [text for text in given if text is not None]
    if len(prompts) + (file is not None) > 1:
        raise OptionError("more than one prompt given; use one of PROMPT, -p and -f")
    if file is not None and str(file) != "-":
        return _read(file)
    if prompts:
        return prompts[0]
    if file is None and sys.stdin.isatty():
        raise OptionError("no prompt given; use -p TEXT or -f FILE, or pipe it in")
    return _decoded(sys.stdin.buffer.read(), "standard input")


def _read(file: Path) -> str:
    try:
        return _decoded(file.read_bytes(), str(file))
    except OSError as error:
        raise MissingFileError(f"cannot read the prompt file {file}: {error.strerror}") from error


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"{source} is not UTF-8 text at byte {error.start}") from error


def _ignore(_text: str) -> None:
    pass


def show_plan(engine: "Engine") -> None:
    for key, value in engine.plan.items():
        status(f"plan: {key} = {value}")


def print_json(engine: "Engine", result: "Result", options: Options) -> None:
    """Print the result with all that led to it."""
    import json

    facts = {**result.to_dict(), "plan": dict(engine.plan), "options": options.block()}
    print(json.dumps(facts, default=str))
