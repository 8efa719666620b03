"""The evaluation record: every input, sample and event of one A/B evaluation, from which its verdict follows.

A record is plain data. `judge(evaluation)` (verdict.py) is a pure function of it, so whoever holds the record can
derive the verdict again. JSON holds every field; `digest` is over the canonical form (codec.py), not over a file's
bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sparkinfer.errors import MissingFileError
from sparkinfer.evaluation import codec
from sparkinfer.evaluation.codec import RecordError, Scalar

SCHEMA = "sparkinfer-eval/1"
LEAST = 1e-12  # of a figure; its inverse is the greatest, so that no ratio leaves the floats
MOST_BLOCKS = 400  # a record comes from anybody, and judging it must stay cheap

BuildKind = Literal["git", "wheel", "options", "none"]  # "none": there is no base yet (BASELINE)
Level = Literal["ok", "warn", "refuse"]
Side = Literal["base", "candidate", "a1", "a2"]  # a1 and a2: the base against itself
Role = Literal["primary", "secondary"]
# "published": figures somebody printed, one a side; they have no interval.
Source = Literal["measured", "published"]
EventKind = Literal["note", "retry", "failure", "infrastructure"]
Verdict = Literal[
    "BETTER", "WORSE", "EQUIVALENT", "MIXED", "INCONCLUSIVE", "INVALID", "INFRASTRUCTURE"
]
GuardState = Literal["clear", "open", "failed"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A rate that is measured in every cell of the scope; more is better."""

    name: str
    role: Role = "secondary"
    unit: str = "tok/s"


@dataclass(frozen=True, slots=True)
class Guard:
    """Rates of a model at these contexts that a change may not lower; cells are named `<model> ctx <n>`.

    `model` "target" is the scope's own.
    """

    model: str
    contexts: tuple[int, ...]
    metrics: tuple[str, ...] = ("decode_tps", "prefill_tps")

    def cell(self, context: int) -> str:
        return f"{self.model} ctx {context}"


@dataclass(frozen=True, slots=True)
class Bars:
    """What must hold besides speed. Ratios are candidate over base unless said otherwise.

    `guard`: a guard below it fails. `reject`: a primary rate below it is REJECT. `agree`: share of tokens where
    speculative and plain output are equal. `top1`: least share of positions where the most likely token is the base's;
    `kl`: greatest mean divergence from it in nats. `floor`: least speculative rate over the candidate's own plain
    rate in the same process.
    """

    guard: float = 0.98
    reject: float = 0.98
    agree: float = 1.0
    top1: float = 0.99
    kl: float = 0.01
    floor: float = 0.97


@dataclass(frozen=True, slots=True)
class Scope:
    """What is evaluated and how long. A campaign is one such record (scope.py has a table and reads files).

    `target` and `draft` are names; "auto" is the draft that comes with the package, None plain decoding only.
    `prompts` by domain; a cell of the primary metric is a domain, or `ctx <n>` for each of `contexts`. `tokens` are
    generated per prompt after `warmup` unmeasured ones. `blocks` is the greatest number of ABBA blocks, `looks` the
    numbers after which the evaluation may stop. `delta` is the least relevant change (0.01: 1 %), `alpha` the
    chance of a wrong verdict. `aa_blocks` compare the base with itself first.
    """

    name: str
    title: str
    device: str
    target: str
    prompts: Mapping[str, tuple[str, ...]]
    metrics: tuple[Metric, ...]
    tokens: int
    looks: tuple[int, ...]
    draft: str | None = None
    contexts: tuple[int, ...] = ()
    guards: tuple[Guard, ...] = ()
    warmup: int = 16
    aa_blocks: int = 4
    delta: float = 0.01
    alpha: float = 0.05
    noise_limit: float = 0.10
    bars: Bars = field(default_factory=Bars)
    minutes: float = 0.0

    @property
    def blocks(self) -> int:
        return self.looks[-1]

    @property
    def primary(self) -> str:
        return next(metric.name for metric in self.metrics if metric.role == "primary")

    @property
    def cells(self) -> tuple[str, ...]:
        """Names of the primary metric's cells."""
        return (*self.prompts, *(f"ctx {context}" for context in self.contexts))

    def __post_init__(self) -> None:
        _check_scope(self)


