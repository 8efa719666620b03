"""How many rows the next step verifies: the policies, and the planner that takes what pays on this machine.

No policy sees a token or a clock. They learn from `Observed` steps, and the costs they start from were measured (`calibrate`).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from sparkinfer.dflash.acceptance import Acceptance
from sparkinfer.dflash.costs import PLAIN, CostTable, Observed
from sparkinfer.dflash.ledger import Ledger
from sparkinfer.errors import OptionError
from sparkinfer.options import Options

__all__ = ["POLICIES", "Decision", "Observed", "Policy", "Setup", "make_policy"]

_CLEAR = 1.01  # how much better another width must be before it is taken
_PROBES = 0.01  # of plain decoding's time spent on trying the draft where it does not pay
_GROUP = 8  # plain steps that the cost table sees as one, their median
_REFRESH = (
    32,
    256,
)  # steps after which a plain one is measured again: where the gain is small, where it is large
_SMALL_GAIN = 1.15


@dataclass(frozen=True, slots=True)
class Decision:
    """`width` rows to verify, on `path` if it serves them; 1 is a plain step ("ar"). `why` is for people."""

    width: int
    path: str
    why: str


class Policy(Protocol):
    """Decides one request after another; what it learned stays."""

    name: str

    def begin(self, length: int) -> None:
        """A request starts after `length` context tokens."""

    def choose(self, length: int, limit: int) -> Decision:
        """What to do after `length` tokens; more than `limit` (>= 1) rows make no sense now."""

    def observe(self, step: Observed) -> None:
        """The step that was chosen last, after its commit."""

    def expected_speedup(self) -> float:
        """Plain decoding's time over the expected time, 1.0 where nothing is gained."""

    def plain_seconds(self, length: int) -> float:
        """What a plain step costs after `length` tokens."""

    def report(self) -> dict[str, Any]:
        """Ready for JSON."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a policy is built from: measured costs of the permitted paths, the draft's most slots, the most rows, a fixed depth."""

    costs: CostTable
    max_depth: int
    max_width: int
    proposals: int = 0


@dataclass(slots=True)
class _Offer:
    """A width as it looks now: its path, its cost in plain steps and its tokens per plain step's time."""

    width: int
    path: str
    cost: float
    tokens: float

    @property
    def rate(self) -> float:
        return self.tokens / self.cost


