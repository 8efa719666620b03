"""`sparkinfer bench`: prompt, decode and verify speed at depths, with the plan that gave them."""

from typing import Annotated

import typer

from sparkinfer.cli.console import progress, screen, status
from sparkinfer.cli.flags import ProcessFlags, verb
from sparkinfer.options import Options

_LISTS = "Numbers with commas between them; 0 leaves the test out."


@verb(ProcessFlags("threads", "activations", "isa", "cache_dir"))
def command(
    *,
    model: Annotated[
        str, typer.Option("-m", "--model", help="A file, a known name or hf:user/repo.")
    ],
    n_prompt: Annotated[
        str, typer.Option("-p", "--n-prompt", help=f"Prompt lengths. {_LISTS}")
    ] = "512",
    n_gen: Annotated[str, typer.Option("-n", "--n-gen", help=f"Tokens decoded. {_LISTS}")] = "128",
    widths: Annotated[
        str, typer.Option("--widths", help=f"Rows of a verify window, like 1,2,4,8. {_LISTS}")
    ] = "0",
    depths: Annotated[
        str, typer.Option("-d", "--n-depth", help="Tokens already in the state.")
    ] = "0",
    rounds: Annotated[
        int, typer.Option("-r", "--repetitions", min=1, max=1000, help="Rounds.")
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    options: Options,
) -> None:
    """Measure this machine: tokens per second on random tokens, sampling not included."""
    from sparkinfer.bench.measure import measure
    from sparkinfer.bench.report import json_line, table
    from sparkinfer.bench.workloads import parse_counts, plan_workloads
    from sparkinfer.cli.loading import open_target

    workloads = plan_workloads(
        parse_counts("-p", n_prompt),
        parse_counts("-n", n_gen),
        parse_counts("--widths", widths),
        parse_counts("-d", depths),
    )
    longest = max((work.tokens + work.depth for work in workloads), default=0)
    with progress(options) as report, open_target(model, options, report, longest) as target:
        results = measure(target, target.config.n_vocab, workloads, rounds, report)
        plan = dict(target.plan)
        facts = {
            "name": target.config.name,
            "architecture": target.config.architecture,
            "weight_bytes_per_token": target.weight_bytes_per_token,
        }
    if as_json:
        for result in results:
            print(json_line(result, facts, plan, options))
        return
    status(f"{facts['name']} ({facts['architecture']}), {rounds} rounds")
    screen().print(table(results))
