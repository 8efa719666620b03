"""`sparkinfer run`: one prompt, one streamed answer."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkinfer.cli.console import progress, status, write_answer
from sparkinfer.cli.flags import LOADING, SPECULATION, ProcessFlags, verb
from sparkinfer.cli.sampling_flags import RequestFlags, RequestParts
from sparkinfer.cli.speculation import announce, comparison_lines, show_stats
from sparkinfer.errors import MissingFileError, OptionError
from sparkinfer.options import Options

if TYPE_CHECKING:
    from sparkinfer.bench.compare import Comparison
    from sparkinfer.engine import Engine, Generation, Result

EXIT_DIFFERENT = 1  # of --compare: the outputs are not the same
DEFAULT_ROUNDS = 2  # of --compare
_HALVES = re.compile("[\udc80-\udcff]")  # how Python keeps bytes that it could not decode
NO_MODEL = (
    "no model given; -m takes a GGUF file, hf:user/repo[:quant],"
    " or smollm2 (135M parameters, fetched on first use)"
)


@verb(
    RequestFlags(),
    ProcessFlags(*LOADING, *SPECULATION),
)
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
    show_all: Annotated[
        bool, typer.Option("--stats", help="A table of the answer's steps on standard error.")
    ] = False,
    compared: Annotated[
        bool,
        typer.Option("--compare", help="Also decode plainly, in turns: what does the draft gain?"),
    ] = False,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=2, max=100, help="Rounds of --compare, or 2.")
    ] = None,
    request: RequestParts,
    options: Options,
) -> int:
    """Answer one prompt. The answer goes to standard output, all else to standard error."""
    from sparkinfer.cli.answer import closing_line, exit_code, show_logprobs, stream
    from sparkinfer.cli.loading import load_engine

    if not model:
        raise OptionError(NO_MODEL)
    text = read_prompt([words, prompt], file)
    system = None if system is None else unicode_text(system, "the system message")
    if raw and system is not None:
        raise OptionError("--system needs the chat template that --raw leaves out")
    if compared and options.text("spec") == "off":
        raise OptionError("--compare needs speculation, which --spec off switches off")
    if not compared and rounds is not None:
        raise OptionError("--rounds says how often --compare runs, and that is not given")
    with load_engine(model, options) as engine:
        if compared and engine.decoder.describe() is None:
            raise OptionError("--compare needs a draft; -md takes a GGUF file or a folder")
        if print_plan:
            show_plan(engine)
        announce(engine, options)
        question = _Question(engine, text, system, raw, request)
        write = _ignore if as_json else write_answer
        result = stream(question.start, options, write=write)
        if not as_json:
            write_answer("\n")
            if request.sampling.logprobs is not None:
                show_logprobs(engine, result)
        status(closing_line(result, engine.speculation))
        if show_all:
            show_stats(result)
        code = exit_code(result)
        comparison = None
        if compared and code == 0:
            comparison = _compare(question, result, rounds or DEFAULT_ROUNDS, options)
            code = 0 if comparison.agrees else EXIT_DIFFERENT
        if as_json:
            print_json(engine, result, options, comparison)
    return code


@dataclass(frozen=True, slots=True)
class _Question:
    """A request that can be made more than once."""

    engine: "Engine"
    text: str
    system: str | None
    raw: bool
    request: RequestParts

    def start(self, report: Callable[[int, int], None]) -> "Generation":
        """Begin the answer; `report` follows the prompt's tokens."""
        return self.engine.stream(self._prompt(), progress=report, **self._options())

    def again(self, seed: int, speculate: bool) -> "Result":
        """Return another answer with the same seed, its prompt computed anew."""
        sampling = replace(self.request.sampling, seed=seed)
        fresh = {**self._options(), "sampling": sampling, "reuse_prefix": False}
        return self.engine.generate(self._prompt(), **fresh, speculate=speculate)

    def _prompt(self) -> Any:
        if self.raw:
            return self.text
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self.engine.encode_chat([*messages, {"role": "user", "content": self.text}])

    def _options(self) -> dict[str, Any]:
        request = self.request
        limits = {"max_tokens": request.max_tokens, "stop": request.stop}
        return {"sampling": request.sampling, **limits}


def _compare(question: _Question, result: "Result", rounds: int, options: Options) -> "Comparison":
    from sparkinfer.bench.compare import compare

    exact = options.text("dflash_accept") == "match" or question.request.sampling.greedy
    with progress(options) as report:
        comparison = compare(
            lambda speculate: question.again(result.seed, speculate),
            rounds,
            report,
            printed=result,
            compared=exact,
        )
    for line in comparison_lines(comparison):
        status(line)
    return comparison


def read_prompt(given: list[str | None], file: Path | None) -> str:
    """Return the one prompt: of the arguments, a file, or what is piped in."""
    prompts = [text for text in given if text is not None]
    if len(prompts) + (file is not None) > 1:
        raise OptionError("more than one prompt given; use one of PROMPT, -p and -f")
    if file is not None and str(file) != "-":
        return _read(file)
    if prompts:
        return unicode_text(prompts[0], "the prompt")
    if file is None and sys.stdin.isatty():
        raise OptionError("no prompt given; use -p TEXT or -f FILE, or pipe it in")
    text = decoded(sys.stdin.buffer.read(), "standard input")
    if not text:
        raise OptionError(
            "no prompt given, and standard input is empty; use -p TEXT or -f FILE, or pipe it in"
        )
    return text


def _read(file: Path) -> str:
    try:
        text = decoded(file.read_bytes(), str(file))
    except OSError as error:
        raise MissingFileError(f"cannot read the prompt file {file}: {error.strerror}") from error
    if not text:
        raise OptionError(f"the prompt file {file} is empty")
    return text


def unicode_text(argument: str, source: str) -> str:
    """A command line's argument as UTF-8, whatever the locale takes its bytes for. Raises: OptionError."""
    return decoded(os.fsencode(argument), source) if _HALVES.search(argument) else argument


def decoded(data: bytes, source: str) -> str:
    """UTF-8 as text. Raises: OptionError with the first byte that is none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"{source} is not UTF-8 text at byte {error.start}") from error


def _ignore(_text: str) -> None:
    pass


def show_plan(engine: "Engine") -> None:
    for line in plan_lines(engine.plan):
        status(f"plan: {line}")


def plan_lines(plan: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """One line a value, with the names it stands under; a list of tables has a line a table."""
    for key, value in plan.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from plan_lines(value, f"{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for row in value:
                yield f"{name}: " + ", ".join(
                    f"{field} {_short(item)}" for field, item in row.items()
                )
        else:
            yield f"{name} = {_short(value)}"


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_short, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_json(
    engine: "Engine", result: "Result", options: Options, comparison: "Comparison | None" = None
) -> None:
    """Print the result with all that led to it."""
    import json

    facts = {**result.to_dict(), "plan": dict(engine.plan), "options": options.block()}
    if comparison is not None:
        facts["compare"] = comparison.to_dict()
    print(json.dumps(facts, default=str))
