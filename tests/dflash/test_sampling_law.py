"""Speculative sampling follows the target's exact law: three positions jointly, both acceptance rules, every sampler.

30: the parameters of sampling reach every row of a window. 38: acceptance is min(1, p / q), nothing else.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from draft_zoo import LawDraft
from lossless_cases import ScriptedPolicy
from test_sampling import oracle
from toy_model import ToySequence, ToyTarget, ToyTokenizer

from sparkinfer.decoding import AutoregressiveDecoder, Decoder
from sparkinfer.dflash.accept import RULES, Rejection
from sparkinfer.dflash.loop import DFlashDecoder
from sparkinfer.dflash.verify import Paths
from sparkinfer.engine import Engine
from sparkinfer.sampling import Choice, Sampler, SamplingParams, TokenHistory

N = 5  # ids
PROMPT = (0, 3, 1)
STOPS = (2,)  # what min_tokens bans
LIKELIEST_FAULT = (
    1e-4  # p-values below this fail; seeds are fixed, so a test that passes always passes
)
# Widths and paths in a circle whose length shares no factor with the steps of a draw.
STEPS = (
    (4, "window"), (3, "compact"), (6, "block"), (2, "token_loop"), (4, "token_loop"), (1, "ar"), (3, "window"),
)  # fmt: skip

SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.25},
    "k p and min_p": {"temperature": 1.4, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.9},
    "bias": {"logit_bias": {0: 1.5, 4: -100.0}},
    "min_tokens": {"min_tokens": 2},
    "everything": {
        "temperature": 0.9,
        "top_k": 4,
        "top_p": 0.97,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.5,
        "logit_bias": {1: 1.0},
        "min_tokens": 1,
    },
}


@functools.cache
def target_row(tokens: tuple[int, ...]) -> np.ndarray:
    """Logits that depend on the last two tokens and on the position."""
    seed = [len(tokens), *tokens[-2:]]
    return (1.5 * np.random.default_rng(seed).standard_normal(N)).astype(np.float32)


@functools.cache
def draft_row(position: int, previous: int) -> np.ndarray:
    """Another law than the target's, about as far from it as from a uniform one."""
    rng = np.random.default_rng([77, position, previous])
    return (1.5 * rng.standard_normal(N)).astype(np.float32)


def params_of(name: str) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0} | SAMPLERS[name]))


def exact(
    params: SamplingParams, row: Callable[[tuple[int, ...]], np.ndarray], n: int = N
) -> np.ndarray:
    """Probabilities of all triples [n^3], from the oracle of the samplers in float64."""

    def law(output: tuple[int, ...]) -> np.ndarray:
        banned = STOPS if len(output) < params.min_tokens else ()
        return oracle(row((*PROMPT, *output)), params, PROMPT, output, banned)

    first, joint = law(()), np.zeros((n, n, n))
    for a in range(n):
        second = law((a,)) if first[a] else np.zeros(n)
        for b in range(n):
            if second[b]:
                joint[a, b] = first[a] * second[b] * law((a, b))
    return joint.ravel()


def speculative(
    rule: str,
    *,
    row: Callable[[tuple[int, ...]], np.ndarray] = target_row,
    draft: Callable[[int, int], np.ndarray] = draft_row,
    steps: Sequence[tuple[int, str]] = STEPS,
    n: int = N,
) -> DFlashDecoder:
    target = ToyTarget(lambda tokens: row(tuple(tokens)), recurrent=True)
    return DFlashDecoder(
        target, LawDraft(n, draft), ScriptedPolicy(steps), Paths(target), rule=rule
    )


def draw(
    decoder: Decoder, params: SamplingParams, seed: int, count: int = 3, n: int = N
) -> tuple[int, ...]:
    """The first `count` tokens after the prompt."""
    history = TokenHistory(PROMPT)
    sampler = Sampler(params, n, seed=seed, stop_ids=STOPS if params.min_tokens else ())
    decoder.begin(ToySequence(64, recurrent=True), PROMPT, sampler, history)
    while len(history.output) < count:
        decoder.commit(len(decoder.step(20).tokens))
    return tuple(history.output[:count])


