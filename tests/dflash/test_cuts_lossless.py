"""Cutting windows by claims changes no output: any draft, any claims, any cut, on any path."""

import functools
import itertools

import golden_models
import numpy as np
import pytest
from draft_zoo import KINDS
from lossless_cases import ScriptedPolicy, draft_for, options_of, outcome, random_case, spec_engine
from planner_simulator import cheap, cost_table
from test_lossless_matrix import COUNT, PROMPTS, Bench

from sparkinfer.dflash.planner import Decision, make_policy
from sparkinfer.options import resolve

TARGETS = list(itertools.product(golden_models.MODELS, golden_models.ACTIVATIONS))
bench = functools.cache(lambda name, activations: Bench(name, activations, COUNT))


class ClaimingProposals:
    """Proposals that claim anything at all."""

    def __init__(self, inner, rng):
        self.inner, self.rng, self.depth = inner, rng, inner.depth
        self.asked = []

    def best(self, slot, previous):
        return self.inner.best(slot, previous)

    def row(self, slot, previous):
        return self.inner.row(slot, previous)

    def surest(self, slot, previous):
        self.asked.append(slot)
        return self.best(slot, previous), float(self.rng.random())


class ClaimingDraft:
    """A draft of the zoo whose proposals claim at random."""

    def __init__(self, inner, seed):
        self._inner, self.rng = inner, np.random.default_rng(seed)
        self.last = None

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def propose(self, anchor, depth):
        self.last = ClaimingProposals(self._inner.propose(anchor, depth), self.rng)
        return self.last


class CuttingPolicy(ScriptedPolicy):
    """Cuts wherever it likes, and stops the draft wherever it likes."""

    def __init__(self, steps, seed):
        super().__init__(steps)
        self.rng = np.random.default_rng(seed)
        self.asked, self.cuts = None, 0

    def choose(self, length, limit):
        decision = super().choose(length, limit)
        self.asked = Decision(
            decision.width, decision.path, "scripted", self if decision.width > 1 else None
        )
        return self.asked

    def more(self, claims):
        assert all(0.0 <= claim <= 1.0 for claim in claims)
        return bool(self.rng.random() < 0.8)

    def cut(self, claims):
        width = int(self.rng.integers(1, len(claims) + 2))
        self.cuts += width < self.asked.width
        return Decision(width, self.asked.path if width > 1 else "ar", "cut")


def compare(setup, case, number, rule="match"):
    """One request plainly and with random cuts; the policy, and the result with them."""
    prompt, free = setup.prompt(number), setup.free(number)
    rng = np.random.default_rng(case.seed)
    n_vocab = setup.target.config.n_vocab
    options = options_of(case.setting, free, n_vocab, setup.count, rng)
    plain = setup.plain(prompt, options)
    known = [*prompt, *plain.tokens]
    draft = draft_for(case.kind, setup.target, setup.tokenizer, known, case.seed)
    policy = CuttingPolicy(case.steps, case.seed)
    claiming = ClaimingDraft(draft, case.seed)
    engine = spec_engine(
        setup.target, setup.tokenizer, claiming, case.steps, policy=policy, rule=rule
    )
    got, result = outcome(engine, prompt, **options)
    assert not plain.differences(got), (case.what, number, plain, got)
    assert draft.gap == 0
    report = result.speculation
    assert sum(report.cuts.values()) == policy.cuts
    for seen in policy.seen:
        assert seen.accepted <= seen.drafted < max(seen.width, 1) or seen.width == 1
        assert seen.asked == 0 or seen.asked > seen.width
    return policy, result


@pytest.mark.parametrize(("name", "activations"), TARGETS)
def test_random_claims_and_cuts(name, activations):
    rng, cuts = np.random.default_rng(21), 0
    for turn in range(7):
        policy, _ = compare(bench(name, activations), random_case(rng), turn % len(PROMPTS))
        cuts += policy.cuts
    assert cuts > 10


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_draft(kind):
    rng = np.random.default_rng(22)
    setup = bench(*TARGETS[0])
    for turn in range(3):
        case = random_case(rng)
        compare(setup, type(case)(case.setting, kind, case.steps, case.seed), turn % len(PROMPTS))


def case_of(setting, seed=5, kind="oracle"):
    case = random_case(np.random.default_rng(seed))
    return type(case)(setting, kind, ((5, "window"),), seed)


def test_what_was_cut_is_not_judged_and_not_counted_as_drafted():
    policy, result = compare(bench(*TARGETS[0]), case_of("greedy"), 1)
    report = result.speculation
    assert policy.cuts > 3
    reached = [seen for seen, _ in report.slots]
    assert reached == sorted(reached, reverse=True)
    drafted = sum(seen.drafted for seen in policy.seen if seen.width > 1)
    assert report.drafted >= drafted and report.accepted <= report.drafted
    assert sum(report.widths.values()) == len(policy.seen)
    assert report.widths.get(1, 0) >= report.cuts.get(1, 0)
    one = [seen for seen in policy.seen if seen.asked and seen.width == 1]
    assert all(seen.path == "ar" and seen.drafted == seen.accepted == 0 for seen in one)
    assert all(len(seen.claims) >= 1 and seen.parts["draft"] > 0 for seen in one)


def test_under_rejection_only_greedy_windows_are_cut():
    """Drawn drafts must not be cut by their own probability: the likely ones would win."""
    setup = bench(*TARGETS[0])
    policy, _ = compare(setup, case_of("greedy"), 1, rule="rejection")
    assert policy.cuts > 3
    case = case_of("sampled")
    draft = draft_for(case.kind, setup.target, setup.tokenizer, setup.prompt(1), case.seed)
    claiming, policy = ClaimingDraft(draft, 1), CuttingPolicy(case.steps, 1)
    engine = spec_engine(
        setup.target, setup.tokenizer, claiming, case.steps, policy=policy, rule="rejection"
    )
    outcome(engine, setup.prompt(1), temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    assert claiming.last is not None and claiming.last.asked == []
    assert policy.cuts == 0


@pytest.mark.parametrize("name", golden_models.MODELS)
def test_the_planner_itself_with_a_draft_that_claims_at_random(name):
    setup = bench(name, golden_models.ACTIVATIONS[0])
    prompt, options = (
        setup.prompt(1),
        {"max_tokens": COUNT, "ignore_eos": True, "reuse_prefix": False},
    )
    plain = setup.plain(prompt, options)
    for seed in range(3):
        draft = draft_for("oracle", setup.target, setup.tokenizer, [*prompt, *plain.tokens], seed)
        policy = make_policy(resolve({}, {}), cost_table(cheap, 0.05), 7, 8)
        engine = spec_engine(
            setup.target, setup.tokenizer, ClaimingDraft(draft, seed), (), policy=policy
        )
        for _ in range(3):
            got, _ = outcome(engine, prompt, **options)
            assert not plain.differences(got)
