"""The speculative step: choose a width, draft, cut, verify, accept, commit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from sparkinfer.decoding import (
    AR_PATH,
    PREFILL_PATH,
    Progress,
    SequenceLike,
    SpeculationReport,
    StepResult,
    TargetLike,
)
from sparkinfer.dflash.accept import RULES, Match
from sparkinfer.dflash.base import Ahead, Chosen, Draft, Features, Row
from sparkinfer.dflash.planner import Decision, Observed, Policy
from sparkinfer.dflash.verify import Batched, Judge, Paths, Verified, VerifyPath, VerifyTarget
from sparkinfer.sampling import Choice, Sampler, TokenHistory

_KEPT_ROWS = 64  # features of plain steps that wait for the next draft


class SpeculationTarget(VerifyTarget, TargetLike, Protocol):
    """What the loop needs of a target (`sparkinfer.models.Target`)."""


@dataclass
class _Counts:
    """What happened since the request began."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    ends: Counter[tuple[int, int]] = field(default_factory=Counter)  # judged, accepted
    widths: Counter[int] = field(default_factory=Counter)
    cuts: Counter[int] = field(default_factory=Counter)
    plain_seconds: float = 0.0  # what the kept tokens would have cost one at a time
    seconds: float = 0.0
    gap: int = 0

    def add(self, drafted: int, judged: int, accepted: int) -> None:
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.ends[judged, accepted] += 1

    @property
    def slots(self) -> tuple[tuple[int, int], ...]:
        """Of each slot how often it was judged, and kept."""
        most = max((judged for judged, _ in self.ends), default=0)
        ends = self.ends.items()
        return tuple(
            (
                sum(count for (judged, _), count in ends if judged > slot),
                sum(count for (_, accepted), count in ends if accepted > slot),
            )
            for slot in range(most)
        )


@dataclass
class _Step:
    """A step between `step` and `commit`."""

    choices: list[Choice]
    width: int = 0  # rows asked for; 0: the prompt's last row
    asked: int = 0  # before the window was cut, 0 if it was not
    path: str = PREFILL_PATH
    length: int = 0
    drafted: int = 0
    accepted: int = 0
    verify: VerifyPath | None = None
    window: Sequence[int] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    judged: int = 0
    claims: Sequence[float] = ()
    given: int = 0  # rows that the draft has got already
    planning: float = 0.0  # seconds of this step's choice and of learning from the step before