def counted(decoder: Decoder, params: SamplingParams, seeds: range) -> np.ndarray:
    """How often each triple was drawn [N^3]."""
    counts = np.zeros(N**3, np.int64)
    for seed in seeds:
        a, b, c = draw(decoder, params, seed)
        counts[(a * N + b) * N + c] += 1
    return counts


def chance(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of Pearson's chi-square; cells that expect fewer than 5 are pooled."""
    assert not counts[law == 0].any(), "drew what has probability 0"
    wanted = law * counts.sum()
    big = wanted >= 5
    seen, hoped = list(counts[big]), list(wanted[big])
    if wanted[~big].sum() > 0:
        seen.append(counts[~big].sum())
        hoped.append(wanted[~big].sum())
    statistic = sum((s - w) ** 2 / w for s, w in zip(seen, hoped, strict=True))
    return gamma_tail((len(seen) - 1) / 2, statistic / 2)


def gamma_tail(shape: float, x: float) -> float:
    """Upper regularised incomplete gamma function Q(shape, x), by its series."""
    if x <= 0 or shape <= 0:
        return 1.0
    if x > shape + 60 * math.sqrt(shape) + 300:
        return 0.0
    term, total, k = 1.0 / shape, 1.0 / shape, 1
    while term > total * 1e-17:
        term *= x / (shape + k)
        total += term
        k += 1
    lower = total * math.exp(-x + shape * math.log(x) - math.lgamma(shape))
    return max(0.0, 1.0 - lower)


def the_law(rule: str, name: str, draws: int) -> None:
    params = params_of(name)
    first = 1_000_000 * list(SAMPLERS).index(name)
    counts = counted(speculative(rule), params, range(first, first + draws))
    assert least_chance(counts, exact(params, target_row)) > LIKELIEST_FAULT


def least_chance(counts: np.ndarray, law: np.ndarray) -> float:
    """The smallest p-value of the triples, of both pairs in a row and of each position alone.

    With few draws most triples are too rare to be told apart; their sums are not.
    """
    cells = counts.reshape(N, N, N), law.reshape(N, N, N)
    views = [(), (0,), (2,), (0, 1), (0, 2), (1, 2)]
    return min(chance(*(c.sum(axis=axes).ravel() for c in cells)) for axes in views)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("rule", RULES)
def test_three_positions_follow_the_exact_law(rule, name):
    the_law(rule, name, 500)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("rule", RULES)
def test_two_hundred_thousand_draws_follow_the_exact_law(rule, name):
    the_law(rule, name, 200_000)


@pytest.mark.parametrize("pair", range(3))
def test_one_judged_row_follows_the_law(pair):
    """Many draws of a single slot: a number used twice (drafting, accepting, drawing again) would show here."""
    params = SamplingParams(temperature=1.0)
    row, law = target_row((pair, 1)), oracle(target_row((pair, 1)), params)
    proposals = LawDraft(N, draft_row).propose(pair, 1)
    counts, history = np.zeros(N), TokenHistory(PROMPT)
    for seed in range(2000):
        judge = Rejection(proposals, pair, Sampler(params, N, seed=seed), history)
        judge(0, row)
        counts[judge.choices[0].token] += 1
        history.pop()
    assert chance(counts, law) > LIKELIEST_FAULT


def test_the_p_value_is_that_of_the_tables():
    """Chi-square quantiles at 5 %, 1 % and 0.1 % for 1, 10 and 100 degrees of freedom."""
    for freedom, statistic, p in [(1, 3.841, 0.05), (10, 23.209, 0.01), (100, 149.449, 0.001)]:
        assert gamma_tail(freedom / 2, statistic / 2) == pytest.approx(p, rel=1e-3)


class RatioToTheBest(Rejection):
    """What others did: accept with p(draft) / p(most likely)."""

    def __call__(self, index, row):
        if index >= len(self._laws):
            return super().__call__(index, row)
        p = self._sampler.distribution(row, self._history)
        kept = p.probability(self.drafts[index]) / p.dense(N).max()
        flip = np.random.default_rng([self._sampler.seed, index]).random()
        token = self.drafts[index] if flip < kept else p.draw(flip)
        return self._take(index, Choice(token), flip < kept)


class NoResidual(Rejection):
    """Draws from p, not from what p has more than q, after a rejection."""

    def _residual(self, p, q):
        return super()._residual(p, type(q)(np.array([0]), np.zeros(1), 1.0))


class PenaltiesOfTheFirstRow(Rejection):
    """Adjusts all rows of a window as if nothing but the committed tokens came before them."""

    def __call__(self, index, row):
        history = self._history
        frozen = TokenHistory(history.prompt)
        for token in history.output[: len(history.output) - index]:
            frozen.push(token)
        real, self._history = history, frozen
        try:
            return super().__call__(index, row)
        finally:
            self._history = real
            real.push(self.choices[-1].token)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [(RatioToTheBest, "plain"), (NoResidual, "plain"), (PenaltiesOfTheFirstRow, "frequency")],
)
def test_the_test_finds_wrong_rules(wrong, name):
    """38, 39: known faults of other engines are told from the right law."""
    decoder = speculative("rejection", steps=[(4, "window")])
    decoder._judge = wrong
    counts = counted(decoder, params_of(name), range(1000))
    law = exact(params_of(name), target_row)
    assert not (counts[law == 0].any() or least_chance(counts, law) > 1e-9)


