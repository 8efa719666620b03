"""The planner: takes the width that pays on this machine and on this text, one row included.

It compares expected tokens by time over all widths, and cuts a window that was drafted where the draft itself is
not sure enough. Costs were measured (`calibrate`) and are corrected while it runs, acceptance is estimated as it
decodes (`acceptance`), the draft's claims are corrected by what comes of them (`claims`), and a ledger bounds what
a wrong guess can cost (`ledger`).
"""

from collections.abc import Callable
from math import log

from sparkinfer.dflash.costs import CostTable, Observed
from sparkinfer.dflash.learner import Learner, Offer
from sparkinfer.dflash.policy import Decision, Policy, Setup
from sparkinfer.dflash.prior import Prior
from sparkinfer.dflash.steady import ONE_ROW, Always, Fixed, Off
from sparkinfer.options import Options

__all__ = ["POLICIES", "Auto", "Decision", "Observed", "Policy", "Setup", "make_policy"]

# Probes are tries of the draft where it does not pay. A purse, in plain steps, pays what they lose: what it holds
# at the start and at most, what each plain step adds, and the share of every gain that goes there, because where
# drafting paid it is worth more to look for it again.
_PURSE = (4.0, 10.0)
_PURSE_GROWTH = 0.01
_PURSE_SHARE = 0.1
# Plain steps between probes: after one that paid; at most, after doubling with each that did not.
_PATIENCE = (2, 48)
_HOPE = 0.8  # acceptance that a probe hopes for

# Worst losses of a step that the ledger must cover before the best rate alone counts.
_CAREFUL = 4.0
_RUIN = 0.1  # a balance that is as good as none

# Drafting steps before one row is measured again: where its cost may change the choice, and in any case.
_REFRESH = (8, 256)
# A change of the machine's speed (logarithm) that asks for it too: it may be the drafting steps alone that changed.
_SHIFT = 0.25


