"""The ways to decode that are measured or checked, made from one target, one draft and the options."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from sparkinfer.bench.agree import Setting
from sparkinfer.bench.answers import PLAIN, Side
from sparkinfer.bench.fixed import Forced
from sparkinfer.bench.oracle import Oracle
from sparkinfer.decoding import AutoregressiveDecoder
from sparkinfer.dflash.base import Draft
from sparkinfer.dflash.calibrate import measured_costs
from sparkinfer.dflash.costs import CostTable
from sparkinfer.dflash.loop import DFlashDecoder
from sparkinfer.dflash.planner import POLICIES, Policy, Setup
from sparkinfer.dflash.verify import Paths
from sparkinfer.engine import Engine
from sparkinfer.errors import OptionError
from sparkinfer.options import Options

if TYPE_CHECKING:
    from sparkinfer.models import Target

Report = Callable[[str, int, int], None]
PLANNER = "planner"
_SEED = 20240229
_TURNS = 997  # steps after which the changing setting starts over; no divisor of anything here


@dataclass(frozen=True, slots=True)
class Drafting:
    """A draft over a target: the decoder all sides share, and what steps cost on this machine.

    A single decoder, because the draft's context belongs to it; a side is its policy (and draft) of the moment.
    """

    decoder: DFlashDecoder
    draft: Draft
    costs: CostTable

    @classmethod
    def over(cls, engine: Engine, draft: Draft, options: Options, report: Report) -> "Drafting":
        """Measure the costs, or read back what was measured before, and make the decoder.

        Raises: OptionError if the options leave no path.
        """
        target = cast("Target", engine.target)  # the engine itself asks less of a target
        target.set_taps(draft.taps)
        compact = options.integer("dflash_compact_verify")
        paths = Paths(
            target, rows=options.boolean("dflash_rows"), compact=2 if compact is None else compact
        )
        costs = measured_costs(target, draft, paths, options.path("cache_dir"), report)
        policy = POLICIES["off"](_setup(costs, draft, paths, 0))
        return cls(DFlashDecoder(target, draft, policy, paths), draft, costs)

    def scripted(self, oracle: Oracle) -> "Drafting":
        """Return the same with the oracle in the draft's place, whose network runs along and costs the same."""
        return replace(self, draft=oracle.draft)

    @property
    def most(self) -> int:
        """The deepest draft that the draft and the paths allow."""
        return min(self.draft.max_depth, self.decoder.paths.max_width - 1)

    def planner(self, prepare: Callable[[int], None] | None = None, name: str = PLANNER) -> Side:
        """Return the side whose depth the planner chooses."""
        return self._side(name, self._policy("auto", 0), 0, prepare)

    def fixed(self, depth: int, prepare: Callable[[int], None] | None = None) -> Side:
        """Return the side of a fixed depth, on the path that is the fastest here."""
        return self._side(f"depth {depth}", self._policy("fixed", depth), depth, prepare)

    def forced(
        self,
        name: str,
        turns: Sequence[tuple[int, str]],
        prepare: Callable[[int], None] | None = None,
    ) -> Side:
        """Return the side that takes these (rows, path) pairs in turn."""
        return self._side(name, Forced(name, turns), 0, prepare)

    def _policy(self, name: str, depth: int) -> Policy:
        """A policy with a cost table of its own: what one side learns is not another's."""
        costs = CostTable.from_json(self.costs.to_json(), origin=self.costs.origin)
        return POLICIES[name](_setup(costs, self.draft, self.decoder.paths, depth))

    def _side(
        self, name: str, policy: Policy, depth: int, prepare: Callable[[int], None] | None
    ) -> Side:
        decoder, draft = self.decoder, self.draft

        def ready(number: int) -> None:
            decoder.draft, decoder.policy = draft, policy
            if prepare is not None:
                prepare(number)

        return Side(name, decoder, depth, ready)


def _setup(costs: CostTable, draft: Draft, paths: Paths, depth: int) -> Setup:
    return Setup(costs, draft.max_depth, paths.max_width, depth)


def plain_side(engine: Engine) -> Side:
    """Return plain decoding."""
    return Side(PLAIN, AutoregressiveDecoder(engine.target))