# --- acceptance ------------------------------------------------------------------------------


def two_tokens(p: float) -> np.ndarray:
    return np.log(np.array([p, 1 - p], np.float32)).astype(np.float32)


@pytest.mark.parametrize(("p", "q"), [(0.7, 0.4), (0.2, 0.9), (0.5, 0.5), (0.95, 0.05)])
@pytest.mark.parametrize("rule", RULES)
def test_two_tokens_acceptance_and_output_are_exact(rule, p, q):
    """38: sum(min(p, q)) is accepted by rejection, p of the draft's best by match; the output is p's either way."""
    decoder = speculative(
        rule,
        row=lambda _: two_tokens(p),
        draft=lambda *_: two_tokens(q),
        steps=[(2, "window")],
        n=2,
    )
    draws, accepted, ones = 1500, 0, 0
    for seed in range(draws):
        history = TokenHistory(PROMPT[:1])
        sampler = Sampler(SamplingParams(temperature=1.0), 2, seed=seed)
        decoder.begin(ToySequence(64, recurrent=True), PROMPT[:1], sampler, history)
        decoder.commit(len(decoder.step(9).tokens))
        step = decoder.step(9)
        assert step.drafted == 1
        accepted += step.accepted
        ones += step.tokens[0] == 0
    wanted = min(p, q) + min(1 - p, 1 - q) if rule == "rejection" else (p if q >= 0.5 else 1 - p)
    for count, chance_of_it in ((accepted, wanted), (ones, p)):
        spread = math.sqrt(draws * chance_of_it * (1 - chance_of_it))
        assert abs(count - draws * chance_of_it) <= 4 * spread


def markov_row(tokens: tuple[int, ...]) -> np.ndarray:
    """The law of `draft_row`, as a target."""
    return draft_row(len(tokens), tokens[-1])


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("width", [2, 5, 16])
def test_a_draft_that_is_the_target_is_always_accepted(width, name):
    """p = q: penalties, bias, min_tokens and the samplers shape both alike, so nothing is rejected."""
    decoder = speculative("rejection", row=markov_row, steps=[(width, "window")])
    for seed in range(3):
        draw(decoder, params_of(name), seed, count=12)
        report = decoder.report()
        judged = sum(reached for reached, _ in report.slots)
        assert report.accepted == judged > 0
        if not params_of(name).min_tokens:  # else a stop id ends the judging
            assert report.accepted == report.drafted


