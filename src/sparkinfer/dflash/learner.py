"""What every policy learns and reports: acceptance, the draft's claims, costs, and how the widths look now."""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from math import inf, prod
from typing import Any, NamedTuple

from sparkinfer.dflash.acceptance import Acceptance
from sparkinfer.dflash.claims import Blocks, Calibration
from sparkinfer.dflash.costs import PLAIN, Key, Observed
from sparkinfer.dflash.ledger import Ledger
from sparkinfer.dflash.policy import Decision, Setup

CLEAR = 1.005  # how much better another width must be before it is taken
_GROUP = 16  # plain steps that the cost table sees as one, their median
_STRETCH = 64  # tokens of context over which relative costs are taken as constant
_DRAFT_ROWS = 64  # context rows that wait for the draft at most
_BATCH = 4  # drafting steps that are learned from together once it is known what they are like
_RICH = 6.0  # plain steps that the ledger must cover for that: what they cost beyond what is known comes later
_PLAIN_DECISION = Decision(1, PLAIN, "nothing was decided yet")


class Offer(NamedTuple):
    """A width as it looks now: its path, its cost in plain steps and the draft's share of it, and what it yields.

    `tokens` are those of a whole window; `rate` is tokens by cost with windows cut where that gains. `late` is the part
    of the cost that the target waits until the host has seen the draft's claims: where cutting is not worth that, it
    does not wait, and nothing is cut.
    """

    width: int
    path: str
    cost: float
    tokens: float
    rate: float
    draft: float = 0.0
    late: float = 0.0


PLAIN_OFFER = Offer(1, PLAIN, 1.0, 1.0, 1.0)


class Waiting(NamedTuple):
    """A drafting step that is not learned from yet."""

    step: Observed
    worth: list[float]  # of its claims
    since: int  # plain steps before it
    rows: int  # context rows the draft appended in it
    paid: float  # what it was put down at, in plain steps
    wanted: str  # path
    late: float  # plain steps that the target waited for the claims


class Stairs(NamedTuple):
    """What the rows of a window cost once its draft is paid for.

    `costs[w]`: the whole step if w rows are verified, in plain steps; infinite where that is not offered or dearer than
    the window left whole, so that no cut can cost more than was decided. `paths[w]`: how w rows are verified.
    """

    costs: list[float]
    paths: list[str]

    def least(self, rows: int) -> float:
        """What each row after `rows` costs at least."""
        further = range(rows + 1, len(self.costs))
        now = self.costs[rows]
        if now == inf:
            return -inf
        return min(((self.costs[w] - now) / (w - rows) for w in further), default=-inf)


def by_rate(offer: Offer) -> float:
    return offer.rate


