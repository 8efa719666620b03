"""`sparkinfer check`: does speculation change anything? Every path and depth against plain decoding."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkinfer.cli.console import progress, screen, status
from sparkinfer.cli.flags import DRAFTING, LOADING, ProcessFlags, verb
from sparkinfer.options import Options

if TYPE_CHECKING:
    from sparkinfer.bench.agree import Agreement
    from sparkinfer.bench.prompts import Prompt
    from sparkinfer.bench.sides import Drafting

EXIT_FAIL = 1
_LEAST = 16  # tokens an answer must have for every path to be taken
_SHOWN = 10  # differences


@verb(ProcessFlags(*LOADING, *DRAFTING))
def command(
    *,
    model: Annotated[
        str, typer.Option("-m", "--model", help="A file, a known name or hf:user/repo.")
    ],
    tokens: Annotated[
        int, typer.Option("-n", "--predict", min=_LEAST, max=2**20, help="Tokens of an answer.")
    ] = 128,
    prompts: Annotated[
        int, typer.Option("--prompts", min=1, help="Prompts, of the domains in turn.")
    ] = 6,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", help='JSON lines {"prompt": ..., "domain": ...}.'),
    ] = None,
    depths: Annotated[
        str, typer.Option("--depths", help="Drafted tokens a step, like 1,2,5.")
    ] = "all",
    paths: Annotated[
        str, typer.Option("--paths", help="Of compact,window,block,token_loop.")
    ] = "all",
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=1000, help="Runs of each setting.")
    ] = 1,
    temperature: Annotated[
        float, typer.Option("--temp", "--temperature", help="0 takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("-s", "--seed", help="With a temperature.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    options: Options,
) -> int:
    """Compare speculative output with plain decoding's: tokens, log-probabilities, end and counts.

    Without a draft model a scripted one stands in: it knows the answers and is wrong as often as told.
    """
    from sparkinfer.bench.agree import check
    from sparkinfer.bench.answers import encode
    from sparkinfer.bench.oracle import Oracle
    from sparkinfer.bench.sides import (
        Drafting,
        check_settings,
        parse_depths,
        parse_paths,
        scripted_settings,
    )
    from sparkinfer.cli.loading import load_engine, loaded_draft

    questions = read_prompts(prompts, prompt_file)
    with load_engine(model, options) as engine, progress(options) as report:
        draft = loaded_draft(engine, options)
        oracle = Oracle(engine.tokenizer.n_vocab, draft)
        drafting = Drafting.over(engine, draft or oracle.draft, options, report)
        wanted = parse_depths("--depths", depths, drafting.most)
        names = parse_paths("--paths", paths, drafting.decoder.paths)
        settings, left_out = check_settings(drafting, oracle, names, wanted)
        if draft is not None:
            settings += scripted_settings(drafting.scripted(oracle), oracle)
        _say_what(drafting, questions, len(settings), repeats, left_out)
        agreement = check(
            engine,
            [encode(engine, question) for question in questions],
            settings,
            tokens=tokens,
            repeats=repeats,
            options={"temperature": temperature, "seed": seed},
            oracle=oracle,
            report=report,
        )
        plan = {**engine.plan, **drafting.decoder.plan}
    if as_json:
        _print_json(agreement, questions, plan, options, left_out)
    else:
        _print(agreement, questions)
    return 0 if agreement.passed else EXIT_FAIL


def read_prompts(count: int, file: Path | None) -> "Sequence[Prompt]":
    """Return the first prompts of a file or of the built-in ones."""
    from sparkinfer.bench.prompts import builtin_prompts, file_prompts

    return builtin_prompts(count) if file is None else file_prompts(file, count)


def _say_what(
    drafting: "Drafting",
    questions: "Sequence[Prompt]",
    settings: int,
    repeats: int,
    left_out: Sequence[str],
) -> None:
    status(f"draft: {drafting.draft.name}")
    status(f"{len(questions)} prompts x {settings} settings, {repeats} runs each")
    for line in left_out:
        status(f"left out: {line}")


def _print(agreement: "Agreement", questions: "Sequence[Prompt]") -> None:
    from rich.table import Table

    grid = Table("setting", box=None, pad_edge=False)
    for title in ("agree", "tokens", "steps", "rows", "drafted", "accepted"):
        grid.add_column(title, justify="right")
    for name, tally in agreement.tallies.items():
        counts = tally.steps
        figures = (counts.steps, counts.rows, counts.drafted, counts.accepted)
        agree = f"{tally.agreeing}/{tally.pairs}"
        grid.add_row(name, agree, str(tally.tokens), *map(str, figures))
    screen().print(grid)
    for difference in agreement.differences[:_SHOWN]:
        print(f"{difference.line()} (domain {questions[difference.prompt].domain})")
    if len(agreement.differences) > _SHOWN:
        print(f"... and {len(agreement.differences) - _SHOWN} more differences")
    print(f"{agreement.stops} of {len(questions)} answers ended at a stop token inside the text")
    for line in agreement.lines():
        print(line)


def _print_json(
    agreement: "Agreement",
    questions: "Sequence[Prompt]",
    plan: dict[str, Any],
    options: Options,
    left_out: Sequence[str],
) -> None:
    import json
    from dataclasses import asdict

    from sparkinfer.bench.report import environment

    record = {
        "test": "agreement",
        "pairs": agreement.pairs,
        "agreeing": agreement.agreeing,
        "tokens": agreement.tokens,
        "verdict": "PASS" if agreement.passed else "FAIL",
        "settings": {name: asdict(tally) for name, tally in agreement.tallies.items()},
        "differences": [asdict(difference) for difference in agreement.differences],
        "left_out": list(left_out),
        "stops": agreement.stops,
        "prompts": [asdict(question) for question in questions],
        "plan": plan,
        "options": options.block(),
        "environment": environment(),
    }
    print(json.dumps(record, default=str))
