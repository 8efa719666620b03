"""Two evaluations of one change: where they disagree, and whether acceptance or the cost of a step is the reason."""

from statistics import fmean, geometric_mean

from sparkinfer.evaluation.record import Evaluation
from sparkinfer.evaluation.report_facts import SIDES, clean, percent, sane

# Two acceptances that differ by less than this share count as equal, two step costs by more as different.
SAME_ACCEPTANCE, OTHER_COST = 0.01, 0.02


def disagreement(one: Evaluation, other: Evaluation) -> list[str]:
    """Return in words where two evaluations of one change differ: rate, acceptance, cost of a step.

    A step's cost is derived: tokens a step over tokens a second. Raises: nothing; cells that only one of the two has
    are left out.
    """
    lines = []
    for cell in dict.fromkeys(s.cell for s in one.samples if not s.guard):
        pair = [_cell_figures(evaluation, cell) for evaluation in (one, other)]
        if all(figures is not None for figures in pair):
            lines += _differences(cell, clean(one.id), clean(other.id), *pair)  # type: ignore[arg-type]
    return lines


Figures = dict[str, tuple[float, float]]  # by side: tokens a second, tokens a step


def _cell_figures(evaluation: Evaluation, cell: str) -> Figures | None:
    found: Figures = {}
    for side in SIDES:
        mine = [
            (s.value, sane(s.accept))
            for s in evaluation.samples
            if (s.metric, s.cell, s.side, s.guard) == (evaluation.plan.primary, cell, side, False)
            and s.accept
            and s.accept > 0
        ]
        if not mine:
            return None
        found[side] = (geometric_mean(v for v, _ in mine), fmean(a for _, a in mine if a))
    return found


def _differences(cell: str, one: str, other: str, a: Figures, b: Figures) -> list[str]:
    gains = [f["candidate"][0] / f["base"][0] for f in (a, b)]
    costs = [{side: 1e3 * accept / rate for side, (rate, accept) in f.items()} for f in (a, b)]
    equal = {side: abs(a[side][1] / b[side][1] - 1) < SAME_ACCEPTANCE for side in SIDES}
    lines = [f"{cell}: {percent(gains[0])} % in {one}, {percent(gains[1])} % in {other}."]
    for side in SIDES:
        accepted = (a[side][1], b[side][1])
        same = f"both accept {accepted[0]:.3f}"
        told = same if equal[side] else f"{accepted[0]:.3f} and {accepted[1]:.3f}"
        lines.append(
            f"{cell}, {side}: {told} tokens a step; a step costs {costs[0][side]:.2f} ms in {one} "
            f"and {costs[1][side]:.2f} ms in {other}."
        )
    rises = [cost["candidate"] / cost["base"] for cost in costs]
    if all(equal.values()) and abs(rises[0] / rises[1] - 1) > OTHER_COST:
        more = a["candidate"][1] / a["base"][1]
        lines.append(
            f"{cell}: acceptance is equal in both, so they differ in step cost alone. The candidate's step gives "
            f"{more:.2f}x the tokens and costs {rises[0]:.2f}x in {one}, {rises[1]:.2f}x in {other}."
        )
    return lines