class DFlashDecoder:
    """Returns the tokens of plain decoding, several a step where the draft is right.

    With the rule `rejection` and a temperature the tokens follow the same distribution instead.
    Between steps the draft's context holds every committed token but those whose features still
    wait in `_features`.
    """

    name = "dflash"

    def __init__(
        self,
        target: SpeculationTarget,
        draft: Draft,
        policy: Policy,
        paths: Paths,
        *,
        rule: str = "match",
    ) -> None:
        self.target, self.draft, self.policy, self.paths = target, draft, policy, paths
        self.rule = rule
        self._judge = RULES[rule]
        self._mode = str(target.plan.get("mode", ""))
        # What a commit starts is done while the host goes on, so the draft's context needs not wait for the next step.
        self._asynchronous = bool(getattr(target, "asynchronous", False))
        self._state: SequenceLike
        self._sampler: Sampler
        self._history: TokenHistory
        self._first: Row | None = None
        self._current = _Step([])
        self._counts = _Counts()
        self._why = ""
        self._seen = False  # the draft at work, in any request
        self._expected = 1.0
        self._learning = 0.0  # seconds of the last look at a step
        # The next step's block, started already: its anchor, its slots, the draft's length; and how wide steps were.
        self._begun: tuple[tuple[int, int, int], Ahead] | None = None
        self._last_width = 0
        self._tokens: list[int] = []  # whose features wait, in the first rows of `_features`
        self._features: Features | None = None

    @property
    def plan(self) -> Mapping[str, Any]:
        """What was resolved, for records."""
        return {
            "draft": dict(self.draft.plan),
            "policy": self.policy.name,
            "accept": self.rule,
            "costs": self.policy.report().get("costs"),
        }

    def describe(self) -> str:
        """Draft, policy and the speed-up expected before anything of this request is known.

        Of a draft that has not been seen at work the planner assumes much, so that it is tried.
        """
        gain = self.policy.expected_speedup()
        most = "" if self._seen else "up to "
        expects = (
            f"expects {most}{gain:.2f}x plain decoding" if gain > 1 else "expects no gain here"
        )
        return f"on ({self.draft.name}, up to {self.draft.max_depth} tokens a step, {expects})"

    def begin(
        self,
        state: SequenceLike,
        tokens: Sequence[int],
        sampler: Sampler,
        history: TokenHistory,
        progress: Progress | None = None,
    ) -> None:
        """Prefill the rest of the prompt and give its features to the draft chunk by chunk."""
        self._flush()  # of the request before: this one may continue it
        self._state, self._sampler, self._history = state, sampler, history
        self.paths.read.sampler = sampler
        self._first, self._counts, self._why = None, _Counts(), ""
        self._begun, self._last_width = None, 0
        self.paths.refusals.clear()
        self.target.set_taps(self.draft.taps)
        self.draft.begin(state.tokens)
        done = 0

        def computed(now: int, total: int) -> None:
            nonlocal done
            self.draft.extend(tokens[done:now], self.target.tapped(now - done))
            done = now
            if progress:
                progress(now, total)

        self._first = self.target.prefill(state, tokens, computed)
        self._counts.gap = self.draft.gap
        self.policy.begin(state.length, usual=not sampler.params.adjusts)
        self._expected = self.policy.expected_speedup()

    def step(self, limit: int) -> StepResult:
        """The next tokens: one from the prompt's last row, then one or several."""
        assert limit >= 1, limit
        if self._first is not None:
            row, self._first = self._first, None
            return self._single(_Step([]), row, perf_counter())
        self.target.set_taps(self.draft.taps)  # another user of the target may have changed them
        started, length = perf_counter(), self._state.length
        decision = self.policy.choose(length, min(limit, self._state.context - length))
        if limit > 1 or not self._why:  # the last token's step says nothing about the draft
            self._why = decision.why
        step = _Step([], decision.width, path=AR_PATH, length=length)
        computing = perf_counter()
        if decision.width > 1:
            step.planning = computing - started + self._learning
            return self._speculate(step, decision, limit)
        row = self.paths.read(self._state, self._history.output[-1:])[0]
        return self._single(step, row, computing)

    def commit(self, count: int) -> None:
        """Keep the first `count` tokens; state, history and the draft's context forget the others."""
        step, started = self._current, perf_counter()
        assert 1 <= count <= len(step.choices), count
        self._history.pop(len(step.choices) - count)
        if step.width == 0:
            return
        if step.verify is not None:
            step.verify.commit(self._state, count)
        if step.given > count:  # the output has ended inside the step
            self.draft.begin(self._state.tokens)
        elif not step.given:
            self._tokens = self._tokens[: len(self._tokens) - len(step.window) + count]
        committed = perf_counter()
        step.seconds["commit"] = committed - started
        self._observe(step, count)
        self._learning = perf_counter() - committed

    def report(self) -> SpeculationReport:
        """What speculation did since `begin`."""
        counts = self._counts
        return SpeculationReport(
            draft=self.draft.name,
            policy=self.policy.name,
            accept=self.rule,
            steps=counts.steps,
            drafted=counts.drafted,
            accepted=counts.accepted,
            slots=counts.slots,
            widths=dict(sorted(counts.widths.items())),
            cuts=dict(sorted(counts.cuts.items())),
            refusals=dict(self.paths.refusals),
            gap_rows=counts.gap,
            why=self._why,
            expected=self._expected,
            gain=counts.plain_seconds / counts.seconds if counts.seconds else None,
            planner=self.policy.report(),
        )

    def _single(self, step: _Step, row: Row, started: float) -> StepResult:
        """One token from one row, as plain decoding has it."""
        computed = perf_counter()
        choice = self._sampler.choose(row, self._history)
        if step.width:
            self._keep(self._history.output[-1:], self.target.tapped(1))
            step.window = self._history.output[-1:]
        self._history.push(choice.token)
        step.choices = [choice]
        step.seconds = {"target": computed - started, "sample": perf_counter() - computed}
        return self._result(step, rows=step.width)

    def _draft(self, step: _Step, decision: Decision) -> tuple[Match, str]:
        """Fill the window and cut it if the decision has that; who judges it, and the path it is for."""
        self._flush()
        anchor = self._history.output[-1]
        proposals = self.draft.propose(anchor, step.width - 1)
        cutter = decision.cutter
        more = cutter.more if cutter else None
        judge = self._judge(proposals, anchor, self._sampler, self._history, more)
        step.claims = judge.claims
        if cutter and judge.claims:
            decision = cutter.cut(judge.claims)
            if decision.width < step.width:
                step.asked, step.width, self._why = step.width, decision.width, decision.why
                judge.keep(decision.width - 1)
        step.window = [anchor, *judge.drafts]
        return judge, decision.path

    def _runs_ahead(self) -> bool:
        """Whether the target may start on a window before the host knows it: nothing but its tokens is needed then."""
        likeliest = self.rule == "match" or self._sampler.params.greedy
        return self._asynchronous and likeliest and bool(getattr(self.draft, "runs_ahead", False))

    def _block(self, anchor: int, count: int) -> Ahead:
        """The block of this step, which may have been started in the one before."""
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] == (anchor, count, self.draft.length):
            return begun[1]
        found: Ahead = self.draft.propose_ahead(anchor, count)  # type: ignore[attr-defined]
        return found

    def _begin_next(self, step: _Step, limit: int) -> None:
        """Start the next step's block where that will likely have this one's width, before the host does anything else:
        a device would have nothing to do meanwhile.
        """
        usual, self._last_width = self._last_width, step.width
        kept, anchor = len(step.choices), step.choices[-1].token
        room = self._state.context - step.length - kept
        if step.width != usual or anchor in self._sampler.stop_ids:
            return
        if step.width <= min(limit - kept, room):
            key = (anchor, step.width - 1, self.draft.length)
            self._begun = key, self.draft.propose_ahead(anchor, step.width - 1)  # type: ignore[attr-defined]

    def _speculate(self, step: _Step, decision: Decision, limit: int) -> StepResult:
        started, judging = perf_counter(), 0.0

        def timed(index: int, row: Row) -> bool:
            nonlocal judging
            entered = perf_counter()
            more = judge(index, row)
            judging += perf_counter() - entered
            return more

        starts = decision.cutter is None and self._runs_ahead()
        path = self.paths.pick(decision.path, step.width) if starts else None
        if isinstance(path, Batched):
            self._flush()
            step.verify, anchor, count = path, self._history.output[-1], step.width - 1
            ahead = self._block(anchor, count)
            finish = self.target.verify_ahead(self._state, anchor, count, ahead.known)  # type: ignore[attr-defined]
            self.draft.extend_ahead(step.width)  # type: ignore[attr-defined]
            drafted = perf_counter()
            step.window, rows = finish(ahead.told)
            if decision.learns and ahead.claims is not None:
                step.claims = ahead.claims()
            judge = self._judge(Chosen(step.window[1:]), anchor, self._sampler, self._history, None)
            verified = path.judged(rows, timed)
        else:
            judge, preferred = self._draft(step, decision)
            drafted = perf_counter()
            if step.width > 1:
                same = path is not None and step.width == decision.width
                step.verify = path if same else self.paths.pick(preferred, step.width)
                assert step.verify is not None
                verified = step.verify.run(self._state, step.window, timed)
            else:
                verified = self._plain_row(step.window, timed)
        step.choices, step.path = judge.choices, verified.path
        step.drafted, step.accepted, step.judged = len(judge.drafts), judge.accepted, judge.judged
        step.window = step.window[: verified.rows]
        judged = perf_counter()
        if self._asynchronous and isinstance(step.verify, Batched):
            # The draft's rows are computed while the host goes on; no forward comes before the commit.
            step.given = len(step.choices)
            self.draft.extend(step.window[: step.given], verified.features[: step.given])
            if path is step.verify:
                self._begin_next(step, limit)
        else:
            self._keep(step.window, verified.features)
        step.seconds = {
            "plan": step.planning,
            "draft": drafted - started + perf_counter() - judged,
            "target": judged - drafted - judging,
            "sample": judging,
        }
        return self._result(step, rows=verified.rows, mode=verified.mode)

    def _plain_row(self, window: Sequence[int], judge: Judge) -> Verified:
        """Of a window that was cut to its anchor: a plain step."""
        judge(0, self.paths.read(self._state, window)[0])
        return Verified(AR_PATH, self._mode, 1, self.target.tapped(1))

    def _result(self, step: _Step, *, rows: int, mode: str | None = None) -> StepResult:
        self._current = step
        return StepResult(
            tokens=tuple([choice.token for choice in step.choices]),
            logprobs=tuple([c.logprob for c in step.choices if c.logprob is not None]),
            path=step.path,
            mode=mode if mode is not None else self._mode if rows else "",
            rows=rows,
            drafted=step.drafted,
            accepted=step.accepted,
            seconds=step.seconds,
        )

    def _keep(self, tokens: Sequence[int], features: Features) -> None:
        """Remember rows for the draft's next look; `commit` cuts off what was not kept."""
        if self._features is None:
            self._features = self.target.feature_rows(_KEPT_ROWS)
        if len(self._tokens) + len(tokens) > _KEPT_ROWS:
            self._flush()
        first = len(self._tokens)
        self._features[first : first + len(tokens)] = features
        self._tokens += tokens

    def _flush(self) -> None:
        """Give the draft what waits."""
        tokens, self._tokens = self._tokens, []
        if tokens and self._features is not None:
            self.draft.extend(tokens, self._features[: len(tokens)])

    def _observe(self, step: _Step, count: int) -> None:
        seconds, counts = sum(step.seconds.values()), self._counts
        counts.widths[step.width] += 1
        counts.seconds += seconds
        counts.plain_seconds += count * self.policy.plain_seconds(step.length)
        if step.width > 1 or step.asked:
            counts.add(step.drafted, step.judged, step.accepted)
            self._seen = True
        if step.asked:
            counts.cuts[step.width] += 1
        self.policy.observe(
            Observed(
                width=step.width,
                path=step.path,
                length=step.length,
                drafted=step.judged if step.judged == step.accepted else step.drafted,
                accepted=step.accepted,
                seconds=seconds,
                parts=step.seconds,
                asked=step.asked,
                claims=step.claims,
            )
        )