class Auto(Learner):
    """The width with the most expected tokens by time; what that can lose against plain decoding is bounded."""

    name = "auto"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._purse = _PURSE[0]
        self._probing = False
        self._failed = 0  # probes in a row that did not pay
        self._refreshes = 0
        self._plain_menu: list[Offer] | None = None  # the offers of which one row is the best
        self._probe_menu: list[Offer] | None = None  # the offers that `_probe` was chosen from
        self._probe: Offer | None = None  # None: no acceptance could pay

    def begin(self, length: int, *, usual: bool = True) -> None:
        super().begin(length, usual=usual)
        self._probing = False

    def choose(self, length: int, limit: int) -> Decision:
        """A width of 1 .. limit. Reads no token: what is cut off cannot have an influence."""
        self._book(length)
        self.reach(length)
        offers = self.offers(length, limit)
        if offers is self._plain_menu:
            return self._plain_or_probe(offers)
        best = self.keep_or_switch(offers)
        if best.width == 1:
            self._plain_menu = offers
            return self._plain_or_probe(offers)
        self._failed = 0
        if self._doubtful(best):
            self._refreshes += 1
            return self.take(offers[0], "measures the cost of one row again")
        return self._draft(best, offers)

    def _doubtful(self, best: Offer) -> bool:
        """Whether plain decoding could be the better choice if costs are as far off as they may well be."""
        if self.since_plain < _REFRESH[0]:
            return False
        if abs(self.costs.level - self.level) > _SHIFT:
            return True
        due = min(_REFRESH[0] << min(self._refreshes, 8), _REFRESH[1])
        if self.since_plain < due or self.since_plain % _REFRESH[0]:
            return False
        doubt = self.costs.doubt(best.width, best.path)
        return self.since_plain >= _REFRESH[1] or log(best.rate) < 2.0 * doubt

    def _draft(self, best: Offer, offers: list[Offer]) -> Decision:
        """The best width; while little may be lost, the one with which that is expected to grow fastest."""
        if self.ledger.balance > _CAREFUL * (best.cost - 1.0) * self.ledger.scale:
            return self.take(best, self.reason(best, 1, offers[-1].width), may_cut=True)
        allowed = [o for o in offers[1:] if o.rate > 1.0 and self.ledger.allows(o.cost)]
        careful = max(allowed, key=self._growth, default=None)
        if careful is None:
            return self.take(offers[0], f"saves up for a try with {best.width} rows")
        if careful is best:
            return self.take(best, self.reason(best, 1, offers[-1].width), may_cut=True)
        why = f"{best.width} rows look best, fewer risk less for now"
        return self.take(careful, why, may_cut=True)

    def _growth(self, offer: Offer) -> float:
        """Expected logarithm of the balance after a step, by cost: growth without ruin (Kelly's rule)."""
        balance, reached, total = self.ledger.balance / self.ledger.scale, 1.0, 0.0
        for kept in range(offer.width):
            further = 0.0
            if kept + 1 < offer.width:
                further = self.acceptance.expected(kept + 1) - self.acceptance.expected(kept)
            after = max(balance + 1.0 + kept - offer.cost, _RUIN)
            total += (reached - further) * log(after)
            reached = further
        return (total - log(max(balance, _RUIN))) / offer.cost

    def _plain_or_probe(self, offers: list[Offer]) -> Decision:
        """One row is the best: take it, or try the draft if a try is due and can be paid."""
        if len(offers) == 1:
            return self.take(offers[0], ONE_ROW)
        if offers is not self._probe_menu:
            self._probe_menu, self._probe = offers, _probe(offers[1:])
        probe = self._probe
        if probe is None:
            return self.take(offers[0], "no acceptance could pay here")
        self._purse = min(self._purse + _PURSE_GROWTH, _PURSE[1])
        wait = min(_PATIENCE[0] << min(self._failed, 8), _PATIENCE[1])
        affordable = self._purse >= probe.cost - probe.tokens and self.ledger.allows(probe.cost)
        if self.since_draft < wait or not affordable:
            return self.take(offers[0], "the draft does not pay here")
        self._probing = True
        self.probes += 1
        return self.take(probe, f"probe with {probe.width} rows")

    def _book(self, length: int) -> None:
        """Take a probe's loss from the purse, and add a share of what any drafting step gained."""
        if self.paid is not None:
            gain = length - self.length - self.paid
            if self._probing:
                self._failed = 0 if gain >= 0.0 else self._failed + 1
            if gain > 0.0:
                self._purse = min(self._purse + _PURSE_SHARE * gain, _PURSE[1])
            elif self._probing:
                self._purse += gain
        self._probing = False


def _probe(offers: list[Offer]) -> Offer | None:
    """The width that may win most for what it may lose, if the draft turns out to be good; None if none can win."""
    if max(offer.width / offer.cost for offer in offers) <= 1.0:
        return None

    def promise(offer: Offer) -> float:
        hoped = sum(_HOPE**slot for slot in range(1, offer.width))
        return hoped / max(offer.cost - 1.0, 1e-6)

    return max(offers, key=promise)


POLICIES: dict[str, Callable[[Setup], Policy]] = {
    "auto": Auto,
    "always": Always,
    "fixed": Fixed,
    "off": Off,
}


def make_policy(
    options: Options, costs: CostTable, max_depth: int, max_width: int, prior: Prior | None = None
) -> Policy:
    """The policy the options ask for: `spec` auto | on | off, and a fixed depth if `dflash_proposals` is not 0.

    Raises: OptionError for a depth that the draft or the permitted paths do not have.
    """
    proposals = options.integer("dflash_proposals") or 0
    spec = options.text("spec")
    name = (
        "off" if spec == "off" else "fixed" if proposals else "always" if spec == "on" else "auto"
    )
    return POLICIES[name](Setup(costs, max_depth, max_width, proposals, prior))
