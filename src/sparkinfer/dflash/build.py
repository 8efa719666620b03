"""From process options to a decoder: the draft loaded, costs measured or read back, a policy chosen."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sparkinfer.backend.compiled import ahead, compile_all, set_cache_root
from sparkinfer.dflash import acceptance, drift
from sparkinfer.dflash.base import Draft
from sparkinfer.dflash.calibrate import measured_costs
from sparkinfer.dflash.draft import load_draft
from sparkinfer.dflash.loop import DFlashDecoder
from sparkinfer.dflash.planner import make_policy
from sparkinfer.dflash.verify import Paths
from sparkinfer.options import Options

if TYPE_CHECKING:
    from sparkinfer.models import Target

Progress = Callable[[str, int, int], None]


def load_decoder(
    target: "Target", path: Path, options: Options, progress: Progress | None = None
) -> DFlashDecoder:
    """The decoder for a draft on disk.

    Raises: what `load_draft` raises; OptionError for a depth the draft does not have.
    """
    shorten = options.text("dflash_block") == "depth"
    draft = load_draft(path, target, shorten=shorten, progress=progress)
    return build_decoder(target, draft, options, progress)


def build_decoder(
    target: "Target", draft: Draft, options: Options, progress: Progress | None = None
) -> DFlashDecoder:
    """The decoder for a draft at hand (an oracle in benchmarks, say).

    Raises: OptionError for a depth the draft does not have.
    """
    target.set_taps(draft.taps)
    paths = Paths(
        target,
        rows=options.boolean("dflash_rows"),
        compact=options.integer("dflash_compact_verify") or 0,
    )
    if not target.backend.on_host:
        set_cache_root(options.path("cache_dir"))
    planning = (acceptance.KERNEL, drift.KERNEL)
    ahead(planning)
    if target.backend.on_host:  # a first start compiles for seconds: no request should wait for it
        most = min(paths.max_width, draft.max_depth + 1)
        target.warm_up([width for width in range(2, most + 1) if paths.together(width)], progress)
    compile_all(planning)  # before anything is measured
    costs = measured_costs(target, draft, paths, options.path("cache_dir"), progress)
    prior = getattr(draft, "prior", None)
    policy = make_policy(options, costs, draft.max_depth, paths.max_width, prior)
    return DFlashDecoder(target, draft, policy, paths, rule=options.text("dflash_accept"))
