"""The planner on synthetic acceptance with a simulated clock: no model runs and no time is measured.

Costs are tables, acceptance is drawn from profiles, and every policy sees the same draws: the draft of the
token at position p is right for slot k if u(p) < a(k, p), whoever asks. A draft that claims a(k, p) knows itself; liars
claim something else.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sparkinfer.dflash.costs import Cost, CostTable
from sparkinfer.dflash.planner import POLICIES, Decision, Observed, Policy, Setup

DEPTH, WIDTH = 15, 16
PLAIN_SECONDS = 0.01
Profile = Callable[[int, int], float]  # slot from 0, position -> conditional acceptance
Claims = Callable[[int, int], float]  # slot from 0, position -> what the draft claims
Verify = Callable[[int], float]  # width -> cost of verifying, in plain steps
_AVX2 = {1: 1.0, 2: 1.6, 3: 1.85, 4: 1.9, 5: 2.1, 6: 2.2, 7: 2.7, 8: 3.2, 16: 5.5}


def cheap(width: int) -> float:
    """Rows that cost next to nothing: memory-bound kernels with enough arithmetic."""
    return 1.0 if width == 1 else 1.0 + 0.03 * width


def avx2(width: int) -> float:
    """Measured on a two-core AVX2 machine; 9 to 15 rows on a line."""
    return _AVX2[width] if width in _AVX2 else 3.2 + (width - 8) * (5.5 - 3.2) / 8


def moe(width: int) -> float:
    """Every row brings its own experts."""
    return 1.0 + 0.45 * (width - 1)


VERIFY: dict[str, Verify] = {"cheap": cheap, "avx2": avx2, "moe": moe}
DRAFTS = (0.1, 0.3, 0.5)  # cost of a draft, in plain steps


def flat(rate: float) -> Profile:
    return lambda slot, position: rate


def decaying(first: float, factor: float) -> Profile:
    return lambda slot, position: first * factor**slot


def cliff(first: float, rest: float) -> Profile:
    return lambda slot, position: first if slot == 0 else rest


def switching(first: float, second: float, period: int) -> Profile:
    return lambda slot, position: (first, second)[(position // period) % 2]


def uneven(sure: float, unsure: float, share: float, seed: int = 0) -> Profile:
    """A `share` of the positions is easy, whatever the slot; the others are hard."""
    rng = random.Random(seed)
    rates = [sure if rng.random() < share else unsure for _ in range(4096)]
    return lambda slot, position: rates[position % len(rates)]


UNEVEN: dict[str, Profile] = {
    "uneven .98/.30, half": uneven(0.98, 0.30, 0.5),
    "uneven .95/.50, .7": uneven(0.95, 0.50, 0.7),
    "uneven .99/.05, .6": uneven(0.99, 0.05, 0.6),
    "uneven .95/.10, .3": uneven(0.95, 0.10, 0.3),
    "uneven .7/.6, half": uneven(0.7, 0.6, 0.5),
}


def _liar(seed: int) -> Claims:
    rng = random.Random(seed)
    claims = [rng.random() for _ in range(4096)]
    return lambda slot, position: claims[(7 * position + slot) % len(claims)]


LIARS: dict[str, Claims] = {
    "sure": lambda slot, position: 0.995,
    "unsure": lambda slot, position: 0.02,
    "half": lambda slot, position: 0.5,
    "random": _liar(1),
    "the later the surer": lambda slot, position: min(0.1 + 0.2 * slot, 0.99),
}

PROFILES: dict[str, Profile] = {
    **{f"flat {rate:.2f}": flat(rate) for rate in (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)},
    "decaying .9 x .93": decaying(0.9, 0.93),
    "decaying .8 x .85": decaying(0.8, 0.85),
    "cliff .9 then .2": cliff(0.9, 0.2),
    "cliff .7 then .9": cliff(0.7, 0.9),
    "switch .9/.2 each 50": switching(0.9, 0.2, 50),
    "switch .9/.2 each 200": switching(0.9, 0.2, 200),
    "switch .2/.9 each 500": switching(0.2, 0.9, 500),
    "switch .95/.5 each 100": switching(0.95, 0.5, 100),
}


@dataclass(frozen=True)
class Outcome:
    """Times of one request, in plain steps."""

    time: float
    best: float  # of the best single width in hindsight, width 1 included
    best_width: int
    tokens: int

    @property
    def regret(self) -> float:
        return self.time / self.best - 1.0

    @property
    def over_plain(self) -> float:
        return self.time / self.tokens


def cost_table(verify: Verify, draft: float, wait: float = 0.0) -> CostTable:
    """One path, no dependence on the context. `wait`: plain steps that it costs to see the claims before the window."""
    s = PLAIN_SECONDS
    steps = {w: Cost((s * verify(w),), (s * draft,)) for w in range(2, WIDTH + 1)}
    return CostTable([0], (s,), {"window": steps}, wait=s * wait)


def relative_costs(verify: Verify, draft: float) -> list[float]:
    """By width, in plain steps; width 1 has no draft in it."""
    return [0.0, 1.0, *(verify(width) + draft for width in range(2, WIDTH + 1))]


def luck(seed: int, tokens: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.random() for _ in range(tokens + WIDTH)]


def accepted(profile: Profile, draws: Sequence[float], position: int, drafted: int) -> int:
    """How many of the drafts for the tokens after `position` are right before the first wrong one."""
    for slot in range(drafted):
        if draws[position + slot] >= profile(slot, position + slot):
            return slot
    return drafted


def fixed_time(
    profile: Profile, draws: Sequence[float], costs: Sequence[float], width: int, tokens: int
) -> float:
    """What one width takes for a request, cut at its end."""
    done, time = 0, 0.0
    while done < tokens:
        rows = min(width, tokens - done)
        done += 1 + accepted(profile, draws, done, rows - 1)
        time += costs[rows]
    return time


def policy_time(
    policy: Policy,
    profile: Profile,
    draws: Sequence[float],
    costs: Sequence[float],
    tokens: int,
    machine: Callable[[int], float] = lambda step: 1.0,
    claims: Claims | None = None,
    draft: float = 0.0,
    wait: float = 0.0,
) -> float:
    """What a policy takes for a request, before what `machine(step)` multiplies the seconds it sees with.

    `claims` of None: a draft that tells nothing. `draft` is the cost of one, for windows that are cut to one row, and
    `wait` what seeing its claims before the window costs; else they are seen after it.
    """
    done, time, count = 0, 0.0, 0
    policy.begin(0)
    while done < tokens:
        asked = policy.choose(done, tokens - done)
        told = (
            [] if claims is None else [claims(slot, done + slot) for slot in range(asked.width - 1)]
        )
        late = bool(wait) and asked.cutter is None
        decision, told = (asked, told) if late and asked.learns else cut(policy, asked, told)
        drafted = decision.width - 1
        kept = accepted(profile, draws, done, drafted)
        cost = costs[decision.width] + (draft if decision.width == 1 < asked.width else 0.0)
        cost += wait if asked.cutter is not None else 0.0
        time += cost
        seconds = PLAIN_SECONDS * cost * machine(count)
        policy.observe(observed(asked, decision, done, kept, seconds, told))
        done += 1 + kept
        count += 1
    return time


def cut(
    policy: Policy, asked: Decision, claims: Sequence[float]
) -> tuple[Decision, Sequence[float]]:
    """What the loop does after drafting: the decision that is carried out, and the claims that were asked for."""
    if asked.cutter is None or not claims:
        return asked, ()
    told: list[float] = []
    for claim in claims[: asked.width - 1]:
        told.append(claim)
        if not policy.more(told):
            break
    return policy.cut(told), told


def observed(
    asked: Decision,
    decision: Decision,
    length: int,
    kept: int,
    seconds: float,
    claims: Sequence[float],
) -> Observed:
    """The step that came of it."""
    return Observed(
        decision.width,
        decision.path,
        length,
        decision.width - 1,
        kept,
        seconds,
        {},
        asked=asked.width if decision.width < asked.width else 0,
        claims=claims,
    )


def auto(verify: Verify, draft: float) -> Policy:
    return POLICIES["auto"](Setup(cost_table(verify, draft), DEPTH, WIDTH))


def simulate(
    profile: Profile,
    verify: Verify,
    draft: float,
    seed: int,
    tokens: int,
    claims: Claims | None = None,
) -> Outcome:
    """One request with a planner that knows nothing yet."""
    draws, costs = luck(seed, tokens), relative_costs(verify, draft)
    times = {w: fixed_time(profile, draws, costs, w, tokens) for w in range(1, WIDTH + 1)}
    best = min(times, key=times.__getitem__)
    time = policy_time(
        auto(verify, draft), profile, draws, costs, tokens, claims=claims, draft=draft
    )
    return Outcome(time, times[best], best, tokens)


def mean_regret(outcomes: Sequence[Outcome]) -> float:
    """Of many requests in a row: time over the time of each one's best width."""
    return sum(o.time for o in outcomes) / sum(o.best for o in outcomes) - 1.0


def cases() -> Iterator[tuple[str, float, str]]:
    """All cost tables, draft costs and profiles."""
    for name in VERIFY:
        for draft in DRAFTS:
            for profile in PROFILES:
                yield name, draft, profile
