"""Policies that do not ask whether speculation pays: always, fixed, off."""

from sparkinfer.dflash.learner import PLAIN_OFFER, Learner, by_rate
from sparkinfer.dflash.policy import Decision, Setup
from sparkinfer.errors import OptionError

ONE_ROW = "one row is all that makes sense here"


class Always(Learner):
    """The best width that drafts, whether or not it pays; cuts leave at least one draft."""

    name = "always"
    fewest = 2

    def choose(self, length: int, limit: int) -> Decision:
        """A width of 2 .. limit; 1 only where the limit or the paths leave nothing else."""
        self.reach(length)
        offers = self.offers(length, limit)[1:]
        if not offers:
            return self.take(PLAIN_OFFER, ONE_ROW)
        best = self.keep_or_switch(offers)
        return self.take(best, self.reason(best, 2, offers[-1].width), may_cut=True)

    def expected_speedup(self) -> float:
        """May be below 1."""
        return max(self.offers(self.length, self.top)[1:], key=by_rate, default=PLAIN_OFFER).rate


class Fixed(Learner):
    """The same number of proposals at every step, whatever the draft says of them."""

    name = "fixed"
    cutting = False

    def __init__(self, setup: Setup) -> None:
        """Raises: OptionError for a depth that the draft or the permitted paths do not have."""
        super().__init__(setup)
        self.depth, most = setup.proposals, setup.top - 1
        if not 1 <= self.depth <= most:
            limit = "draft" if setup.max_depth < setup.max_width else "verify path"
            raise OptionError(
                f"dflash_proposals={self.depth} (--draft-max) is not accepted; this {limit} takes 1 to {most},"
                " and 0 leaves the number to the planner"
            )

    def choose(self, length: int, limit: int) -> Decision:
        """That width, or the limit where it is less."""
        self.reach(length)
        offer = self.offers(length, min(self.depth + 1, limit))[-1]
        if offer.width == 1:
            return self.take(offer, ONE_ROW)
        return self.take(offer, f"fixed: {self.depth} drafted in every step (--draft-max)")

    def expected_speedup(self) -> float:
        """May be below 1."""
        return self.offers(self.length, self.depth + 1)[-1].rate


class Off(Learner):
    """Plain steps."""

    name = "off"
    cutting = False

    def choose(self, length: int, limit: int) -> Decision:
        """One row."""
        self.reach(length)
        return self.take(PLAIN_OFFER, "speculation is off")

    def expected_speedup(self) -> float:
        """None is expected."""
        return 1.0
