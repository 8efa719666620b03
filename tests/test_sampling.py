"""Sampling: parameters, position-keyed randomness, exact distributions, penalties, log-probs."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkinfer.errors import ModelOutputError, RequestError
from sparkinfer.sampling import Sampler, SamplingParams, TokenHistory, distribution, uniform
from sparkinfer.sampling.arrays import largest, log_total, pick_index
from sparkinfer.sampling.randomness import philox

# --- parameters ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 101.0),
        ("temperature", 1e-9),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", 2**31),
        ("top_p", 1.01),
        ("top_p", -0.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("min_tokens", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("logprobs", 21),
        ("logprobs", 10**6),
        ("logprobs", False),
    ],
)
def test_a_bad_value_is_one_line_with_field_value_and_bounds(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    line = str(caught.value)
    assert line.startswith(f"{field} must be") and " to " in line
    assert "\n" not in line and len(line) < 140


@pytest.mark.parametrize(
    "bias", [[(1, 2)], {"a": 1.0}, {-1: 0.0}, {1: float("nan")}, {1: 101.0}, {1: "x"}, {1.5: 1.0}]
)
def test_a_bad_logit_bias_is_refused(bias):
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_too_many_biases_are_refused_by_count():
    with pytest.raises(RequestError, match="1000000 entries; at most 1024"):
        SamplingParams(logit_bias=dict.fromkeys(range(10**6), 0.0))


def test_params_are_frozen_and_do_not_share_the_callers_mapping():
    bias = {3: 1.0}
    params = SamplingParams(temperature=1, logit_bias=bias)
    bias[3] = 50.0
    assert params.logit_bias[3] == 1.0 and type(params.temperature) is float
    with pytest.raises(AttributeError):
        params.top_k = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        params.logit_bias[4] = 1.0  # type: ignore[index]
    assert SamplingParams(**params.to_dict()) == params


# --- randomness ------------------------------------------------------------------------------


def words(values):
    return np.array(values, dtype=np.uint64)


@settings(max_examples=50, deadline=None)
@given(st.tuples(*[st.integers(0, 2**64 - 1)] * 4), st.tuples(*[st.integers(0, 2**64 - 1)] * 2))
def test_philox_is_the_published_generator(counter, key):
    value = sum(word << (64 * i) for i, word in enumerate(counter))
    oracle = np.random.Philox(counter=(value - 1) % 2**256, key=words(key))  # counts up first
    assert list(philox(counter, key)) == [int(word) for word in oracle.random_raw(4)]


def test_uniform_depends_on_seed_position_and_stream_only():
    draws = {
        (s, p, r): uniform(s, p, r) for s, p, r in product((0, 1, 2**64 - 1), range(50), (0, 1, 2))
    }
    assert len(set(draws.values())) == len(draws)
    assert all(0.0 <= u < 1.0 and uniform(*key) == u for key, u in draws.items())


def test_uniform_is_uniform_over_positions():
    counts = np.histogram([uniform(7, p) for p in range(20000)], bins=50, range=(0, 1))[0]
    assert chi_square(counts, np.full(50, 1 / 50)) < 4.5


# --- the distribution against a plain oracle -------------------------------------------------


def oracle(row, params, prompt=(), output=(), banned=()):
    """The ten steps of SamplingParams, one line each, in float64, with a full sort."""
    logits = [float(x) for x in row]
    for i in set(prompt) | set(output):
        p = params.repetition_penalty
        logits[i] = logits[i] / p if logits[i] > 0 else logits[i] * p
    for i in set(output):
        logits[i] -= params.presence_penalty + params.frequency_penalty * list(output).count(i)
    for i, value in params.logit_bias.items():
        logits[i] += value
    for i in banned:
        logits[i] = -math.inf
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.temperature == 0.0:
        return np.eye(len(logits))[order[0]]
    weight = {i: math.exp((logits[i] - logits[order[0]]) / params.temperature) for i in order}
    kept = order[: params.top_k or None]
    if params.top_p < 1.0:
        total, mass, nucleus = sum(weight[i] for i in kept), 0.0, []
        for i in kept:
            nucleus.append(i)
            mass += weight[i]
            if mass >= params.top_p * total:
                break
        kept = nucleus
    kept = [i for i in kept if weight[i] >= params.min_p]
    total = sum(weight[i] for i in kept)
    return np.array([weight[i] / total if i in kept else 0.0 for i in range(len(logits))])


COMBOS = {
    "plain": {},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 7},
    "top_k_all": {"top_k": 1000},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "k_and_p": {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
    "p_and_min_p": {"top_p": 0.95, "min_p": 0.05},
    "all_three": {"temperature": 0.8, "top_k": 15, "top_p": 0.9, "min_p": 0.08},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {0: 3.0, 5: -100.0}},
    "everything": {
        "temperature": 0.9,
        "top_k": 25,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {1: 2.0, 9: -4.0},
    },
}
PROMPT, OUTPUT = (1, 2, 3, 40), (5, 5, 9, 2)


def toy_row(n=50, seed=0, scale=2.0):
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def history_of(prompt=PROMPT, output=OUTPUT):
    history = TokenHistory(prompt)
    for token in output:
        history.push(token)
    return history


def params_of(name, **more):
    return SamplingParams(**({"temperature": 1.0} | COMBOS[name] | more))


@pytest.mark.parametrize("name", COMBOS)
@pytest.mark.parametrize("n", [50, 5000])
def test_distribution_is_the_oracles(name, n):
    row, params = toy_row(n), params_of(name)
    law = Sampler(params, n, seed=0).distribution(row, history_of())
    expected = oracle(row, params, PROMPT, OUTPUT)
    np.testing.assert_allclose(law.dense(n), expected, atol=1e-7)
    assert np.array_equal(law.dense(n) > 1e-40, expected > 1e-40)
    for token in (0, 1, 5, n - 1, n, -1):
        inside = 0 <= token < n
        assert law.probability(token) == pytest.approx(expected[token] if inside else 0.0, abs=1e-7)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-12, 12), min_size=1, max_size=40),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 8),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    st.sampled_from([0.0, 0.01, 1.0]),
)
def test_distribution_with_ties_is_the_oracles(logits, temperature, top_k, top_p, min_p):
    row = np.array(logits, dtype=np.float32) / 2
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    law = distribution(row, params).dense(row.size)
    expected = oracle(row, params)
    if top_p in (0.0, 1.0):  # else a sum can lie on the boundary, where rounding decides
        np.testing.assert_allclose(law, expected, atol=1e-6)
    assert law.sum() == pytest.approx(1.0)
    assert law[int(row.argmax())] > 0


def chi_square(counts, law):
    """Standard deviations by which the statistic exceeds its mean; cells of < 5 are pooled."""
    expected = law * counts.sum()
    assert not counts[law == 0].any(), "drew an id of probability 0"
    big = expected >= 5
    seen, want = list(counts[big]), list(expected[big])
    if expected[~big].sum() >= 1:
        seen, want = [*seen, counts[~big].sum()], [*want, expected[~big].sum()]
    statistic = sum((s - w) ** 2 / w for s, w in zip(seen, want, strict=True))
    freedom = len(seen) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


@pytest.mark.parametrize("name", COMBOS)
def test_draws_follow_the_exact_law(name):
    draws, row, params, history = 6000, toy_row(), params_of(name), history_of()
    samplers = [Sampler(params, 50, seed=seed) for seed in range(draws)]
    tokens = [sampler.choose(row, history).token for sampler in samplers]
    law = oracle(row, params, PROMPT, OUTPUT)
    assert chi_square(np.bincount(tokens, minlength=50), law) < 4.5


def test_three_positions_jointly_follow_the_exact_law():
    """A Markov toy model with a penalty: the law of a position depends on the tokens drawn."""
    n, draws = 4, 6000
    rows = [toy_row(n, seed, 1.0) for seed in range(n)]
    params = SamplingParams(temperature=1.2, top_p=0.95, frequency_penalty=0.8)
    counts, law = np.zeros((n, n, n)), np.zeros((n, n, n))
    for a, b, c in product(range(n), repeat=3):
        first = oracle(rows[0], params, (0,))[a]
        second = oracle(rows[a], params, (0,), (a,))[b]
        law[a, b, c] = first * second * oracle(rows[b], params, (0,), (a, b))[c]
    for seed in range(draws):
        sampler, history = Sampler(params, n, seed=seed), TokenHistory((0,))
        for _ in range(3):
            last = (history.output or history.prompt)[-1]
            history.push(sampler.choose(rows[last], history).token)
        counts[tuple(history.output)] += 1
    assert chi_square(counts.ravel(), law.ravel()) < 4.5


def test_large_vocabulary_draws_follow_the_law():
    """The two-level draw, with a remainder that fits no group."""
    n = 64 * 70 + 13
    row = np.full(n, -30.0, dtype=np.float32)
    row[[0, 69, 70, 4000, n - 14, n - 13, n - 1]] = [1, 0.5, 0, 1.5, 0.2, 0.4, 0.9]
    params = SamplingParams(temperature=1.0)
    tokens = [Sampler(params, n, seed=s).choose(row, TokenHistory((1,))).token for s in range(4000)]
    assert chi_square(np.bincount(tokens, minlength=n), oracle(row, params)) < 4.5


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 6000),
    st.sampled_from([0.0, 0.5, 1.0 - 2.0**-53]),
    st.integers(0, 2**32),
    st.sampled_from([np.float32, np.float64]),
)
def test_an_id_of_weight_zero_is_never_picked(n, u, seed, dtype):
    rng = np.random.default_rng(seed)
    weights = (rng.random(n) * (rng.random(n) < 0.05)).astype(dtype)
    weights[rng.integers(n)] = 1.0
    assert weights[pick_index(weights, u)] > 0


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9000), st.integers(1, 200), st.integers(1, 50), st.integers(0, 2**32))
def test_largest_is_a_stable_sort(n, count, spread, seed):
    values = np.random.default_rng(seed).integers(0, spread, n).astype(np.float32)
    assert largest(values, count).tolist() == np.argsort(-values, kind="stable")[:count].tolist()


# --- greedy, padding, bad logits -------------------------------------------------------------


def test_greedy_takes_the_lowest_id_of_a_tie_and_ignores_the_seed():
    row = np.array([1, 3, 2, 3, 3], dtype=np.float32)
    for seed in range(5):
        assert Sampler(SamplingParams(), 5, seed=seed).choose(row, history_of((1,), ())).token == 1
    for params in (
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=0.0),
    ):
        assert Sampler(params, 5, seed=3).choose(row, history_of((1,), ())).token == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_ids_never_win_and_may_hold_anything(temperature):
    row = np.array([0, 1, 0, 99, np.nan], dtype=np.float32)
    params = SamplingParams(temperature=temperature, logprobs=5)
    choice = Sampler(params, 3, seed=1).choose(row, TokenHistory((1,)))
    assert choice.token < 3 and choice.logprob is not None and len(choice.logprob.top) == 3
    assert sum(math.exp(p) for _, p in choice.logprob.top) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 17, 49])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_not_finite_names_id_and_position(bad, where, temperature):
    row = toy_row()
    row[where] = bad
    sampler = Sampler(SamplingParams(temperature=temperature), 50, seed=0)
    with pytest.raises(ModelOutputError, match=f"token id {where} at position 8 is {bad}"):
        sampler.choose(row, history_of())


def test_the_row_is_never_written_to():
    row = toy_row()
    row.flags.writeable = False
    for name in COMBOS:
        Sampler(params_of(name, logprobs=3), 50, seed=0).choose(row, history_of())


# --- penalties, bias, min_tokens -------------------------------------------------------------


def test_penalties_by_hand():
    row = np.array([2.0, -2.0, 1.0, 0.5], dtype=np.float32)
    history = history_of((0, 1), (2, 2))
    greedy = lambda **fields: Sampler(SamplingParams(**fields), 4, seed=0)  # noqa: E731
    law = greedy(temperature=1.0, repetition_penalty=2.0).distribution(row, history).dense(4)
    np.testing.assert_allclose(law, softmax([1.0, -4.0, 0.5, 0.5]), atol=1e-7)
    law = greedy(temperature=1.0, presence_penalty=1.0).distribution(row, history).dense(4)
    np.testing.assert_allclose(law, softmax([2.0, -2.0, 0.0, 0.5]), atol=1e-7)  # output only
    law = greedy(temperature=1.0, frequency_penalty=0.5).distribution(row, history).dense(4)
    np.testing.assert_allclose(law, softmax([2.0, -2.0, 0.0, 0.5]), atol=1e-7)  # twice 0.5
    assert greedy(logit_bias={3: 100.0}).choose(row, history).token == 3


def softmax(logits):
    weights = np.exp(np.array(logits) - max(logits))
    return weights / weights.sum()


def test_a_bias_on_an_unknown_id_is_refused():
    with pytest.raises(RequestError, match="token id 50; ids go from 0 to 49"):
        Sampler(SamplingParams(logit_bias={50: 1.0}), 50, seed=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_bans_stop_ids_until_reached(temperature):
    row = np.array([0, 50, 1, 40], dtype=np.float32)
    params = SamplingParams(temperature=temperature, min_tokens=2)
    sampler, history = Sampler(params, 4, seed=0, stop_ids=(1, 3)), TokenHistory((0,))
    tokens = []
    for _ in range(3):
        tokens.append(sampler.choose(row, history).token)
        history.push(tokens[-1])
    assert not {1, 3} & set(tokens[:2]) and tokens[2] == 1
    with pytest.raises(RequestError, match="min_tokens"):
        Sampler(params, 4, seed=0, stop_ids=range(4))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.lists(st.one_of(st.integers(0, 9), st.just(None)), max_size=40),
    st.booleans(),
)
def test_history_after_pushes_and_pops_is_a_fresh_one(prompt, moves, early):
    history, output = TokenHistory(prompt), []
    if early:
        history.seen()
    for move in moves:
        if move is None and output:
            output.pop()
            history.pop()
        elif move is not None:
            output.append(move)
            history.push(move)
    assert sorted(history.seen().tolist()) == sorted(set(prompt) | set(output))
    ids, counts = history.counts()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
        token: output.count(token) for token in set(output)
    }
    assert history.position == len(prompt) + len(output) and history.output == output


# --- rows of a block ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*COMBOS, "greedy"])
def test_a_row_inside_a_block_gives_what_it_gives_alone(name):
    """Rows judged with drafts pushed and popped again equal the rows of single steps."""
    params = params_of(name) if name != "greedy" else SamplingParams(repetition_penalty=1.3)
    rows = [toy_row(seed=seed) for seed in range(8)]
    sampler, history = Sampler(params, 50, seed=11), history_of()
    single = []
    for row in rows:
        single.append(sampler.choose(row, history).token)
        history.push(single[-1])
    history.pop(len(rows))
    for width in (1, 2, 3, 8):
        block: list[int] = []
        while len(block) < len(rows):
            window = rows[len(block) : len(block) + width]
            for row in window:
                block.append(sampler.choose(row, history).token)
                history.push(block[-1])
            junk = [3, 3, 5]
            for token in junk:
                history.push(token)
            history.pop(len(junk))
        assert block == single
        history.pop(len(rows))


# --- log-probabilities -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 50, 5000])
@pytest.mark.parametrize("count", [0, 1, 20])
def test_logprobs_are_the_models_own(n, count):
    row = toy_row(n)
    params = SamplingParams(temperature=0.5, top_k=3, presence_penalty=2.0, logprobs=count)
    choice = Sampler(params, n, seed=5).choose(row, TokenHistory((1,)))
    exact = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
    assert choice.logprob is not None and choice.logprob.token == choice.token
    assert choice.logprob.logprob == pytest.approx(exact[choice.token], abs=1e-5)
    best = np.argsort(-row, kind="stable")[:count]
    assert [token for token, _ in choice.logprob.top] == best.tolist()
    np.testing.assert_allclose([p for _, p in choice.logprob.top], exact[best], atol=1e-5)


def test_no_logprob_unless_asked_for():
    assert Sampler(SamplingParams(), 50, seed=0).choose(toy_row(), history_of()).logprob is None


def test_log_total_of_extreme_logits():
    assert log_total(np.array([3e38, -3e38], dtype=np.float32)) == pytest.approx(3e38)
    assert log_total(np.zeros(150000, dtype=np.float32)) == pytest.approx(
        math.log(150000), abs=1e-6
    )
