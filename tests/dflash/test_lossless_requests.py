"""Requests one after another on one engine: kept prefixes, plain ones in between, cancelled and broken ones."""

import itertools
from collections.abc import Callable

import golden_models
import numpy as np
import pytest
from draft_zoo import MAX_DEPTH, accepting, write_block_draft
from fault_cases import some_costs
from lossless_cases import (
    PATHS,
    ScriptedPolicy,
    check_context,
    draft_for,
    outcome,
    plain_engine,
    plain_outcome,
    random_steps,
    spec_engine,
    state_of,
)
from state_bits import Oracle, state_bits

from sparkinfer.dflash.planner import POLICIES, Setup
from sparkinfer.engine import Engine
from sparkinfer.tokenizer import Tokenizer

COUNT = 24
FREE = {"ignore_eos": True, "max_tokens": COUNT, "logprobs": 2}


class Session:
    """The same requests for a plain engine and for one that speculates, each keeping its own state."""

    def __init__(self, name: str, seed: int, activations: str = "int8") -> None:
        self.rng = np.random.default_rng(seed)
        self.target = golden_models.target(name, activations, any_split=True)
        self.tokenizer = Tokenizer.from_gguf(self.target.file)
        self.fresh = plain_engine(self.target, self.tokenizer)
        self.plain = plain_engine(self.target, self.tokenizer)
        self.draft = draft_for("scripted", self.target, self.tokenizer, [], seed)
        self.policy = ScriptedPolicy(random_steps(self.rng))
        self.spec = spec_engine(self.target, self.tokenizer, self.draft, [], policy=self.policy)
        self.oracle = Oracle(self.target)
        self.last: list[int] = []
        self.in_step = True  # both engines hold the same tokens
        self.gaps = False

    def tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, 280, count)]

    def prompt(self, kind: str) -> list[int]:
        """A prompt that shares something with what the engines hold."""
        held = list(state_of(self.spec).tokens) if state_of(self.spec) else []
        cut = int(self.rng.integers(0, len(held) + 1))
        prompt = {
            "new": self.tokens(int(self.rng.integers(1, 90))),
            "turn": [*self.last, *self.tokens(int(self.rng.integers(1, 30)))],
            "edit": [*held[:cut], *self.tokens(int(self.rng.integers(1, 9)))],
            "same": held or self.tokens(5),
            "one more": [*held, 7],
        }[kind]
        return prompt if len(prompt) + COUNT < 500 else self.tokens(9)

    def run(self, kind: str, **extra: object) -> None:
        prompt, options = (
            self.prompt(kind),
            {**FREE, "seed": int(self.rng.integers(2**31)), **extra},
        )
        if self.rng.random() < 0.5:
            options["temperature"] = 1.0
        alone = plain_outcome(self.fresh, prompt, **options)
        self.draft.known = [*prompt, *alone.tokens]
        plain, _ = outcome(self.plain, prompt, **options)
        got, _ = outcome(self.spec, prompt, **options)
        usual = [] if self.in_step else ["usage"]
        assert [d for d in plain.differences(got) if d not in usual] == [], (kind, prompt)
        assert [d for d in alone.differences(got) if d != "usage"] == [], (kind, prompt)
        self.last = self.draft.known
        if extra.get("speculate", True):
            assert not check_context(self.target, self.draft, self.last), kind
            self.gaps = self.gaps and got.usage.cached_tokens > 0  # type: ignore[attr-defined]
            assert self.gaps or self.draft.gap == 0, (kind, self.draft.gap)
        else:
            self.gaps = True

    def cancel(self) -> None:
        """Ends a request after some steps; what is left must be whole."""
        prompt, options = self.prompt("turn"), {**FREE}
        alone = plain_outcome(self.fresh, prompt, **options)
        self.draft.known = [*prompt, *alone.tokens]
        generation = self.spec.stream(prompt, **options)  # type: ignore[arg-type]
        for _ in itertools.islice(generation, int(self.rng.integers(1, 6))):
            pass
        generation.cancel()
        result = generation.result
        count = len(result.tokens)
        assert result.tokens == alone.tokens[:count]
        assert result.finish_reason == ("cancelled" if count < COUNT else "length")
        held = [*prompt, *result.tokens][: len(prompt) + max(0, count - 1)]
        state = state_of(self.spec)
        assert state.tokens == held
        assert state_bits(self.target, state) == self.oracle(held)[0]
        self.last, self.in_step = [*prompt, *result.tokens], False


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        *((name, "int8") for name in golden_models.MODELS),
        *((name, golden_models.BLOCK_CACHE) for name in golden_models.BLOCK_MODELS),
    ],
)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_any_sequence_of_requests(name, activations, seed):
    """Turns, edited and repeated prompts, plain requests between (gap rows), cancelled ones, in random order."""
    session = Session(name, seed, activations)
    kinds = ["new", "turn", "edit", "same", "one more", "plain", "cancel", "reset"]
    for turn in range(12):
        kind = kinds[turn] if turn < 5 else str(session.rng.choice(kinds))
        if kind == "cancel":
            session.cancel()
        elif kind == "reset":
            session.spec.reset()
            session.plain.reset()
            session.in_step, session.gaps = True, False
        elif kind == "plain":
            session.run("turn", speculate=False)
        else:
            session.run(kind)