@dataclass(frozen=True, slots=True)
class Build:
    """One side: what was built, from what. `options` are process options by name, without secrets."""

    kind: BuildKind
    name: str
    sha: str | None = None
    merged_onto: str | None = None
    tree_sha: str | None = None
    wheel_sha256: str | None = None
    lock_sha256: str | None = None
    options: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file that both sides read."""

    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Check:
    """One thing the preflight looked at; `refuse` stops an evaluation before it starts."""

    name: str
    value: Scalar
    level: Level
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided before the first sample. `blocks` has the order of sides in each block, by slot.

    Each block is base-candidate-candidate-base or its mirror, by a fair coin of its own from `seed`: that makes the
    sign-flip test exact whatever the noise is like (stats.py).
    """

    seed: int
    blocks: tuple[tuple[Side, ...], ...]
    looks: tuple[int, ...]
    delta: float
    alpha: float
    primary: str
    warmup: int

    def __post_init__(self) -> None:
        _check_plan(self)


@dataclass(frozen=True, slots=True)
class Correctness:
    """One check of one side, made before speed; `numbers` are what it measured ("agree", "top1", "kl", ...)."""

    check: str
    cell: str
    side: Side
    passed: bool
    detail: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepMs:
    """Milliseconds of a step by part."""

    draft: float
    target: float
    sample: float
    rest: float

    @property
    def total(self) -> float:
        return self.draft + self.target + self.sample + self.rest


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure of one side at one place of the schedule. `paths` counts steps by path; `accept` is tokens a step.

    `slots`: for each place after the anchor, how many drafts were judged and how many of them kept.
    """

    block: int
    slot: int
    side: Side
    metric: str
    cell: str
    guard: bool
    value: float
    unit: str
    tokens: int
    seconds: float
    paths: Mapping[str, int] = field(default_factory=dict)
    accept: float | None = None
    step_ms: StepMs | None = None
    slots: tuple[tuple[int, ...], ...] = field(default=(), metadata=codec.LATER)


@dataclass(frozen=True, slots=True)
class OneTime:
    """A cost that is paid once (load, calibration, first step), kept out of the rates."""

    block: int
    slot: int
    side: Side
    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `failure`: a side's own (build, crash); `infrastructure`: nobody's (disk, network)."""

    kind: EventKind
    stage: str
    message: str
    side: Side | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation, complete. `inputs` by role: model, draft, prompts, and each guard's model by its name."""

    id: str
    created: str
    scope: Scope
    base: Build
    candidate: Build
    inputs: Mapping[str, InputFile]
    machine: Mapping[str, Any]
    preflight: tuple[Check, ...]
    plan: Plan
    correctness: tuple[Correctness, ...]
    aa: tuple[Sample, ...]
    samples: tuple[Sample, ...]
    one_time: tuple[OneTime, ...]
    events: tuple[Event, ...]
    seconds: float
    source: Source = "measured"
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        _check_evaluation(self)

    @property
    def digest(self) -> str:
        return codec.digest(self)

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = codec.encode(self)
        return plain

    def to_json(self) -> str:
        return codec.canonical(self).decode()

    @classmethod
    def from_dict(cls, values: Any) -> "Evaluation":
        """Raises: RecordError that names the field."""
        schema = values.get("schema") if isinstance(values, dict) else None
        if isinstance(schema, str) and schema != SCHEMA:
            raise RecordError(f"schema is {schema!r}; this version reads {SCHEMA!r}")
        return codec.decode(cls, values)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Evaluation":
        """Raises: RecordError that names the field."""
        return cls.from_dict(codec.parse_json(text, "the evaluation record"))


@dataclass(frozen=True, slots=True)
class Effect:
    """Candidate over base of one metric in one cell; `cell` "all" is the mean of the logarithms over cells.

    Ratios are 1 for no change. `low`, `high`: the interval that was decided on, None where there is none. `level`: its
    confidence. `p`: two-sided, of no change; a guard's is one-sided, of being at its bar or above. `p_holm`: corrected
    for the family it belongs to. `mde`: the change that this noise and number of blocks find in 4 of 5 cases. `bca`:
    bootstrap interval at 95 %, for comparison only. `base`, `candidate`: geometric means of the sides. `state`: a
    guard's; None for other effects, and for a floor that the base is under as well.
    """

    metric: str
    cell: str
    guard: bool
    unit: str
    base: float
    candidate: float
    point: float
    low: float | None
    high: float | None
    level: float
    p: float | None
    p_holm: float | None
    mde: float | None
    n: int
    bca_low: float | None = None
    bca_high: float | None = None
    state: GuardState | None = None


