"""What a process is asked to do: requests for every cell and every guard, and figures from its answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkinfer.evaluation.process import Run
from sparkinfer.evaluation.record import Guard, OneTime, Sample, Scope, Side, StepMs

PREFILL = "prefill"  # path of the step that needs no row of its own
SPECULATIVE = "dflash_tps"
_GREEDY = {"temperature": 0.0, "reuse_prefix": False}


@dataclass(frozen=True, slots=True)
class Task:
    """One request that is timed. `speculate`: with drafts; `guard`: at a context, for decode and prefill speed."""

    id: str
    cell: str
    prompt: tuple[int, ...]
    tokens: int
    speculate: bool
    guard: bool = False
    unit: str = "tok/s"

    def order(self) -> dict[str, Any]:
        """Return the harness's order; a guard's answer does not end early, as its content is not looked at."""
        options = {**_GREEDY, "max_tokens": self.tokens, "speculate": self.speculate}
        options["ignore_eos"] = self.guard
        return {
            "kind": "request",
            "id": self.id,
            "prompt": list(self.prompt),
            "options": options,
        }


def cell_tasks(scope: Scope, prompts: Mapping[str, Sequence[Sequence[int]]]) -> list[Task]:
    """Return the requests of the primary cells: with drafts and plainly in turns, as the scope's metrics need."""
    names = {metric.name for metric in scope.metrics}
    ways = [True] if SPECULATIVE in names else []
    ways += [False] if names - {SPECULATIVE} else []
    tasks: list[Task] = []
    for cell, texts in prompts.items():
        for number, prompt in enumerate(texts):
            turn = ways if number % 2 == 0 else ways[::-1]
            for way in turn:
                name = f"{cell}/{number}/{'draft' if way else 'plain'}"
                tasks.append(Task(name, cell, tuple(prompt), scope.tokens, way))
    return tasks


def warmup_orders(tasks: Sequence[Task], tokens: int) -> list[dict[str, Any]]:
    """Return unmeasured requests: the first task of each kind, cut to `tokens` tokens of answer.

    For guards it is the one with the shortest prompt.
    """
    if not tokens:
        return []
    kinds: dict[tuple[bool, bool], Task] = {}
    for task in sorted(tasks, key=lambda task: len(task.prompt) if task.guard else 0):
        kinds.setdefault((task.guard, task.speculate), task)
    orders = []
    for task in kinds.values():
        order = task.order()
        order["id"] = f"warm-up/{task.id}"
        order["options"]["max_tokens"] = min(tokens, task.tokens)
        orders.append(order)
    return orders


def samples_of(
    tasks: Sequence[Task],
    run: Run,
    scope: Scope,
    *,
    block: int,
    slot: int,
    side: Side,
    guards: Sequence[Guard] = (),
) -> list[Sample]:
    """Return the figures of one process: one for every metric and cell that its requests give."""
    place = {"block": block, "slot": slot, "side": side}
    found: list[Sample] = []
    cells = dict.fromkeys((task.cell, task.guard) for task in tasks)
    wanted = {metric.name: metric.unit for metric in scope.metrics}
    for cell, guarded in cells:
        mine = [task for task in tasks if (task.cell, task.guard) == (cell, guarded)]
        names = _guard_metrics(guards, cell) if guarded else wanted
        for name, unit in names.items():
            sample = _sample(name, unit, mine, run, place)
            if sample is not None:
                found.append(sample)
    return found


def _guard_metrics(guards: Sequence[Guard], cell: str) -> dict[str, str]:
    guard = next(g for g in guards if cell in {g.cell(context) for context in g.contexts})
    return dict.fromkeys(guard.metrics, "tok/s")


def _sample(
    metric: str, unit: str, tasks: Sequence[Task], run: Run, place: Mapping[str, Any]
) -> Sample | None:
    """Return tokens over seconds of all requests of a cell, None where nothing was decoded.

    Tokens after the first piece, over the time from it to the end; for `prefill_tps` prompt tokens over
    the time to the first piece. Both are the harness's own times.
    """
    mine = [task for task in tasks if task.speculate == (metric == SPECULATIVE)]
    answers = [run.results[task.id] for task in mine]
    if metric == "prefill_tps":
        tokens = sum(len(task.prompt) for task in mine)
        seconds = sum(answer["first_s"] for answer in answers)
        return _made(metric, unit, mine, tokens, seconds, place) if mine else None
    tokens = sum(len(answer["tokens"]) - answer["in_first"] for answer in answers)
    seconds = sum(answer["decode_s"] for answer in answers)
    if tokens < 1:
        return None
    return _made(metric, unit, mine, tokens, seconds, place, answers)


def _made(
    metric: str,
    unit: str,
    tasks: Sequence[Task],
    tokens: int,
    seconds: float,
    place: Mapping[str, Any],
    answers: Sequence[Mapping[str, Any]] = (),
) -> Sample:
    counts = [
        (path, count)
        for answer in answers
        for path, count in answer["paths"].items()
        if path.partition("/")[0] != PREFILL
    ]
    paths: dict[str, int] = {}
    for path, count in counts:
        paths[path] = paths.get(path, 0) + int(count["steps"])
    steps = sum(paths.values())
    accepted = sum(int(count["accepted"]) for _, count in counts)
    return Sample(
        **place,
        metric=metric,
        cell=tasks[0].cell,
        guard=tasks[0].guard,
        value=tokens / seconds,
        unit=unit,
        tokens=tokens,
        seconds=seconds,
        paths=paths,
        accept=(steps + accepted) / steps if steps else None,
        step_ms=_step_ms(answers, steps, seconds) if steps else None,
        slots=_slots(answers),
    )


def _slots(answers: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], ...]:
    """Return drafts judged and kept for each place after the anchor, of all answers together."""
    sums: list[list[int]] = []
    for answer in answers:
        for place, (judged, kept) in enumerate((answer.get("report") or {}).get("slots", ())):
            if place == len(sums):
                sums.append([0, 0])
            sums[place][0] += int(judged)
            sums[place][1] += int(kept)
    return tuple((judged, kept) for judged, kept in sums if judged)


def _step_ms(answers: Sequence[Mapping[str, Any]], steps: int, seconds: float) -> StepMs:
    """Return the build's own account of a step; `rest` is what is left of the evaluator's time."""
    parts = {
        name: 1000 * sum(float(answer["parts"].get(name, 0.0)) for answer in answers) / steps
        for name in ("draft", "target", "sample")
    }
    rest = 1000 * seconds / steps - sum(parts.values())
    return StepMs(**parts, rest=max(0.0, rest))


def one_time_costs(run: Run, *, block: int, slot: int, side: Side) -> list[OneTime]:
    """Return what the process paid once: import, load and its phases, the warm-up."""
    costs = {"import": float(run.imported["seconds"]), "load": float(run.loaded["seconds"])}
    costs |= {f"load: {label}": float(s) for label, s in run.loaded["phases"].items()}
    warm = [answer["total_s"] for name, answer in run.results.items() if name.startswith("warm-up")]
    if warm:
        costs["warm-up"] = sum(warm)
    return [OneTime(block, slot, side, what, seconds) for what, seconds in costs.items()]
