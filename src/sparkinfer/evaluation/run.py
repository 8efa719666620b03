"""One evaluation from built sides to a complete record: A/A, correctness, then blocks until a look settles it.

The record is written after every stage and every block; what an interruption leaves can be resumed at the first
block that is not complete.
"""

import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from sparkinfer.errors import OptionError
from sparkinfer.evaluation.builds import Environment
from sparkinfer.evaluation.correctness import (
    Question,
    answer_orders,
    check_content,
    check_encoding,
    check_lossless,
    check_same_model,
    teach_orders,
)
from sparkinfer.evaluation.inputs import (
    Files,
    Group,
    Prompts,
    Report,
    all_ids,
    checked_tokens,
    encode_orders,
    group_of,
    longest_contexts,
    make_prompts,
    open_questions,
)
from sparkinfer.evaluation.preflight import OtherWork, describe_machine, preflight, query_gpus
from sparkinfer.evaluation.process import (
    HARNESS,
    SILENCE,
    ProcessFailedError,
    Run,
    harness_orders,
    run_harness,
)
from sparkinfer.evaluation.record import (
    Check,
    Correctness,
    Evaluation,
    Event,
    EventKind,
    OneTime,
    Plan,
    Sample,
    Scope,
    Side,
    load_evaluation,
)
from sparkinfer.evaluation.schedule import aa_blocks, backwards, make_plan
from sparkinfer.evaluation.tasks import SPECULATIVE, one_time_costs, samples_of, warmup_orders
from sparkinfer.evaluation.timeleft import Timer, blocks_in
from sparkinfer.evaluation.verdict import decided, judge

Say = Callable[[str], None]
RECORD = "evaluation.json"
RAW = "raw"
BEFORE = -1  # block number of costs that come before the first block
_OTHERS = 0.05  # share of the machine that others may use before a block's record says so
_ATTEMPTS = 2  # of a process that crashes, before it is believed


@dataclass(frozen=True, slots=True)
class Settings:
    """How an evaluation is carried out. `silence`: seconds without an answer that count as a time-out."""

    scope: Scope
    files: Files
    output: Path
    seed: int
    require_quiet: bool = False
    silence: float = SILENCE
    harness: Path = HARNESS


class StoppedError(Exception):
    """The evaluation ends here: an event in the record says why."""


@dataclass(slots=True)
class _State:
    """The parts of the record that grow."""

    preflight: tuple[Check, ...] = ()
    correctness: list[Correctness] = field(default_factory=list)
    aa: list[Sample] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    one_time: list[OneTime] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    earlier_seconds: float = 0.0