class _Learner:
    """What all policies share: estimates, costs, counts and the report."""

    name = ""

    def __init__(self, setup: Setup) -> None:
        self.costs = setup.costs
        self.top = min(setup.max_width, setup.max_depth + 1)
        self.acceptance = Acceptance(setup.max_depth)
        self.ledger = Ledger()
        self.widths: Counter[int] = Counter()
        self.switches = self.probes = 0
        self.why = ""
        self._chosen = Decision(1, PLAIN, "")
        self._width = 0  # the width that pays, 0 before the first choice
        self._refused: set[tuple[str, int]] = set()  # in this request
        self._since_draft = self._since_plain = 0  # steps
        self._waiting = 0  # context rows the draft has yet to append
        self._plain: list[Observed] = []
        self._menu: list[_Offer] = []
        self._menu_length: int | None = None
        self._length = 0
        self._expected = 1.0

    def begin(self, length: int) -> None:
        """A request starts after `length` context tokens: what was learned counts, but less."""
        self.ledger.begin(length)
        self.acceptance.soften()
        self._refused.clear()
        self._waiting = 0
        self._length, self._menu_length = length, None

    def observe(self, step: Observed) -> None:
        """Learn from a step; nothing is learned about slots it did not reach."""
        self.widths[step.width] += 1
        if step.width == 1:
            self._observe_plain(step)
        else:
            self._observe_drafted(step)

    def _observe_plain(self, step: Observed) -> None:
        plain = self.costs.plain(step.length)
        self.ledger.spend(1.0 + self.costs.row / plain)
        self._since_draft += 1
        self._since_plain = 0
        self._waiting += 1
        self._plain.append(step)
        if len(self._plain) == _GROUP:
            self._settle_plain()

    def _settle_plain(self) -> None:
        """Tell the cost table the median of the plain steps that wait: one slow step among them is forgotten."""
        if self._plain:
            steps = sorted(self._plain, key=lambda step: step.seconds)
            self.costs.observe(steps[(len(steps) - 1) // 2])
            self._plain.clear()
            self._menu_length = None

    def _observe_drafted(self, step: Observed) -> None:
        self._settle_plain()
        self.acceptance.observe(step.drafted, step.accepted, self._since_draft)
        if step.path != self._chosen.path:
            self._refused.add((self._chosen.path, step.width))
        plain = self.costs.plain(step.length)
        self.ledger.spend(self.costs.charge(step, self._waiting) / plain)
        self.costs.observe(step, self._waiting)
        self._since_draft = 0
        self._since_plain += 1
        self._waiting = step.accepted + 1
        self._menu_length = None

    def expected_speedup(self) -> float:
        """Plain decoding's time over the expected time with the best width now."""
        return max((offer.rate for offer in self._offers(self._length, self.top)), default=1.0)

    def plain_seconds(self, length: int) -> float:
        """What a plain step costs after `length` tokens."""
        return self.costs.plain(length)

    def _offers(self, length: int, limit: int) -> list[_Offer]:
        """All widths up to `limit` that a path serves, 1 first."""
        if self._menu_length is None or abs(length - self._menu_length) >= 64:
            self._menu, self._menu_length = self._new_menu(length), length
        return [offer for offer in self._menu if offer.width <= limit]

    def _new_menu(self, length: int) -> list[_Offer]:
        plain, menu = self.costs.plain(length), [_Offer(1, PLAIN, 1.0, 1.0)]
        for width in range(2, self.top + 1):
            refused = {path for path, w in self._refused if w == width}
            path = self.costs.best_path(width, length, refused)
            if path is not None:
                cost = self.costs.step(width, path, length) / plain
                menu.append(_Offer(width, path, cost, self.acceptance.expected(width - 1)))
        return menu

    def _take(self, offer: _Offer, why: str) -> Decision:
        self.why = why
        self._chosen = Decision(offer.width, offer.path, why)
        return self._chosen

    def report(self) -> dict[str, Any]:
        """Ready for JSON."""
        offers = self._offers(self._length, self.top)
        best = max(offers, key=lambda offer: offer.rate)
        milliseconds = self.costs.plain(self._length) * 1e3
        return {
            "policy": self.name,
            "why": self.why,
            "width": self._chosen.width,
            "tau": round(self.acceptance.expected(max(best.width - 1, 1)), 3),
            "expected_speedup": round(best.rate, 3),
            "acceptance": self.acceptance.report(),
            "widths": {str(width): count for width, count in sorted(self.widths.items())},
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
                }
                for offer in offers
            },
            "costs": self.costs.to_json(),
        }


class Auto(_Learner):
    """The width with the most tokens per second, one row included; never slower than plain decoding by more than the ledger."""

    name = "auto"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._purse = 0.0  # plain steps that may be spent on probes
        self._probing = False

    def begin(self, length: int) -> None:
        super().begin(length)
        self._probing = False

    def choose(self, length: int, limit: int) -> Decision:
        """A width of 1 .. limit. Reads no token: what is cut off cannot have an influence."""
        self._settle_probe(length)
        self.ledger.reach(length)
        self._length = length
        offers = self._offers(length, limit)
        best = self._best(offers)
        if best.width == 1:
            return self._probe_or_plain(offers)
        if self._since_plain >= _REFRESH[best.rate > _SMALL_GAIN]:
            return self._take(offers[0], "measures one row again")
        if not self.ledger.allows(best.cost):
            rest = [o for o in offers[1:] if o.rate > 1.0 and self.ledger.allows(o.cost)]
            if not rest:
                return self._take(offers[0], f"saves up for a try with {best.width} rows")
            best = max(rest, key=lambda offer: offer.rate)
        return self._take(best, self._reason(best, len(offers)))

    def _best(self, offers: list[_Offer]) -> _Offer:
        """The best rate; the width before stays unless another one is clearly better."""
        best = max(offers, key=lambda offer: offer.rate)
        now = next((offer for offer in offers if offer.width == self._width), None)
        if now is not None and best.rate < now.rate * _CLEAR:
            return now
        if now is not None and best is not now:
            self.switches += 1
        if (
            now is not None or not self._width
        ):  # a width beyond the limit comes back when the limit is gone
            self._width = best.width
        return best

    def _reason(self, offer: _Offer, count: int) -> str:
        ms = offer.cost * self.costs.plain(self._length) * 1e3
        return f"best of 1..{count}: {offer.tokens:.1f} tokens in {ms:.1f} ms"

    def _probe_or_plain(self, offers: list[_Offer]) -> Decision:
        plain = offers[0]
        if len(offers) == 1:
            return self._take(plain, "one row is all that makes sense here")
        if max(offer.width / offer.cost for offer in offers[1:]) <= 1.0:
            return self._take(plain, "no acceptance could pay here")
        probe = max(offers[1:], key=_promise)
        self._purse = min(self._purse + _PROBES, 3.0)
        if self._purse >= probe.cost - probe.tokens and self.ledger.allows(probe.cost):
            self._probing = True
            self.probes += 1
            return self._take(probe, f"probe with {probe.width} rows")
        return self._take(plain, "the draft does not pay here")

    def _settle_probe(self, length: int) -> None:
        """A probe's loss is taken from the purse, its gain added."""
        if self._probing:
            self._probing = False
            self._purse += (length - self._length) - self._chosen_cost()

    def _chosen_cost(self) -> float:
        chosen = self._chosen
        return self.costs.step(chosen.width, chosen.path, self._length) / self.costs.plain(
            self._length
        )


