"""What a person is told about speculation: a line at the start, one at the end, a table with --stats."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sparkinfer.cli.console import status
from sparkinfer.options import Options

if TYPE_CHECKING:
    from sparkinfer.bench.compare import Comparison
    from sparkinfer.engine import Engine, Result

_FEW = 8  # steps, of which one that was slow by chance decides the gain
_WORTH_NAMING = 1.01  # a gain below this is none


def announce(engine: "Engine", options: Options) -> None:
    """Say once whether tokens will be drafted, with which draft, and what that is expected to gain.

    Without a draft there is nothing to say before the closing line says it.
    """
    if engine.decoder.describe() is not None or options.optional_path("draft") is not None:
        status(f"speculation: {engine.speculation}")


def closing_words(result: "Result", start: str) -> str:
    """Return what speculation gained in an answer and why; `start` is what was said at the start."""
    report = result.speculation
    if report is None:
        return start if start.startswith("off") else "off (this request)"
    steps = sum(report.widths.values())
    if not steps:
        return "on, no step was left to draft for"
    share = f"drafts accepted {_percent(report.accepted, report.drafted)}"
    if steps < _FEW:
        return (
            f"on, {_tokens_a_step(result):.1f} tokens a step, too few steps to tell what that gains"
        )
    if 2 * report.widths.get(1, 0) > steps:
        why = share if report.drafted else "nothing was drafted"
        return f"on, but plain steps were faster here: {why}"
    if report.gain is None:
        return f"on, {_tokens_a_step(result):.1f} tokens a step, {share}"
    gain = f"{report.gain:.2f}x plain decoding (estimated"
    if report.gain < _WORTH_NAMING:
        return f"on, but it gained nothing here: {gain}; run --compare measures it), {share}"
    return f"on, {_tokens_a_step(result):.1f} tokens a step, {gain})"


def comparison_lines(comparison: "Comparison") -> Iterator[str]:
    """Yield both speeds, the ratio with its spread, and whether the outputs are the same."""
    rounds = len(comparison.plain)
    plain, ours = comparison.speed(False), comparison.speed(True)
    ratio, whole = comparison.ratio, comparison.whole_ratio
    if ratio is None:
        yield "compare: nothing was decoded after the first token"
    else:
        speeds = f"plain {plain:.1f} tok/s, speculative {ours:.1f} tok/s"
        steps = comparison.tokens_a_step
        tau = f", {steps:.2f} tokens a step" if steps is not None else ""
        yield f"compare: {speeds}, ratio {ratio.text()} in {rounds} rounds{tau}"
    if whole is not None:
        yield f"compare: prompt and answer together, ratio {whole.text()}"
    tokens = len(comparison.plain[0].tokens)
    if not comparison.compared:
        yield "compare: outputs not compared: rejection gives the same distribution, not the same tokens"
    elif comparison.agrees:
        yield f"compare: all {2 * rounds + 1} outputs are identical ({tokens} tokens)"
    else:
        yield f"compare: the outputs DIFFER from token {comparison.difference} on; please report it"


def show_stats(result: "Result") -> None:
    """Print the longer table on standard error: steps, parts, and all about speculation."""
    rows = list(stats(result))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        status(f"{name:<{width}}  {value}")


def stats(result: "Result") -> Iterator[tuple[str, str]]:
    """Yield the rows of the table: a name and what there is to say."""
    for path, count in result.paths.items():
        drafted = f", {count.accepted} of {count.drafted} drafts accepted" if count.drafted else ""
        row_count = f"{count.steps} steps, {count.rows} rows, {count.tokens} tokens"
        yield f"path {path}", row_count + drafted
    times = result.timings
    steps = sum(count.steps for count in result.paths.values())
    if steps:
        parts = ", ".join(f"{name} {1e3 * s / steps:.2f}" for name, s in times.parts.items())
        whole = 1e3 * (times.total_s - times.prefill_s) / steps
        yield "milliseconds a step", f"{whole:.2f} ({parts})"
    report = result.speculation
    if report is None:
        return
    yield "draft", report.draft
    yield "policy, acceptance", f"{report.policy}, {report.accept}"
    yield "tokens a step", f"{_tokens_a_step(result):.2f} ({report.tau:.2f} where it drafted)"
    yield "rows chosen", _counts(report.widths) or "none"
    if report.cuts:
        yield "windows cut", f"to {_counts(report.cuts)} rows, where the draft was not sure"
    slots = [f"{slot} {_percent(kept, seen)}" for slot, (seen, kept) in enumerate(report.slots, 1)]
    yield "acceptance by slot", ", ".join(slots) or "nothing drafted"
    for reason, times_refused in report.refusals.items():
        yield "refused", f"{reason} (x{times_refused})"
    yield "planner's last choice", report.why or "none"
    gain = "unknown" if report.gain is None else f"{report.gain:.2f}x"
    yield "against plain decoding", f"expected {report.expected:.2f}x, came out at {gain}"
    if report.gap_rows:
        yield "context gap", f"{report.gap_rows} tokens of the context are unknown to the draft"


def _tokens_a_step(result: "Result") -> float:
    from sparkinfer.bench.answers import decoding_steps, tokens_a_step

    return tokens_a_step(decoding_steps(result)) or 0.0


def _counts(counts: Any) -> str:
    return ", ".join(f"{key} x{count}" for key, count in counts.items())


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