def test_an_empty_residual_falls_back_to_the_target():
    """Rounding can reject where p = q; the draw is then the target's."""
    law = Sampler(SamplingParams(temperature=1.0), N, seed=0).distribution(
        target_row((1, 2)), TokenHistory(PROMPT)
    )
    counts = np.zeros(N)
    for seed in range(2000):
        history = TokenHistory(PROMPT)
        sampler = Sampler(SamplingParams(temperature=1.0), N, seed=seed)
        judge = Rejection(LawDraft(N, draft_row).propose(0, 1), 0, sampler, history)
        counts[judge._residual(law, law)] += 1
    assert chance(counts, law.dense(N)) > LIKELIEST_FAULT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_seed_fixes_the_output(name, rule):
    params = params_of(name)
    outputs = {seed: draw(speculative(rule), params, seed, 12) for seed in range(2)}
    assert outputs == {seed: draw(speculative(rule), params, seed, 12) for seed in range(2)}
    assert len(set(outputs.values())) > 1


@pytest.mark.parametrize("name", SAMPLERS)
def test_match_gives_plain_decodings_tokens_at_every_width(name):
    """The random numbers are keyed by position: neither width nor path nor draft changes a token."""
    params = params_of(name)
    target = ToyTarget(lambda tokens: target_row(tuple(tokens)), recurrent=True)
    plain = draw(AutoregressiveDecoder(target), params, 5, 20)
    for width in (2, 4, 7):
        for path in ("compact", "window", "block", "token_loop"):
            decoder = speculative("match", steps=[(width, path)])
            assert draw(decoder, params, 5, 20) == plain


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"logit_bias": {1: 2.0}}])
def test_rejection_without_temperature_is_greedy(options):
    params = SamplingParams(**options)
    target = ToyTarget(lambda tokens: target_row(tuple(tokens)), recurrent=True)
    plain = draw(AutoregressiveDecoder(target), params, 0, 30)
    assert draw(speculative("rejection"), params, 0, 30) == plain


# --- through the engine ----------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_the_engine_draws_from_the_same_law(rule):
    """Whole requests of five tokens, of which the first three count."""
    tokenizer = ToyTokenizer([b"a", b"b"])
    assert tokenizer.n_vocab == N
    decoder = speculative(rule)
    engine = Engine(decoder.target, tokenizer, decoder=decoder)
    params, counts = params_of("everything"), np.zeros(N**3, np.int64)
    for seed in range(500):
        result = engine.generate(
            PROMPT,
            sampling=params,
            seed=seed,
            max_tokens=5,
            ignore_eos=True,
            stop_ids=STOPS,
            logprobs=0,
        )
        tokens = (*result.tokens, 0, 0)[:3]
        if result.tokens[:2].count(STOPS[0]):  # it ended: draw the rest as if it had gone on
            rng = np.random.default_rng(seed)
            tokens = finish(params, result.tokens[:2], rng)
        counts[(tokens[0] * N + tokens[1]) * N + tokens[2]] += 1
        for position, item in enumerate(result.logprobs):
            row = target_row((*PROMPT, *result.tokens[:position])).astype(np.float64)
            wanted = row[item.token] - np.log(np.exp(row).sum())
            assert item.logprob == pytest.approx(wanted, abs=1e-5)
    assert least_chance(counts, exact(params, target_row)) > LIKELIEST_FAULT


def finish(
    params: SamplingParams, tokens: Sequence[int], rng: np.random.Generator
) -> tuple[int, ...]:
    """Completes a triple from the exact law."""
    output = tuple(tokens[: tokens.index(STOPS[0]) + 1])
    while len(output) < 3:
        banned = STOPS if len(output) < params.min_tokens else ()
        law = oracle(target_row((*PROMPT, *output)), params, PROMPT, output, banned)
        output = (*output, int(rng.choice(N, p=law)))
    return output