def _promise(offer: _Offer) -> float:
    """What a probe may win over what it may lose, if the draft is good again."""
    hope = 0.8
    won = sum(hope**slot for slot in range(1, offer.width))
    return won / max(offer.cost - 1.0, 1e-6)


class Always(_Learner):
    """The best width that drafts, whether or not it pays."""

    name = "always"

    def choose(self, length: int, limit: int) -> Decision:
        self._length = length
        self.ledger.reach(length)
        offers = self._offers(length, limit)
        if len(offers) == 1:
            return self._take(offers[0], "one row is all that makes sense here")
        best = max(offers[1:], key=lambda offer: offer.rate)
        now = next((offer for offer in offers[1:] if offer.width == self._width), None)
        if now is not None and best.rate < now.rate * _CLEAR:
            best = now
        elif now is not None:
            self.switches += 1
        if now is not None or not self._width:
            self._width = best.width
        ms = best.cost * self.costs.plain(length) * 1e3
        return self._take(
            best, f"best of 2..{len(offers)}: {best.tokens:.1f} tokens in {ms:.1f} ms"
        )


class Fixed(_Learner):
    """The same number of proposals at every step."""

    name = "fixed"

    def __init__(self, setup: Setup) -> None:
        """Raises: OptionError for a depth the draft or the paths do not have."""
        super().__init__(setup)
        depth, most = setup.proposals, self.top - 1
        if not 1 <= depth <= most:
            raise OptionError(
                f"dflash_proposals={depth} is not accepted; this draft takes 1 to {most}"
            )
        self.depth = depth

    def choose(self, length: int, limit: int) -> Decision:
        self._length = length
        self.ledger.reach(length)
        width = min(self.depth + 1, limit)
        offers = self._offers(length, width)
        return self._take(offers[-1], f"fixed by SPARKINFER_DFLASH_PROPOSALS={self.depth}")

    def expected_speedup(self) -> float:
        return self._offers(self._length, self.depth + 1)[-1].rate


class Off(_Learner):
    """Plain steps."""

    name = "off"

    def choose(self, length: int, limit: int) -> Decision:
        self._length = length
        self.ledger.reach(length)
        return self._take(_Offer(1, PLAIN, 1.0, 1.0), "speculation is off")

    def expected_speedup(self) -> float:
        return 1.0


POLICIES: dict[str, Callable[[Setup], Policy]] = {
    "auto": Auto,
    "always": Always,
    "fixed": Fixed,
    "off": Off,
}


def make_policy(options: Options, costs: CostTable, max_depth: int, max_width: int) -> Policy:
    """The policy the options ask for: `spec` auto | on | off, and a fixed depth if `dflash_proposals` is not 0.

    Raises: OptionError for a depth that the draft or the permitted paths do not have.
    """
    proposals = options.integer("dflash_proposals") or 0
    spec = options.text("spec")
    name = (
        "off" if spec == "off" else "fixed" if proposals else "always" if spec == "on" else "auto"
    )
    return POLICIES[name](Setup(costs, max_depth, max_width, proposals))