Trip = Callable[[pytest.MonkeyPatch, Session, BaseException], None]


def _after(calls: int, real: Callable[..., object], error: BaseException) -> Callable[..., object]:
    """`real`, that raises once it has done its work the given number of times."""
    left = iter(range(calls))

    def tripping(*args: object, **more: object) -> object:
        value = real(*args, **more)
        if next(left, None) is None:
            raise error
        return value

    return tripping


def _trip_propose(patch: pytest.MonkeyPatch, session: Session, error: BaseException) -> None:
    patch.setattr(session.draft, "propose", _after(2, session.draft.propose, error))


def _trip_extend(patch: pytest.MonkeyPatch, session: Session, error: BaseException) -> None:
    patch.setattr(session.draft, "extend", _after(3, session.draft.extend, error))


def _trip_forward(patch: pytest.MonkeyPatch, session: Session, error: BaseException) -> None:
    patch.setattr(session.target, "forward", _after(4, session.target.forward, error))


def _trip_features(patch: pytest.MonkeyPatch, session: Session, error: BaseException) -> None:
    patch.setattr(session.target, "tapped", _after(3, session.target.tapped, error))


def _trip_apply(patch: pytest.MonkeyPatch, session: Session, error: BaseException) -> None:
    """Between the layers' states and the length that belongs to them."""
    state = session.spec._prefix._sequence()
    patch.setattr(state, "_apply", _after(1, state._apply, error))


def _trip_observe(patch: pytest.MonkeyPatch, session: Session, error: BaseException) -> None:
    patch.setattr(session.policy, "observe", _after(2, session.policy.observe, error))


TRIPS: tuple[Trip, ...] = (
    _trip_propose, _trip_extend, _trip_forward, _trip_features, _trip_apply, _trip_observe,
)  # fmt: skip


