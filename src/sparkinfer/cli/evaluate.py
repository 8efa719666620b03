"""`sparkinfer eval BASE CANDIDATE`: which of two builds is faster, how sure is that, and is the output right?"""

import secrets
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from sparkinfer.cli.console import EXIT_USAGE, progress, status
from sparkinfer.cli.flags import ProcessFlags, verb
from sparkinfer.errors import OptionError, SparkError
from sparkinfer.options import Options

if TYPE_CHECKING:
    from sparkinfer.evaluation.finish import Signing
    from sparkinfer.evaluation.inputs import Files
    from sparkinfer.evaluation.record import Evaluation, Judgement, Scope

_RUN = "run"
_SIGN = "Receipt"
_AUTO = "auto"
_HELP = """Compare two builds: sparkinfer eval BASE CANDIDATE.

BASE and CANDIDATE are two git revisions (the candidate is merged onto the base), two wheels, or two option sets
like options:spec=off of this installation. Exit codes: 0 judged, 1 rejected (with --gate), 2 wrong use, 73 merge
conflict, 74 the machine or its surroundings failed, 75 nothing could be judged, 130 interrupted.

Options: sparkinfer eval run --help. `eval BASE CANDIDATE` is `eval run BASE CANDIDATE`.
"""


class _Group(TyperGroup):
    """`eval A B` is `eval run A B`: whatever is no command's name begins an evaluation."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            status(ctx.get_help())
            raise typer.Exit(EXIT_USAGE)
        if args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [_RUN, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_Group, help=_HELP)


@app.command(_RUN, hidden=True)
@verb(ProcessFlags("cache_dir"))
def command(
    *,
    base: Annotated[str, typer.Argument(help="A revision, a wheel or options:NAME=VALUE,...")],
    candidate: Annotated[str, typer.Argument(help="The same kind of thing, to be compared.")],
    scope: Annotated[
        str | None, typer.Option("--scope", help="A scope's name, or a .toml file of your own.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the results.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, max=2**63 - 1, help="Of the order; random if left out."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="The target, in place of the scope's.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option("-md", "--draft", help="The draft, in place of the scope's.")
    ] = None,
    guard_model: Annotated[
        list[str] | None,
        typer.Option("--guard-model", help="NAME=FILE of a model that the scope's guards name."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="NAME=VALUE, a process option of both sides."),
    ] = None,
    repo: Annotated[Path, typer.Option("--repo", help="The git repository.")] = Path(),
    require_quiet: Annotated[
        bool, typer.Option("--require-quiet", help="Refuse a machine that the preflight warns of.")
    ] = False,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Go on with uncommitted changes, and say so.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the evaluation in the output folder.")
    ] = False,
    gate: Annotated[
        bool, typer.Option("--gate", help="Exit with 1 where the candidate is rejected.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=1, help="Seconds without an answer that end a process."),
    ] = 900.0,
    sign: Annotated[
        bool, typer.Option("--receipt/--no-receipt", help="Sign.", rich_help_panel=_SIGN)
    ] = True,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="The private key; your own if left out.", rich_help_panel=_SIGN),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option("--ledger", help="The ledger; your own if left out.", rich_help_panel=_SIGN),
    ] = None,
    ci_run: Annotated[
        str,
        typer.Option("--ci-run", help="Address of the CI's run that signs.", rich_help_panel=_SIGN),
    ] = "",
    options: Options,
) -> int:
    """Build both sides, check their output, measure them in turns and judge: sparkinfer eval BASE CANDIDATE."""
    from sparkinfer.evaluation.builds import BuildFailedError, prepare, unbuilt
    from sparkinfer.evaluation.finish import begin, exit_code, finish
    from sparkinfer.evaluation.ledger import Entry, abort
    from sparkinfer.evaluation.record import Event
    from sparkinfer.evaluation.run import Evaluator, Settings
    from sparkinfer.evaluation.scope import DEFAULT, find_scope
    from sparkinfer.evaluation.source import resolve_sources

    wanted = find_scope(scope or DEFAULT)
    folder = _folder(output, resume)
    signing = _signing(key, ledger, ci_run) if sign else None
    say = _silent if options.text("progress") == "off" else status
    common = _pairs(option, "--option")
    if wanted.device != "cpu":
        common = {"device": wanted.device, **common}
    sources = resolve_sources(
        base, candidate, repository=repo, common=common, allow_dirty=allow_dirty
    )
    for note in sources.notes:
        say(f"note: {note}")
    files = _files(wanted, model, draft, _pairs(guard_model, "--guard-model"), options)
    root = options.path("cache_dir") / "evaluation"
    broken: Event | None = None
    try:
        sides = prepare(sources, root, device=wanted.device, say=say)
    except BuildFailedError as error:
        say(f"failed: {error}")
        broken = Event(error.kind, "build", str(error), error.side)
        sides = unbuilt(sources.base), unbuilt(sources.candidate)
    settings = Settings(
        scope=wanted,
        files=files,
        output=folder,
        seed=_seed(seed, folder, resume),
        require_quiet=require_quiet,
        silence=timeout,
    )
    with progress(options) as report:
        evaluator = Evaluator(
            settings, *sides, notes=sources.notes, broken=broken, say=say, report=report
        )
    if resume:
        evaluator.resume()
    say(f"scope {wanted.name}, seed {settings.seed}, results in {folder}")
    started: list[Entry] = []

    def on_start(record: "Evaluation") -> None:
        if signing is not None:
            started.append(begin(record, signing.ledger))

    before = signal.signal(signal.SIGTERM, _interrupt)  # a CI that gives up leaves no process
    try:
        record = evaluator.run(on_start)
    except (KeyboardInterrupt, SparkError) as error:
        if signing is not None and started:
            abort(signing.ledger, evaluator.record.id, str(error) or "interrupted")
        if isinstance(error, KeyboardInterrupt):
            status(f"interrupted; --resume --output {folder} goes on")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    judgement = finish(record, folder, signing=signing, started=started[0] if started else None)
    _show(record, judgement, folder, signed=signing is not None)
    return exit_code(judgement, gate=gate)


@app.command("report")
@verb(ProcessFlags())
def report_command(
    *,
    file: Annotated[Path, typer.Argument(help="A record (evaluation.json), or its folder.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for report.md and report.html.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option("--against", help="Another record of the same change: where do they differ?"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the judgement as JSON.")] = False,
    gate: Annotated[
        bool, typer.Option("--gate", help="Exit with 1 where the candidate is rejected.")
    ] = False,
    options: Options,
) -> int:
    """Judge a record again, without a model and without the builds, and print the report."""
    from sparkinfer.evaluation.codec import canonical
    from sparkinfer.evaluation.finish import exit_code, receipt_of, write_reports
    from sparkinfer.evaluation.report_markdown import render
    from sparkinfer.evaluation.verdict import judge

    path = _record_file(file)
    record, other = _load(path), None if against is None else _load(_record_file(against))
    judgement, signed = judge(record), receipt_of(record, path.parent)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write_reports(record, judgement, output, signed, other)
    if as_json:
        print(canonical(judgement).decode())
    else:
        print(render(record, judgement, receipt=signed, other=other), end="")
    return exit_code(judgement, gate=gate)


def _record_file(path: Path) -> Path:
    """Return the record that a path means: the file, or the one in a folder of results."""
    from sparkinfer.evaluation.run import RECORD

    return path / RECORD if path.is_dir() else path


def _load(path: Path) -> "Evaluation":
    from sparkinfer.evaluation.record import load_evaluation

    return load_evaluation(path)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _silent(_text: str) -> None:
    """Nobody wants to know."""


def _folder(output: Path | None, resume: bool) -> Path:
    """Return the folder of the results, which must be new unless an evaluation is resumed."""
    from datetime import UTC, datetime

    from sparkinfer.evaluation.ledger import default_path
    from sparkinfer.evaluation.run import RECORD

    if output is None:
        if resume:
            raise OptionError("--resume needs the --output of the evaluation to go on with")
        # Not in the working directory: it may be the repository, which has to stay clean.
        return default_path().parent / "evaluations" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    there = (output / RECORD).exists()
    if there and not resume:
        raise OptionError(
            f"{output} holds an evaluation; --resume goes on with it, or name another"
        )
    if resume and not there:
        raise OptionError(f"{output} holds no evaluation to go on with")
    return output.resolve()


def _seed(seed: int | None, folder: Path, resume: bool) -> int:
    """Return the seed of the order: the given one, that of the evaluation to go on with, or a new one."""
    if seed is not None:
        return seed
    return _load(_record_file(folder)).plan.seed if resume else secrets.randbits(32)


def _signing(key: Path | None, ledger: Path | None, ci_run: str) -> "Signing":
    """Return what signs, before anything is built: a missing library or key is said at once."""
    from sparkinfer.evaluation.finish import Signing
    from sparkinfer.evaluation.keys import load_or_create
    from sparkinfer.evaluation.ledger import default_path

    signing = Signing(load_or_create(key), ledger or default_path(), ci_run)
    made = f", made now: {signing.key.path}" if signing.key.made_now else ""
    status(f"signing with key {signing.key.fingerprint}{made}")
    return signing


def _pairs(texts: Sequence[str] | None, flag: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise OptionError(f"{flag} {text!r} is not NAME=VALUE")
        found[name.replace("-", "_") if flag == "--option" else name] = value
    return found


def _files(
    scope: "Scope", model: str | None, draft: Path | None, guards: dict[str, str], options: Options
) -> "Files":
    """Return the files of the scope's models, fetched where they have to be."""
    from sparkinfer.evaluation.inputs import TARGET, Files
    from sparkinfer.pull import locate

    named = {guard.model for guard in scope.guards} - {TARGET}
    if unknown := sorted(set(guards) - named):
        known = ", ".join(sorted(named)) or "none"
        raise OptionError(f"--guard-model {unknown[0]}: the scope's guard models are: {known}")
    if draft is None and scope.draft not in (None, _AUTO):
        draft = Path(str(scope.draft))
    folder = options.path("model_dir")
    with progress(options) as report:
        target = locate(model or scope.target, folder, report)
        others = {name: locate(guards.get(name, name), folder, report) for name in sorted(named)}
    return Files(target.resolve(), draft.resolve() if draft else None, others)


def _show(record: "Evaluation", judgement: "Judgement", folder: Path, *, signed: bool) -> None:
    """Print verdict, label and reasons; the reports are in the folder."""
    from sparkinfer.evaluation.finish import MARKDOWN, PAGE, RECEIPT

    print(f"verdict {judgement.verdict}, {judgement.label or 'no label'}")
    for reason in judgement.reasons:
        print(f"  {reason}")
    names = [MARKDOWN, PAGE]
    if signed and (folder / RECEIPT).exists():
        names.append(RECEIPT)
    print(f"{record.seconds / 60:.1f} min, seed {record.plan.seed}: {folder} ({', '.join(names)})")