class Learner:
    """Base of the policies; they differ in `choose`."""

    name = ""
    cutting = True  # whether windows are cut
    fewest = 1  # rows that a cut leaves

    def __init__(self, setup: Setup) -> None:
        self.costs, self.top = setup.costs, setup.top
        self.acceptance = Acceptance(setup.max_depth)
        self.calibration, self.blocks = Calibration(), Blocks()
        if setup.prior is not None:
            self.acceptance.assume(setup.prior.acceptance)
            self.calibration.assume(setup.prior.claims)
        # What comes back after an unusual request.
        self._usual: tuple[Acceptance, Calibration, Blocks] | None = None
        self.ledger = Ledger()
        self.widths: Counter[int] = Counter()  # steps
        self.cuts: Counter[int] = Counter()  # steps, by the rows that were left
        self.going = 1.0  # tokens a plain step's time yields with the best width
        self.paid: float | None = None  # plain steps that the last step took, if it drafted
        self.switches = self.probes = 0
        self.chosen = _PLAIN_DECISION
        self._late = 0.0  # plain steps that the target waits for the chosen window's claims
        self.length = 0  # at the last decision
        self.since_draft = self.since_plain = 0  # steps
        self.level = 0.0  # of the machine when a plain step was last observed
        self._width = 0  # that pays, 0 before the first choice
        self._refused: set[Key] = set()  # in this request
        self._waiting = 0  # context rows the draft has yet to append
        self._plain: list[Observed] = []  # not yet told to the cost table
        self._drafted: list[Waiting] = []
        self._menu: list[Offer] = []
        self._menu_length: int | None = None  # None: to be made anew
        self._kept_of: list[Offer] | None = None  # the offers of which `_kept` was chosen last
        self._kept = PLAIN_OFFER
        self._reasons: dict[tuple[int, int], str] = {}  # of this menu
        self._stairs: dict[int, Stairs] = {}  # by width, of this menu
        self._worth: list[float] = []  # of the claims of the block that is being drafted
        self._reach = 1.0  # their product

    def begin(self, length: int, *, usual: bool = True) -> None:
        """A request starts after `length` context tokens: what was learned counts, but less."""
        self._settle_drafted()
        if self._usual is not None:
            (self.acceptance, self.calibration, self.blocks), self._usual = self._usual, None
        if not usual:
            self._usual = deepcopy((self.acceptance, self.calibration, self.blocks))
        self.ledger.begin(length, self.costs.growth(length))
        self.acceptance.soften()
        self._refused.clear()
        self._waiting = 0
        self.chosen, self.paid = _PLAIN_DECISION, None
        self.length, self._menu_length = length, None

    def observe(self, step: Observed) -> None:
        """Learn from a step; nothing is learned about slots it did not reach."""
        self.widths[step.width] += 1
        if step.width == 1 and not step.asked:
            self._observe_plain(step)
        else:
            self._observe_drafted(step)

    def expected_speedup(self) -> float:
        """Plain decoding's time over the expected time with the width that looks best now."""
        self._settle_drafted()
        return max(self.offers(self.length, self.top), key=by_rate).rate

    def plain_seconds(self, length: int) -> float:
        """What a plain step costs after `length` tokens."""
        return self.costs.plain(length)

    def offers(self, length: int, limit: int) -> list[Offer]:
        """All widths up to `limit` that a path serves, 1 first; the same list as long as nothing new is known."""
        if self._menu_length is None or abs(length - self._menu_length) >= _STRETCH:
            self._menu, self._menu_length = self._new_menu(length), length
            self._stairs, self._reasons = {}, {}
        if limit >= self.top:
            return self._menu
        return [offer for offer in self._menu if offer.width <= limit]

    def reach(self, length: int) -> None:
        """A decision is due after `length` tokens."""
        self.ledger.reach(length, self.costs.growth(length))
        self.length = length

    def keep_or_switch(self, offers: list[Offer]) -> Offer:
        """The best rate; the width before stays unless another one is clearly better."""
        if offers is self._kept_of and self._kept.width == self._width:
            return self._kept
        self._kept_of, self._kept = offers, self._keep_or_switch(offers)
        return self._kept

    def _keep_or_switch(self, offers: list[Offer]) -> Offer:
        best = max(offers, key=by_rate)
        self.going = best.rate
        now = next((offer for offer in offers if offer.width == self._width), None)
        if (
            now is None
        ):  # the first choice; or the limit is below the width, which comes back afterwards
            self._width = self._width or best.width
            return best
        if best.rate < now.rate * CLEAR:
            return now
        self.switches += 1
        self._width = best.width
        return best

    def take(self, offer: Offer, why: str, *, may_cut: bool = False) -> Decision:
        """Decide for it."""
        waits = not self.costs.wait or offer.late > 0.0
        cutter = self if may_cut and self.cutting and waits else None
        self._late = 0.0 if cutter is None else offer.late
        self.chosen = Decision(offer.width, offer.path, why, cutter, self.cutting)
        self._worth, self._reach, self.paid = [], 1.0, None
        if cutter is not None:
            self._stairs_of(offer.width)  # now, beside the context rows, and not between two passes
        return self.chosen

    def more(self, claims: Sequence[float]) -> bool:
        """Whether a row after those claimed so far could pay, even if the draft were sure of all slots to come."""
        self._look(claims)
        least = self._stairs_of(self.chosen.width).least(len(claims) + 1)
        pays = self._reach > self.going * least
        return pays or not self.calibration.known

    def cut(self, claims: Sequence[float]) -> Decision:
        """The rows with the most expected tokens beyond what their time would yield elsewhere."""
        self._look(claims)
        chosen, stairs = self.chosen, self._stairs_of(self.chosen.width)
        reach = tokens = 1.0
        width, best, going, fewest = 0, -inf, self.going, self.fewest
        for rows, (cost, worth) in enumerate(
            zip(stairs.costs[1:], [*self._worth, 0.0], strict=False), 1
        ):
            value = tokens - going * cost
            if value > best and rows >= fewest:
                width, best = rows, value
            reach *= worth
            tokens += reach
        while width <= len(claims) and stairs.costs[width + 1] < inf:
            if not self.calibration.spares(width - 1, claims[width - 1]):
                break
            width += 1
        if width < chosen.width:
            self.cuts[width] += 1
            why = f"{chosen.why}; cut to {width}, the draft is not sure"
            self.chosen = Decision(width, stairs.paths[width], why)
        return self.chosen

    def reason(self, offer: Offer, first: int, last: int) -> str:
        """What speaks for a width, in words."""
        key = offer.width, last
        if key not in self._reasons:
            milliseconds = offer.cost * self.costs.plain(self.length) * 1e3
            tokens = f"{offer.tokens:.1f} tokens in {milliseconds:.1f} ms"
            self._reasons[key] = f"best of {first}..{last}: {tokens}"
        return self._reasons[key]

    def report(self) -> dict[str, Any]:
        """Ready for JSON."""
        self._settle_drafted()
        offers = self.offers(self.length, self.top)
        milliseconds = self.costs.plain(self.length) * 1e3
        return {
            "policy": self.name,
            "why": self.chosen.why,
            "width": self.chosen.width,
            "tau": round(self.acceptance.expected(max(self.chosen.width - 1, 1)), 3),
            "expected_speedup": round(self.expected_speedup(), 3),
            "acceptance": self.acceptance.report(),
            "claims": self.calibration.report(),
            "widths": {str(width): count for width, count in sorted(self.widths.items())},
            "cuts": {str(width): count for width, count in sorted(self.cuts.items())},
            "switches": self.switches,
            "probes": self.probes,
            "refused": sorted(f"{path} {width}" for path, width in self._refused),
            "ledger": self.ledger.report(),
            "cost_of_width": {
                str(offer.width): {
                    "path": offer.path,
                    "ms": round(offer.cost * milliseconds, 4),
                    "relative": round(offer.cost, 3),
                    "tokens": round(offer.tokens, 3),
                    "rate": round(offer.rate, 3),
                    "waits": offer.late > 0.0,
                }
                for offer in offers
            },
            "costs": self.costs.to_json(),
        }

    def _observe_plain(self, step: Observed) -> None:
        # The step is put down at its own cost: it neither gains nor loses. Its row is work that waits for the draft.
        row = self.costs.row / self.costs.plain(step.length)
        self.ledger.spend(1.0 + row)
        self.since_draft += 1
        self.since_plain = 0
        self._waiting = self._waiting % _DRAFT_ROWS + 1
        self._plain.append(step)
        if len(self._plain) == _GROUP:
            self._settle_plain()

    def _settle_plain(self) -> None:
        """Tell the cost table the median of the plain steps that wait: one slow step among them is forgotten."""
        if self._plain:
            steps = sorted(
                self._plain, key=lambda step: step.seconds / self.costs.plain(step.length)
            )
            self.costs.observe(steps[(len(steps) - 1) // 2])
            self.level = self.costs.level
            self._plain.clear()
            self._menu_length = None

    def _observe_drafted(self, step: Observed) -> None:
        self._settle_plain()
        if len(step.claims) > len(self._worth):
            self._look(step.claims)
        price = self._price(step)
        waits = price is not None and len(self._drafted) + 1 < _BATCH
        if price is None:
            self._settle_drafted()
            price = 0.0
        late = self._late
        if late:
            spared = max(step.seconds - late * self.costs.plain(step.length), 0.5 * step.seconds)
            step = step._replace(seconds=spared)
        worth, since = self._worth, self.since_draft
        self._drafted.append(
            Waiting(step, worth, since, self._waiting, price, self.chosen.path, late)
        )
        self.paid = price
        self.ledger.spend(price)
        if not waits:
            self._settle_drafted()
        self.since_draft = 0
        self.since_plain += 1
        self._waiting = step.accepted + 1

    def _price(self, step: Observed) -> float | None:
        """What the step is put down at until it is learned from; None if that has to be at once."""
        settled = self.acceptance.settled and self.ledger.balance > _RICH
        if not settled or self.since_draft or step.path != self.chosen.path:
            return None
        cost = self._stairs_of(step.asked or step.width).costs[step.width]
        return cost if cost < inf else None

    def _settle_drafted(self) -> None:
        """Learn from the drafting steps that wait."""
        waiting, self._drafted = self._drafted, []
        last = len(waiting) - 1
        for place, (step, worth, since, rows, paid, wanted, late) in enumerate(waiting):
            beyond: Sequence[float] = ()
            if step.claims:
                judged = min(step.drafted, step.accepted + 1)
                self.calibration.observe(step.claims, step.accepted, judged)
                self.blocks.add(worth)
                if step.accepted == step.drafted:
                    beyond = worth[step.drafted :]
            if self.acceptance.observe(step.drafted, step.accepted, since, beyond):
                self._menu_length = None
            if step.path != wanted:
                self._refused.add((wanted, step.width))
                self._menu_length = None
            if place == last:  # of several one is enough
                cost = self.costs.observe(step, rows) + late
                self.ledger.spend(cost - paid)
                self.paid = cost

    def _new_menu(self, length: int) -> list[Offer]:
        plain, tokens = self.costs.plain(length), self.acceptance.tokens
        prices = self.costs.prices(length, self._refused)
        prices = [price for price in prices if price[0] <= self.top]
        gains: Sequence[float] = [1.0] * len(prices)
        if self.cutting and prices and self.calibration.known:
            _, *gains = self.blocks.gains(
                [1, *[price[0] for price in prices]],
                [1.0, *[(price[2] - price[3]) / plain for price in prices]],
                [0.0, *[price[3] / plain for price in prices]],
                lambda: self.acceptance.rates,
                self.going,
            )
        menu = [PLAIN_OFFER]
        for (width, path, seconds, draft), gain in zip(prices, gains, strict=True):
            cost, yields = seconds / plain, tokens[width - 1]
            late = self.costs.wait / plain
            if late and gain * cost < (cost + late) * CLEAR:
                late, gain = 0.0, 1.0
            cost += late
            rate = yields / cost * gain
            menu.append(Offer(width, path, cost, yields, rate, draft / plain, late))
        return menu

    def _stairs_of(self, width: int) -> Stairs:
        """Of a window that was decided on; remembered as long as the menu is."""
        stairs = self._stairs.get(width)
        if stairs is None:
            whole = next(offer for offer in self._menu if offer.width == width)
            costs, paths = [inf] * (width + 1), [PLAIN] * (width + 1)
            for offer in self._menu:
                cost = offer.cost - offer.draft - offer.late + whole.draft + whole.late
                if offer.width <= width and cost <= whole.cost:
                    costs[offer.width], paths[offer.width] = cost, offer.path
            costs[width] = whole.cost
            stairs = self._stairs[width] = Stairs(costs, paths)
        return stairs

    def _look(self, claims: Sequence[float]) -> None:
        """Note what further claims are worth."""
        further = self.calibration.worths(claims, len(self._worth))
        self._worth += further
        self._reach *= prod(further)
