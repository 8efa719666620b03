"""Plain decoding and any draft, path and depth, side by side: cases of the claim that speculation changes nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from draft_zoo import KINDS, MAX_DEPTH, ZooDraft, make_draft
from golden_models import on_host
from state_bits import Bits, state_bits

from sparkinfer.dflash.loop import DFlashDecoder
from sparkinfer.dflash.planner import Decision, Observed
from sparkinfer.dflash.verify import Paths
from sparkinfer.engine import Engine
from sparkinfer.models import Target
from sparkinfer.tokenizer import Tokenizer

PATHS = ("compact", "window", "token_loop", "block")
Options = dict[str, Any]


class ScriptedPolicy:
    """Widths and paths in a circle, as far as the limit goes; keeps what it was told."""

    name = "scripted"

    def __init__(self, steps: Sequence[tuple[int, str]]) -> None:
        self.steps, self.turn = list(steps), 0
        self.seen: list[Observed] = []
        self.begun: list[int] = []

    def begin(self, length: int, *, usual: bool = True) -> None:
        self.begun.append(length)

    def choose(self, length: int, limit: int) -> Decision:
        assert limit >= 1, limit
        width, path = self.steps[self.turn % len(self.steps)]
        self.turn += 1
        width = min(width, limit)
        return Decision(width, path if width > 1 else "ar", "scripted")

    def observe(self, step: Observed) -> None:
        self.seen.append(step)

    def expected_speedup(self) -> float:
        return 1.0

    def plain_seconds(self, length: int) -> float:
        return 1e-3

    def report(self) -> dict[str, Any]:
        return {"turns": self.turn}


@dataclass(frozen=True)
class Outcome:
    """Everything of a request that must not depend on how its rows were computed."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[str, ...]  # every float as its hexadecimal digits
    finish_reason: str
    stop: object
    usage: object
    deltas: str
    state_tokens: tuple[int, ...]
    state: Bits

    def differences(self, other: "Outcome") -> list[str]:
        names = [field.name for field in fields(self)]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def state_of(engine: Engine) -> Any:
    """The sequence the engine keeps between requests."""
    return engine._prefix._state


def outcome(engine: Engine, prompt: Sequence[int], **options: Any) -> tuple[Outcome, Any]:
    """Runs a request piece by piece; its outcome and the Result."""
    generation = engine.stream(prompt, **options)
    pieces = [delta.text for delta in generation]
    result, state = generation.result, state_of(engine)
    logprobs = [
        f"{item.token} {item.logprob.hex()} "
        + " ".join(f"{token} {value.hex()}" for token, value in item.top)
        for item in result.logprobs
    ]
    assert sum(count.tokens for count in result.paths.values()) == len(result.tokens)
    return Outcome(
        text=result.text,
        tokens=result.tokens,
        logprobs=tuple(logprobs),
        finish_reason=result.finish_reason,
        stop=result.stop,
        usage=result.usage,
        deltas="".join(pieces),
        state_tokens=tuple(state.tokens),
        state=state_bits(engine.target, state) if isinstance(engine.target, Target) else (),
    ), result


def plain_engine(target: Target, tokenizer: Tokenizer) -> Engine:
    return Engine(target, tokenizer)


def plain_outcome(engine: Engine, prompt: Sequence[int], **options: Any) -> Outcome:
    """A request of plain decoding without taps, in a state of its own unless the options say otherwise."""
    target: Any = engine.target
    taps = target.taps
    target.set_taps(())
    try:
        return outcome(engine, prompt, **{"reuse_prefix": False} | options)[0]
    finally:
        target.set_taps(taps)


def spec_engine(
    target: Any,
    tokenizer: Any,
    draft: Any,
    steps: Sequence[tuple[int, str]],
    *,
    rule: str = "match",
    rows: bool = True,
    compact: int = 2,
    policy: Any = None,
) -> Engine:
    """An engine that speculates; `steps` are (width, path) in a circle."""
    decoder = DFlashDecoder(
        target,
        draft,
        policy or ScriptedPolicy(steps),
        Paths(target, rows=rows, compact=compact),
        rule=rule,
    )
    return Engine(target, tokenizer, decoder=decoder)


SETTINGS = (
    "greedy", "logprobs", "sampled", "nucleus", "penalties", "sampled penalties", "bias", "min_tokens", "stop id",
    "stop string", "two stops", "short", "text end", "everything",
)  # fmt: skip


