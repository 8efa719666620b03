"""`sparkinfer bench --spec`: plain decoding, every depth and the planner side by side."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkinfer.cli.check import read_prompts
from sparkinfer.cli.console import progress, screen, status
from sparkinfer.errors import OptionError
from sparkinfer.options import Options

if TYPE_CHECKING:
    from sparkinfer.bench.sides import Drafting
    from sparkinfer.bench.sweep import Measured, Task
    from sparkinfer.engine import Engine

EXIT_DIFFERENT = 1
_MOST_TOKENS = 2**20
_MOST_A_STEP = 16.0
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class _Part:
    """A sweep with the real draft, or with one scripted number of tokens a step."""

    label: str  # "" for the real draft
    facts: dict[str, Any]
    plan: dict[str, Any]
    results: "list[Measured]"


def measure_speculation(
    model: str,
    *,
    tokens: str,
    rounds: int,
    depths: str,
    scripted: str | None,
    prompts: int,
    prompt_file: Path | None,
    as_json: bool,
    options: Options,
) -> int:
    """Run the sweep and print it; 1 if an answer was not plain decoding's.

    Raises: OptionError for a list that is not accepted, or without anything that drafts.
    """
    from sparkinfer.bench.answers import encode
    from sparkinfer.bench.sweep import Task
    from sparkinfer.cli.loading import load_engine, loaded_draft

    count, means = parse_tokens(tokens), parse_means(scripted)
    questions = read_prompts(prompts, prompt_file)
    with load_engine(model, options) as engine, progress(options) as report:
        draft = loaded_draft(engine, options)
        if means is None and draft is None:
            raise OptionError(
                "--spec needs something that drafts; use -md MODEL or --scripted 1,2,3"
            )
        tasks = [Task(q.domain, tuple(encode(engine, q))) for q in questions]
        sweep = _Sweep(engine, options, depths, tasks, count, rounds, report)
        parts = list(sweep.scripted(draft, means) if means else sweep.real(draft))
    model_facts = {"model": {"name": model}}
    for part in parts:
        if as_json:
            _print_json(part, tasks, model_facts, options)
        else:
            _print(part, tasks)
    different = [part for part in parts if not all(r.identical for r in part.results)]
    if different:
        status("error: answers DIFFER from plain decoding; sparkinfer check finds where")
    return EXIT_DIFFERENT if different else 0


@dataclass(frozen=True, slots=True)
class _Sweep:
    """What all parts of a call have in common."""

    engine: "Engine"
    options: Options
    depths: str
    tasks: "Sequence[Task]"
    tokens: int
    rounds: int
    report: Report

    def real(self, draft: Any) -> Iterator[_Part]:
        """Yield the sweep with a draft model."""
        from sparkinfer.bench.sides import Drafting, parse_depths, sweep_sides

        drafting = Drafting.over(self.engine, draft, self.options, self.report)
        wanted = parse_depths("--draft-depths", self.depths, drafting.most)
        yield self._part("", drafting, sweep_sides(self.engine, drafting, wanted), None, {})

    def scripted(self, draft: Any, means: Sequence[float]) -> Iterator[_Part]:
        """Yield a sweep for each number of tokens a step; a draft's network runs along at its cost."""
        from sparkinfer.bench.oracle import Oracle
        from sparkinfer.bench.sides import Drafting, parse_depths, sweep_sides
        from sparkinfer.dflash.scripted import acceptance_script

        oracle = Oracle(self.engine.tokenizer.n_vocab, draft)
        drafting = Drafting.over(self.engine, oracle.draft, self.options, self.report)
        wanted = parse_depths("--draft-depths", self.depths, drafting.most)
        for mean in means:
            prepare = oracle.load(acceptance_script(mean - 1.0, drafting.most))
            sides = sweep_sides(self.engine, drafting, wanted, prepare)
            label = f"SCRIPTED {mean:g}"
            yield self._part(label, drafting, sides, oracle.record, {"scripted": mean})

    def _part(
        self,
        label: str,
        drafting: "Drafting",
        sides: Any,
        recorded: Any,
        facts: dict[str, Any],
    ) -> _Part:
        from sparkinfer.bench.sweep import sweep

        status(f"{label or 'draft'}: {drafting.draft.name}, costs {drafting.costs.origin}")
        results = sweep(
            self.engine,
            sides,
            self.tasks,
            tokens=self.tokens,
            rounds=self.rounds,
            report=self.report,
            recorded=recorded,
        )
        plan = {**self.engine.plan, "draft": dict(drafting.draft.plan)}
        facts = {**facts, "draft": drafting.draft.name, "costs": drafting.costs.to_json()}
        return _Part(label, facts, plan, results)


def parse_tokens(text: str) -> int:
    """Return the one number of -n. Raises: OptionError for anything else."""
    if not (text.isascii() and text.isdigit() and 2 <= int(text) <= _MOST_TOKENS):
        raise OptionError(f"-n {text!r} is not accepted with --spec; expected one number from 2")
    return int(text)


def parse_means(text: str | None) -> list[float] | None:
    """Return the numbers of `1,2,5.33`, None for no text. Raises: OptionError for anything else."""
    if text is None:
        return None
    try:
        means = [float(part) for part in text.split(",")]
    except ValueError:
        means = []
    if not means or not all(1.0 <= mean <= _MOST_A_STEP for mean in means):
        accepted = f"tokens a step from 1 to {_MOST_A_STEP:g}, like 1,2,5.33"
        raise OptionError(f"--scripted {text!r} is not accepted; expected {accepted}")
    return list(dict.fromkeys(means))


def _print(part: _Part, tasks: "Sequence[Task]") -> None:
    from sparkinfer.bench.sweep_report import (
        domain_table,
        metric_lines,
        planner_line,
        slot_table,
        speed_table,
    )

    console = screen()
    print(_title(part))
    console.print(speed_table(part.results))
    print("\nby domain")
    console.print(domain_table(part.results, tasks))
    deepest = max(part.results, key=lambda result: result.side.depth)
    if deepest.slots:
        print("\nacceptance by slot, where it was judged")
        console.print(slot_table(deepest, tasks))
    print()
    line = planner_line(part.results)
    if line is not None:
        print(line)
    for metric in metric_lines(part.results, part.label):
        print(metric)


def _title(part: _Part) -> str:
    if not part.label:
        return str(part.facts["draft"])
    return f"{part.label}: answers replayed with {part.facts['scripted']:g} tokens a step, no real draft"


def _print_json(
    part: _Part, tasks: "Sequence[Task]", facts: dict[str, Any], options: Options
) -> None:
    from sparkinfer.bench.sweep_report import json_line

    for result in part.results:
        print(json_line(result, tasks, {**facts, **part.facts}, part.plan, options))
