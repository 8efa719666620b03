"""`sparkinfer bench`: prompt, decode and verify speed; with --spec plain decoding against a draft's."""

from pathlib import Path
from typing import Annotated

import typer

from sparkinfer.cli.console import progress, screen, status
from sparkinfer.cli.flags import DRAFTING, LOADING, ProcessFlags, verb
from sparkinfer.errors import OptionError
from sparkinfer.options import Options

_LISTS = "Numbers with commas between them; 0 leaves the test out."
_SPEC = "Speculation"


@verb(ProcessFlags(*LOADING, *DRAFTING))
def command(
    *,
    model: Annotated[
        str, typer.Option("-m", "--model", help="A file, a known name or hf:user/repo.")
    ],
    n_prompt: Annotated[
        str | None, typer.Option("-p", "--n-prompt", help=f"Prompt lengths, or 512. {_LISTS}")
    ] = None,
    n_gen: Annotated[
        str, typer.Option("-n", "--n-gen", help=f"Tokens decoded; with --spec at most. {_LISTS}")
    ] = "128",
    widths: Annotated[
        str | None,
        typer.Option("--widths", help=f"Rows of a verify window, like 1,2,4,8. {_LISTS}"),
    ] = None,
    depths: Annotated[
        str | None, typer.Option("-d", "--n-depth", help="Tokens already in the state.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option("-r", "--repetitions", min=1, max=1000, help="Rounds: 5, with --spec 3."),
    ] = None,
    speculate: Annotated[
        bool,
        typer.Option(
            "--spec", help="Plain decoding, every depth and the planner.", rich_help_panel=_SPEC
        ),
    ] = False,
    draft_depths: Annotated[
        str,
        typer.Option("--draft-depths", help="Tokens drafted, like 1,3,5.", rich_help_panel=_SPEC),
    ] = "all",
    scripted: Annotated[
        str | None,
        typer.Option(
            "--scripted",
            help="Replay answers with these tokens a step, like 1,2,5.33, instead of drafting.",
            rich_help_panel=_SPEC,
        ),
    ] = None,
    prompts: Annotated[
        int,
        typer.Option(
            "--prompts", min=1, help="Prompts, of the domains in turn.", rich_help_panel=_SPEC
        ),
    ] = 6,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file",
            help='JSON lines {"prompt": ..., "domain": ...}.',
            rich_help_panel=_SPEC,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    options: Options,
) -> int:
    """Measure this machine: tokens per second on random tokens, sampling not included.

    With --spec (or a draft, or --scripted) whole answers instead: plain and speculative in turns.
    """
    if speculate or scripted is not None or options.setting("draft").origin == "flag":
        from sparkinfer.cli.bench_spec import measure_speculation

        if not (n_prompt is None and widths is None and depths is None):
            raise OptionError("-p, -d and --widths measure single forwards; --spec answers prompts")
        return measure_speculation(
            model,
            tokens=n_gen,
            rounds=rounds or 3,
            depths=draft_depths,
            scripted=scripted,
            prompts=prompts,
            prompt_file=prompt_file,
            as_json=as_json,
            options=options,
        )
    _measure_forwards(
        model, n_prompt or "512", n_gen, widths or "0", depths or "0", rounds or 5, as_json, options
    )
    return 0


def _measure_forwards(
    model: str,
    n_prompt: str,
    n_gen: str,
    widths: str,
    depths: str,
    rounds: int,
    as_json: bool,
    options: Options,
) -> None:
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
    if not workloads:
        raise OptionError("nothing to measure: -p, -n and --widths leave all tests out")
    longest = max((work.tokens + work.depth for work in workloads), default=0)
    with progress(options) as report, open_target(model, options, report, longest) as target:
        results = measure(target, target.config.n_vocab, workloads, rounds, report)
        plan = dict(target.plan)
        facts = {
            "name": target.config.name,
            "architecture": target.config.architecture,
            "weight_bytes_per_token": target.weight_bytes_per_token,
            "head_screened": target.screened,
        }
    if as_json:
        for result in results:
            print(json_line(result, facts, plan, options))
        return
    status(f"{facts['name']} ({facts['architecture']}), {rounds} rounds")
    screen().print(table(results))