def sweep_sides(
    engine: Engine,
    drafting: Drafting,
    depths: Iterable[int],
    prepare: Callable[[int], None] | None = None,
) -> list[Side]:
    """Return plain decoding, every depth, and the planner."""
    fixed = [drafting.fixed(depth, prepare) for depth in depths]
    return [plain_side(engine), *fixed, drafting.planner(prepare)]


def parse_depths(flag: str, text: str, most: int) -> list[int]:
    """Return the depths of `1,2,5`, or all of them. Raises: OptionError for one beyond `most`."""
    if text == "all":
        return list(range(1, most + 1))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= most for part in parts):
        accepted = f"all, or numbers from 1 to {most} with commas between them"
        raise OptionError(f"{flag} {text!r} is not accepted; expected {accepted}")
    return sorted({int(part) for part in parts})


def parse_paths(flag: str, text: str, paths: Paths) -> list[str]:
    """Return the names of `compact,window`, or all. Raises: OptionError for an unknown one."""
    known = [path.name for path in paths.order]
    if text == "all":
        return known
    names = [part.strip() for part in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise OptionError(f"{flag} has {unknown[0]!r}; expected all or some of {','.join(known)}")
    return list(dict.fromkeys(names))


def check_settings(
    drafting: Drafting, oracle: Oracle, names: Sequence[str], depths: Sequence[int]
) -> tuple[list[Setting], list[str]]:
    """Return every path at every depth, the planner, and all of them in turn; and what is left out and why.

    With a real draft two more settings replay scripted acceptance around its network, so that long and
    fully accepted drafts are met whatever the draft is worth. The oracle's own drafts are scripted always.
    """
    paths = drafting.decoder.paths
    scripted = drafting.draft is oracle.draft
    mixed = oracle.load(_mixed_script(drafting.most)) if scripted else None
    settings, left_out, pairs = [], [], []
    for path in (path for path in paths.order if path.name in names):
        refused: list[int] = []
        for depth in depths:
            if path.refusal(depth + 1) is not None:
                refused.append(depth)
                continue
            pairs.append((depth + 1, path.name))
            prepare = oracle.load(_script(depth)) if scripted else None
            side = drafting.forced(f"{path.name}, depth {depth}", [pairs[-1]], prepare)
            settings.append(Setting(side, path.name))
        if refused:
            left_out.append(
                f"{path.name} at depth {_range(refused)}: {path.refusal(refused[-1] + 1)}"
            )
    settings.append(Setting(drafting.planner(mixed)))
    if pairs:
        settings.append(Setting(drafting.forced("another path each step", _shuffled(pairs), mixed)))
    return settings, left_out


def scripted_settings(drafting: Drafting, oracle: Oracle) -> list[Setting]:
    """Return the planner, and every path and depth in turn, with the oracle's drafts."""
    pairs = [
        (depth + 1, path.name)
        for path in drafting.decoder.paths.order
        for depth in range(1, drafting.most + 1)
        if path.refusal(depth + 1) is None
    ]
    prepare = oracle.load(_mixed_script(drafting.most))
    changing = drafting.forced("scripted drafts, another path each step", _shuffled(pairs), prepare)
    return [Setting(drafting.planner(prepare, "scripted drafts, planner")), Setting(changing)]


def _script(depth: int) -> list[int]:
    """Accepted drafts a step for windows of one depth: every number from none to all, in no order."""
    drawn: list[int] = np.random.default_rng(_SEED).integers(0, depth + 1, _TURNS).tolist()
    return drawn


def _mixed_script(depth: int) -> list[int]:
    """The same for windows of any depth up to this one: small numbers come more often."""
    random = np.random.default_rng(_SEED)
    drawn: list[int] = random.integers(0, random.integers(0, depth + 1, _TURNS) + 1).tolist()
    return drawn


def _shuffled(pairs: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """The pairs and plain steps in no order, the same in every run."""
    every = [*pairs, (1, "ar")]
    chosen = np.random.default_rng(_SEED + 1).integers(0, len(every), _TURNS)
    return [every[index] for index in chosen]


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