@pytest.mark.parametrize("trip", TRIPS)
@pytest.mark.parametrize(
    ("error", "path"),
    [
        (KeyboardInterrupt(), "window"),
        (KeyboardInterrupt(), "token_loop"),
        (RuntimeError("a fault"), "block"),
        pytest.param(KeyboardInterrupt(), "block", marks=pytest.mark.long),
        pytest.param(RuntimeError("a fault"), "compact", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", ["qwen3-tiny-Q8_0", "qwen35-tiny-F32"])
def test_an_exception_inside_a_step_leaves_the_engine_usable(monkeypatch, name, error, path, trip):
    """51: it is raised, the text so far is the plain one, and the next requests are as if nothing had happened."""
    session = Session(name, 3)
    session.policy.steps = [(5, path)]
    session.run("new")
    prompt = session.prompt("turn")
    plain = plain_outcome(session.fresh, prompt, **FREE)
    session.draft.known = [*prompt, *plain.tokens]
    with monkeypatch.context() as patch:
        trip(patch, session, error)
        generation = session.spec.stream(prompt, **FREE)  # type: ignore[arg-type]
        if trip is _trip_apply and (path in ("token_loop", "block") or name.startswith("qwen3-")):
            assert generation.result.tokens == plain.tokens  # nothing is applied there
        else:
            with pytest.raises(type(error)):
                for _ in generation:
                    pass
            if isinstance(error, KeyboardInterrupt):
                assert generation.result.finish_reason == "cancelled"
                assert generation.result.tokens == plain.tokens[: len(generation.result.tokens)]
    session.last, session.in_step = session.draft.known, False
    session.run("turn")
    session.run("edit")


@pytest.mark.parametrize("name", ["llama-tiny-F32", "qwen35moe-tiny-F32"])
@pytest.mark.parametrize("depth", [1, 4, 7, MAX_DEPTH])
def test_the_context_is_filled_to_its_last_token(name, depth):
    """51: no window reaches beyond the context, whatever is left of it."""
    target = golden_models.target(name, context=64)
    tokenizer = Tokenizer.from_gguf(target.file)
    plain = plain_engine(target, tokenizer)
    for length, path in itertools.product((1, 40, 61, 62, 63, 64), PATHS):
        prompt = golden_models.tokens(64)[:length]
        options = {"ignore_eos": True, "logprobs": 0}
        wanted = plain_outcome(plain, prompt, **options)
        draft = draft_for("oracle", target, tokenizer, [*prompt, *wanted.tokens], 0)
        got, _ = outcome(
            spec_engine(target, tokenizer, draft, [(depth + 1, path)]), prompt, **options
        )
        assert not wanted.differences(got)
        assert (len(got.tokens), got.finish_reason) == (64 - length, "context")


@pytest.mark.parametrize("policy", ["auto", "always", "fixed", "off"])
@pytest.mark.parametrize("name", ["qwen3-tiny-Q8_0", "qwen35moe-tiny-F32"])
def test_no_policy_changes_an_output(name, policy):
    """The planner's choices hang on a clock; outputs do not. Good, bad and changing drafts in turn."""
    target = golden_models.target(name, any_split=True)
    tokenizer = Tokenizer.from_gguf(target.file)
    plain = plain_engine(target, tokenizer)
    draft = draft_for("oracle", target, tokenizer, [], 0)
    made = POLICIES[policy](Setup(some_costs(), MAX_DEPTH, target.max_width, proposals=6))
    engine = spec_engine(target, tokenizer, draft, [], policy=made)
    widths: set[int] = set()
    for turn, accepted in enumerate([[15], [0], [15, 15, 0, 0, 2], [1], [7]]):
        prompt = golden_models.tokens(20, seed=turn % 3)
        options = {"max_tokens": 90, "ignore_eos": True, "logprobs": 1}
        if turn % 2:
            options |= {"temperature": 1.0, "seed": turn}
        wanted = plain_outcome(plain, prompt, **options)
        draft.known, draft.guess = [*prompt, *wanted.tokens], accepting(accepted, 320)
        got, result = outcome(engine, prompt, **options)
        assert [d for d in wanted.differences(got) if d != "usage"] == []
        assert not check_context(target, draft, draft.known)
        assert draft.gap == 0
        widths |= set(result.speculation.widths)
    if policy != "auto":  # what that one takes depends on this machine
        assert (max(widths) > 1) == (policy != "off"), widths


def test_a_draft_on_disk_through_the_engine(tmp_path, monkeypatch):
    """The whole way: files, measured costs, planner, network; the same text with and without, and said so."""
    monkeypatch.setenv("SPARKINFER_CACHE_DIR", str(tmp_path / "cache"))
    model = golden_models.FOLDER / "qwen35-tiny256-Q4_K_M.gguf"
    folder = write_block_draft(tmp_path / "draft", golden_models.target(model.stem))
    options = {"max_tokens": 60, "ignore_eos": True, "logprobs": 2, "temperature": 0.8, "seed": 4}
    with Engine.load(model, context=256, threads=2) as plain:
        wanted, _ = outcome(plain, "the end of the", **options)
        assert plain.speculation == "off (no draft given)"
    for spec in ("on", "auto", "off"):
        with Engine.load(model, context=256, threads=2, draft=folder, spec=spec) as engine:
            got, result = outcome(engine, "the end of the", **options)
            assert not wanted.differences(got)
            assert engine.speculation.startswith("off" if spec == "off" else "on (draft")
            assert (result.speculation is None) == (spec == "off")
            if spec == "on":
                assert result.speculation.drafted > 0