class Evaluator:
    """Carries out one evaluation; `record` is what it has so far."""

    def __init__(
        self,
        settings: Settings,
        base: Environment,
        candidate: Environment,
        *,
        notes: Sequence[str] = (),
        broken: Event | None = None,
        say: Say = lambda _text: None,
        report: Report = lambda _label, _done, _total: None,
    ) -> None:
        """Hashes the inputs. `broken`: why a side could not be built; nothing is measured then.

        Raises: MissingFileError.
        """
        self._settings, self._say = settings, say
        self._scope: Scope = settings.scope
        self._sides: dict[Side, Environment] = {
            "base": base,
            "candidate": candidate,
            "a1": base,
            "a2": base,
        }
        self._plan: Plan = make_plan(self._scope, settings.seed)
        self._inputs = settings.files.inputs(self._scope, settings.seed, report)
        self._machine = describe_machine()
        # One copy for the whole evaluation: an edit of the original meanwhile changes nothing.
        self._harness = settings.harness.read_bytes()
        self._machine["harness_sha256"] = hashlib.sha256(self._harness).hexdigest()
        self._machine["plans"] = {}
        now = datetime.now(UTC)
        self._created = now.isoformat(timespec="seconds")
        self._id = f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
        self._state = _State(events=[Event("note", "sources", note) for note in notes])
        self._broken = broken
        self._started = monotonic()
        self._timer = Timer(self._scope)
        self._others = OtherWork()

    @property
    def record(self) -> Evaluation:
        """The record so far; complete blocks only."""
        state = self._state
        return Evaluation(
            id=self._id,
            created=self._created,
            scope=self._scope,
            base=self._sides["base"].build,
            candidate=self._sides["candidate"].build,
            inputs=self._inputs,
            machine=self._machine,
            preflight=state.preflight,
            plan=self._plan,
            correctness=tuple(state.correctness),
            aa=tuple(state.aa),
            samples=tuple(state.samples),
            one_time=tuple(state.one_time),
            events=tuple(state.events),
            seconds=state.earlier_seconds + monotonic() - self._started,
        )

    def resume(self) -> None:
        """Go on from the record in the output folder.

        Raises: OptionError where it is of another evaluation; MissingFileError, RecordError.
        """
        old = load_evaluation(self._settings.output / RECORD)
        new = self.record
        for name in ("scope", "base", "candidate", "inputs", "plan"):
            if getattr(old, name) != getattr(new, name):
                raise OptionError(
                    f"{self._settings.output} holds an evaluation with another {name};"
                    " give another --output, or the same sides, scope and seed"
                )
        harness = old.machine.get("harness_sha256")
        if harness != self._machine["harness_sha256"]:
            raise OptionError("the measuring program has changed since; start a new evaluation")
        self._id, self._created = old.id, old.created
        self._state = _State(
            preflight=tuple(map(_allowed, old.preflight)),
            correctness=list(old.correctness),
            aa=list(old.aa),
            samples=list(old.samples),
            one_time=list(old.one_time),
            events=[_past(event) for event in old.events],
            earlier_seconds=old.seconds,
        )
        done = blocks_in(self._state.samples)
        self._note("resume", f"went on after {done} of {self._scope.blocks} blocks")

    def run(self, on_start: Callable[[Evaluation], None] = lambda _record: None) -> Evaluation:
        """Measure until a look settles it and return the record, which is also in the output folder.

        `on_start` gets the record once everything is fixed and nothing is measured yet.
        Raises: OptionError for a side that lacks what the harness needs, or a scope that does not fit the model.
        KeyboardInterrupt leaves the record of all complete blocks.
        """
        self._settings.output.mkdir(parents=True, exist_ok=True)
        (self._settings.output / HARNESS.name).write_bytes(self._harness)
        try:
            self._preflight()
            on_start(self.record)
            if self._broken is not None:
                self._state.events.append(self._broken)
                raise StoppedError
            prompts, base, ids = self._reference()
            self._against_itself(prompts)
            self._check(prompts, base, ids)
            self._measure(prompts)
        except StoppedError:
            pass
        except KeyboardInterrupt:
            self._note("interrupted", "Ctrl-C: the record has the blocks that were complete")
            raise
        finally:
            record = self.save()
        return record

    def save(self) -> Evaluation:
        """Write the record, whole or not at all, and return what was written."""
        record = self.record
        path = self._settings.output / RECORD
        part = path.with_name(f"{RECORD}.{os.getpid()}")
        part.write_text(record.to_json())
        part.replace(path)
        return record

    # Stages

    def _preflight(self) -> None:
        found = preflight(
            self._settings.output, self._settings.files.bytes(), device=self._scope.device
        )
        if self._settings.require_quiet:
            found = tuple(
                replace(check, level="refuse") if check.level == "warn" else check
                for check in found
            )
        for check in found:
            if check.level != "ok":
                note = f": {check.note}" if check.note else ""
                self._say(f"preflight, {check.level}: {check.name} {check.value}{note}")
        again = [replace(check, name=f"{check.name} (resumed)") for check in found]
        self._state.preflight += tuple(again) if self._state.preflight else found
        if any(check.level == "refuse" for check in found):
            raise StoppedError

    def _reference(self) -> tuple[Prompts, Run, list[list[int]]]:
        """Return the prompts in the base's tokens, the base's answers to them, and all its tokens."""
        scope, files, seed = self._scope, self._settings.files, self._plan.seed
        self._say("base: tokens and reference answers")
        runs: dict[Path, Run] = {}
        for path, longest in longest_contexts(scope, files).items():
            group = group_of(scope, files, path)
            do = encode_orders(scope, seed, longest, primary=group.primary)
            if group.primary:
                questions = open_questions(scope, seed)
                do += self._answer_orders(questions, "base") + teach_orders(questions)
            runs[path] = self._process("base", group, do, f"answers-base-{path.stem}")
        prompts, base = make_prompts(scope, files, runs), runs[files.model]
        self._refuse_short(prompts, base)
        return prompts, base, all_ids(scope, base)

    def _against_itself(self, prompts: Prompts) -> None:
        """The base against itself; an untrustworthy bench ends the evaluation here."""
        scope = self._scope
        if not scope.aa_blocks:
            return
        order = aa_blocks(self._plan.seed, scope.aa_blocks)
        for number in range(blocks_in(self._state.aa), scope.aa_blocks):
            self._progress("base against itself", number, scope.aa_blocks)
            samples, costs = self._block(number, order[number], prompts, guards=False)
            self._state.aa += samples
            self._state.one_time += costs
            self.save()
        if judge(self.record).aa_ok is False:
            self._say(
                "the bench cannot be trusted: the base differs from itself, or it is too noisy"
            )
            raise StoppedError

    def _check(self, prompts: Prompts, base: Run, ids: list[list[int]]) -> None:
        """Correctness of both sides; a wrong candidate is not timed."""
        if not self._state.correctness:
            self._say("correctness: the candidate's answers")
            self._state.correctness = self._checks(prompts, base, ids)
            self.save()
        failed = [one for one in self._state.correctness if not one.passed]
        for one in failed:
            self._say(f"failed: {one.check}, {one.cell}, {one.side}: {one.detail}")
        if failed:
            raise StoppedError

    def _checks(self, prompts: Prompts, base: Run, ids: list[list[int]]) -> list[Correctness]:
        scope, files = self._scope, self._settings.files
        longest = longest_contexts(scope, files)[files.model]
        questions = prompts.questions()
        do = [
            *encode_orders(scope, self._plan.seed, longest, primary=True),
            *self._answer_orders(questions, "candidate"),
            *teach_orders(questions, base),
        ]
        group = group_of(scope, files, files.model)
        candidate = self._process("candidate", group, do, "answers-candidate")
        found = [check_encoding(ids, all_ids(scope, candidate))]
        sides: tuple[tuple[Side, Run], ...] = (("base", base), ("candidate", candidate))
        for side, run in sides:
            if SPECULATIVE in {metric.name for metric in scope.metrics}:
                found += check_lossless(questions, run, side, scope.bars)
            found += check_content(questions, run, base, side)
        return found + check_same_model(questions, base, candidate, scope.bars)

    def _measure(self, prompts: Prompts) -> None:
        """Blocks until a look settles the verdict, or the last one."""
        blocks = self._plan.blocks
        for number in range(blocks_in(self._state.samples), len(blocks)):
            if number in self._plan.looks and decided(self.record):
                return
            self._progress("block", number, len(blocks))
            samples, costs = self._block(number, blocks[number], prompts, guards=True)
            self._state.samples += samples
            self._state.one_time += costs
            self.save()

    # Processes

    def _block(
        self, number: int, order: Sequence[Side], prompts: Prompts, *, guards: bool
    ) -> tuple[list[Sample], list[OneTime]]:
        """Run every slot of a block in fresh processes; step costs are measured anew in each block."""
        for side in dict.fromkeys(order):
            self._sides[side].forget_measurements()
        self._others.share()
        samples: list[Sample] = []
        costs: list[OneTime] = []
        groups = prompts.groups(self._scope, self._settings.files, guards=guards)
        for slot, side in enumerate(order):
            back = backwards(slot, len(order))
            began = monotonic()
            for group in reversed(groups) if back else groups:
                tasks = group.tasks[::-1] if back else group.tasks
                warm = warmup_orders(group.tasks, self._scope.warmup)
                do = [*warm, *(task.order() for task in tasks)]
                name = f"{'block' if guards else 'aa'}-{number}-{slot}-{side}-{group.model.stem}"
                run = self._process(side, group, do, name)
                place: dict[str, Any] = {"block": number, "slot": slot, "side": side}
                samples += samples_of(
                    group.tasks, run, self._scope, guards=self._scope.guards, **place
                )
                if group.primary:
                    costs += one_time_costs(run, **place)
            self._timer.add(monotonic() - began, guards)
        stage = f"{'block' if guards else 'A/A block'} {number}"
        if (share := self._others.share()) > _OTHERS:
            self._note(stage, f"other processes used {share:.0%} of the machine's CPUs meanwhile")
        for gpu in query_gpus() if self._scope.device != "cpu" else ():
            state = f"{gpu['clocks.sm']} MHz, {gpu['temperature.gpu']} C, {gpu['power.draw']} W"
            self._note(stage, f"{gpu['name']} after it: {state}")
        return samples, costs

    def _process(self, side: Side, group: Group, do: Sequence[Any], name: str) -> Run:
        """Run one process; a crash is tried once more, and what fails again ends the evaluation.

        Raises: StoppedError; OptionError for a build whose interface lacks something.
        """
        environment = self._sides[side]
        orders = self._orders(environment, group, do)
        raw = self._settings.output / RAW / f"{name}.jsonl"
        raw.parent.mkdir(exist_ok=True)
        for attempt in range(1, _ATTEMPTS + 1):
            raw.unlink(missing_ok=True)
            try:
                run = run_harness(
                    environment.runner,
                    orders,
                    raw=raw,
                    silence=self._settings.silence,
                    harness=self._settings.output / HARNESS.name,
                )
            except ProcessFailedError as error:
                self._failed(error, side, name, attempt)
                continue
            if side in ("base", "candidate") and group.primary:
                self._loaded(side, run)
            return run
        raise AssertionError("the last attempt returns or raises")

    def _orders(self, environment: Environment, group: Group, do: Sequence[Any]) -> dict[str, Any]:
        draft = self._settings.files.draft
        speculative = SPECULATIVE in {metric.name for metric in self._scope.metrics}
        off = environment.build.options.get("spec") == "off"
        load: dict[str, Any] = {
            "context": group.context,
            "draft": str(draft.resolve()) if draft and group.primary and not off else None,
        }
        drafting = group.primary and speculative and not off
        return harness_orders(group.model.resolve(), do, drafting=drafting, load=load)

    def _failed(self, error: ProcessFailedError, side: Side, name: str, attempt: int) -> None:
        """Note a failed attempt. Raises: StoppedError after the last one, OptionError for a build that is too old."""
        owner: Side = "candidate" if side == "candidate" else "base"
        if error.reason == "refused":
            build = self._sides[side].build
            raise OptionError(f"{owner} {build.name} cannot be measured: {error}") from error
        self._say(f"{owner}: {error} ({name}, attempt {attempt} of {_ATTEMPTS})")
        if attempt < _ATTEMPTS:
            self._state.events.append(Event("retry", name, str(error), owner))
            return
        # What a side does to itself again and again is its own; time and memory may be the machine's.
        own = error.reason in ("crash", "clock")
        kind: EventKind = "failure" if own else "infrastructure"
        self._state.events.append(Event(kind, name, f"{error.reason}: {error}", owner))
        raise StoppedError from error

    def _loaded(self, side: Side, run: Run) -> None:
        """Keep what a side resolved for itself, and what its first load cost."""
        if side not in self._machine["plans"]:
            facts = ("version", "context", "speculation", "plan")
            self._machine["plans"][side] = {name: run.loaded.get(name) for name in facts}
            first = [
                replace(cost, what=f"first {cost.what}")
                for cost in one_time_costs(run, block=BEFORE, slot=0, side=side)
            ]
            self._state.one_time += first

    # Small things

    def _answer_orders(self, questions: Sequence[Question], side: Side) -> list[dict[str, Any]]:
        options = self._sides[side].build.options
        speculative = SPECULATIVE in {metric.name for metric in self._scope.metrics}
        matched = options.get("dflash_accept", "match") == "match"
        tokens = checked_tokens(self._scope)
        return answer_orders(questions, tokens, drafting=speculative, sampled=matched)

    def _refuse_short(self, prompts: Prompts, base: Run) -> None:
        """Raises: OptionError for a cell in which nothing is decoded: there would be no speed to compare."""
        for cell in prompts.cells:
            mine = [q for q in prompts.questions() if q.cell == cell]
            if all(len(base.results[q.key("plain")]["tokens"]) < 2 for q in mine):
                raise OptionError(
                    f"scope {self._scope.name}: the base ends every answer of {cell!r} at once"
                )

    def _note(self, stage: str, message: str) -> None:
        self._state.events.append(Event("note", stage, message))

    def _progress(self, what: str, number: int, total: int) -> None:
        left = self._timer.left(self._scope, self._state.aa, self._state.samples)
        self._say(f"{what} {number + 1} of {total}{left}")


def _allowed(check: Check) -> Check:
    """What was refused when an evaluation began is looked at again when it is resumed; that look counts."""
    return replace(check, level="warn") if check.level == "refuse" else check


def _past(event: Event) -> Event:
    """What stopped an earlier part of a resumed evaluation is no longer a reason to judge nothing."""
    if event.kind in ("infrastructure", "failure"):
        message = f"{event.kind} before it was resumed: {event.message}"
        return replace(event, kind="note", message=message)
    return event