@dataclass(frozen=True, slots=True)
class PathShift:
    """Share of steps that a path took on each side; `changed` if more than the sides vary by themselves."""

    metric: str
    cell: str
    path: str
    base: float
    candidate: float
    changed: bool


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows from a record. `label` None: nothing was judged. `basis` says what the label rests on.

    `more_blocks`: how many more blocks would probably settle an INCONCLUSIVE, None where that cannot be said.
    """

    verdict: Verdict
    label: str | None
    basis: Literal["interval", "unreplicated", "none"]
    reasons: tuple[str, ...]
    effects: tuple[Effect, ...]
    path_mix: tuple[PathShift, ...]
    correctness_passed: bool
    aa_ok: bool | None
    aa: Effect | None
    looks_used: int
    more_blocks: int | None

    @property
    def primary(self) -> Effect | None:
        """The effect that the verdict rests on."""
        return next((e for e in self.effects if e.cell == "all" and not e.guard), None)

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = codec.encode(self)
        return plain


def load_evaluation(path: Path) -> Evaluation:
    """Read a record from a file. Raises: MissingFileError, RecordError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise MissingFileError(
            f"cannot read the evaluation record {path}: {error.strerror}"
        ) from error
    return Evaluation.from_json(content)


def _require(fine: bool, message: str) -> None:
    if not fine:
        raise RecordError(message)


def _check_rules(alpha: float, delta: float, looks: tuple[int, ...], what: str) -> None:
    _require(0 < alpha <= 0.2, f"{what} alpha is {alpha}; expected more than 0 and at most 0.2")
    _require(0 < delta <= 0.5, f"{what} delta is {delta}; expected more than 0 and at most 0.5")
    most = max(looks, default=0)
    _require(most <= MOST_BLOCKS, f"{what} looks go to {most}; expected at most {MOST_BLOCKS}")
    rising = all(before < after for before, after in zip((0, *looks), looks, strict=False))
    _require(bool(looks) and rising, f"{what} looks are {list(looks)}; expected rising numbers")


def _check_scope(scope: Scope) -> None:
    what = f"scope {scope.name!r}:"
    _check_rules(scope.alpha, scope.delta, scope.looks, what)
    primaries = [metric.name for metric in scope.metrics if metric.role == "primary"]
    _require(len(primaries) == 1, f"{what} primary metrics are {primaries}; expected one")
    names = [metric.name for metric in scope.metrics]
    _require(len(set(names)) == len(names), f"{what} metrics {names} name one twice")
    _require(bool(scope.cells), f"{what} it has neither prompts nor contexts")
    _require("all" not in scope.cells, f"{what} a domain may not be called 'all'")
    empty = [domain for domain, texts in scope.prompts.items() if not texts]
    _require(not empty, f"{what} the domains {empty} have no prompts")
    _require(scope.tokens >= 1, f"{what} tokens is {scope.tokens}; expected 1 or more")
    _require(scope.warmup >= 0, f"{what} warmup is {scope.warmup}; expected 0 or more")
    _require(scope.aa_blocks >= 0, f"{what} aa_blocks is {scope.aa_blocks}; expected 0 or more")
    for guard in scope.guards:
        fine = bool(guard.contexts) and all(context >= 1 for context in guard.contexts)
        _require(fine, f"{what} guard {guard.model!r} has contexts {list(guard.contexts)}")
        _require(bool(guard.metrics), f"{what} guard {guard.model!r} has no metrics")
    limit = scope.noise_limit
    _require(limit > 0, f"{what} noise_limit is {limit}; expected more than 0")


def _check_plan(plan: Plan) -> None:
    _check_rules(plan.alpha, plan.delta, plan.looks, "plan:")
    _require(plan.seed >= 0, f"plan: seed is {plan.seed}; expected 0 or more")
    most = len(plan.blocks)
    _require(plan.looks[-1] <= most, f"plan: a look after {plan.looks[-1]} of {most} blocks")
    for number, block in enumerate(plan.blocks):
        sides = set(block)
        text = f"plan: block {number} is {list(block)}; expected base and candidate equally often"
        even = block.count("base") == block.count("candidate") > 0
        _require(sides == {"base", "candidate"} and even, text)


def _check_evaluation(evaluation: Evaluation) -> None:
    schema = evaluation.schema
    _require(schema == SCHEMA, f"schema is {schema!r}; this version reads {SCHEMA!r}")
    for place, sides in (("samples", {"base", "candidate"}), ("aa", {"a1", "a2"})):
        for number, sample in enumerate(getattr(evaluation, place)):
            where = f"{place}[{number}]"
            expected = " or ".join(sorted(sides))
            _require(sample.side in sides, f"{where}.side is {sample.side!r}; expected {expected}")
            fine = LEAST <= sample.value <= 1 / LEAST
            text = f"{where}.value is {sample.value}; expected {LEAST:g} to {1 / LEAST:g}"
            _require(fine, text)
            least = min(sample.block, sample.slot, sample.tokens)
            _require(least >= 0, f"{where} has a negative block, slot or token count")
            fine = all(len(pair) == 2 and 0 <= pair[1] <= pair[0] for pair in sample.slots)
            _require(fine, f"{where}.slots has a place where more drafts were kept than judged")