def options_of(
    setting: str, free: Outcome, n_vocab: int, count: int, rng: np.random.Generator
) -> Options:
    """Request options of a setting; `free` is the greedy output that nothing stops, `count` the most tokens."""
    tokens = free.tokens
    at = int(rng.integers(1, len(tokens)))
    seed = int(rng.integers(1, 2**40))
    run: Options = {"max_tokens": count, "ignore_eos": True, "logprobs": 1}
    sampled = {"temperature": 1.0, "seed": seed}
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.3}
    bias = {int(t): float(b) for t, b in zip(tokens[:4], (-100, 3, -2, 1), strict=False)}
    cut = int(rng.integers(0, max(1, len(free.text) - 3)))
    table: dict[str, Options] = {
        "greedy": {"logprobs": None},
        "logprobs": {"logprobs": 20},
        "sampled": sampled,
        "nucleus": {"temperature": 0.8, "seed": seed, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        "penalties": penalties,
        "sampled penalties": sampled | penalties,
        "bias": {"logit_bias": bias | {n_vocab - 1: 4.0}},
        "min_tokens": {"min_tokens": min(at + 3, count), "stop_ids": [tokens[0], tokens[at]]},
        "stop id": {"stop_ids": [tokens[at]]},
        "stop string": {"stop": free.text[cut : cut + 2] or "a"},
        "two stops": {"stop": [free.text[cut : cut + 3] or "a", "he"], "stop_ids": [tokens[at]]},
        "short": {"max_tokens": int(rng.choice([0, 1, 2, 3, 15, 16, 17]))},
        "text end": {"ignore_eos": False, "temperature": 1.5, "seed": seed},
        "everything": {
            **penalties,
            "temperature": 0.9,
            "seed": seed,
            "top_k": 60,
            "top_p": 0.95,
            "logit_bias": {tokens[at]: 2.5},
            "min_tokens": min(4, count),
            "stop_ids": [tokens[at]],
            "stop": ["e", "th"],
            "ignore_eos": False,
            "logprobs": 3,
        },
    }
    return run | table[setting]


@dataclass(frozen=True)
class Case:
    """What one comparison runs; `steps` are (width, path) in a circle."""

    setting: str
    kind: str
    steps: tuple[tuple[int, str], ...]
    seed: int

    @property
    def what(self) -> str:
        return f"{self.setting}, draft {self.kind}, steps {self.steps[:6]}, seed {self.seed}"


def random_steps(rng: np.random.Generator) -> tuple[tuple[int, str], ...]:
    """One width and path for good, or another width, another path, or both at every step."""
    style = int(rng.integers(4))
    count = 1 if style == 0 else 48
    widths = [int(rng.integers(2, MAX_DEPTH + 2)) for _ in range(count)]
    paths = [str(rng.choice(PATHS)) for _ in range(count)]
    if style == 1:
        widths = widths[:1] * count
    elif style == 2:
        paths = paths[:1] * count
    elif style == 3:  # plain steps in between
        widths = [1 if rng.random() < 0.3 else width for width in widths]
    return tuple(zip(widths, paths, strict=True))


def random_case(rng: np.random.Generator) -> Case:
    return Case(
        setting=str(rng.choice(SETTINGS)),
        kind=str(rng.choice(KINDS)),
        steps=random_steps(rng),
        seed=int(rng.integers(2**31)),
    )


def draft_for(kind: str, target: Any, tokenizer: Any, known: Sequence[int], seed: int) -> ZooDraft:
    """A zoo draft over a loaded model, with two taps."""
    layers = target.config.n_layers
    return make_draft(
        kind,
        target.config.n_vocab,
        known,
        seed=seed,
        taps=(0, layers - 1),
        stop_ids=sorted(tokenizer.stop_ids),
    )


def check_context(target: Target, draft: ZooDraft, whole: Sequence[int]) -> list[str]:
    """What is wrong with the rows the draft was given: tokens, and features against single rows, bit for bit."""
    wrong = []
    if draft.tokens != list(whole[: draft.length]):
        wrong.append("context tokens")
    if not target.backend.on_host:
        return wrong  # the prompt's rows come from other kernels there
    state = target.new_state()
    for position, (token, row) in enumerate(zip(draft.tokens, draft.rows, strict=True)):
        target.forward(state, [token], rows="none")
        if row is not None and row.tobytes() != on_host(target.tapped(1))[0].tobytes():
            wrong.append(f"features of position {position}")
    return wrong


def step_paths(result: Any) -> Mapping[str, int]:
    """Steps by path, without the mode."""
    counts: dict[str, int] = {}
    for name, count in result.paths.items():
        path = name.split("/")[0]
        counts[path] = counts.get(path, 0) + count.steps
    return counts
