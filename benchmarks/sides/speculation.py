"""Decoding a known answer with a draft, as the product does it: planner, verify paths, commit.

`tokens_a_step` replaces what the draft says by a script that is right for that many tokens a step on
average (the target's own one included); the draft's network, if one is given, still runs.
"""

from __future__ import annotations

import time
from typing import Any

from sparkinfer.dflash.base import Draft
from sparkinfer.dflash.build import build_decoder
from sparkinfer.dflash.draft import load_draft
from sparkinfer.dflash.scripted import ScriptedDraft, acceptance_script
from sparkinfer.models import Target
from sparkinfer.options import resolve
from sparkinfer.sampling import Sampler, SamplingParams, TokenHistory


class Speculation:
    """One decoder over one draft; what its planner learns stays, as in a running process."""

    def __init__(self, target: Target, draft: str | None, tokens_a_step: float | None) -> None:
        self.target = target
        chosen: Draft | None = load_draft(draft, target) if draft else None
        self.script: ScriptedDraft | None = None
        if tokens_a_step is not None:
            n_vocab = target.config.n_vocab
            self.script = ScriptedDraft([], [0], n_vocab, inner=chosen)
            self.script.script = acceptance_script(tokens_a_step - 1, self.script.max_depth)
            chosen = self.script
        assert chosen is not None, "a draft or a script is needed"
        self.decoder = build_decoder(target, chosen, resolve({}))
        self.state = target.new_state()

    def run(self, context: list[int], tokens: list[int]) -> dict[str, Any]:
        """Greedy output after `context`, as many tokens as given; the prompt is not timed."""
        if self.script is not None:
            self.script.recording, self.script.step = [*context, *tokens], 0
        self.state.rewind(self.state.length)
        history = TokenHistory(context)
        sampler = Sampler(SamplingParams(), self.target.config.n_vocab, seed=0)
        self.decoder.begin(self.state, context, sampler, history)
        found: list[int] = []
        start = time.perf_counter()
        while len(found) < len(tokens):
            step = self.decoder.step(len(tokens) - len(found))
            kept = min(len(step.tokens), len(tokens) - len(found))
            self.decoder.commit(kept)
            found += step.tokens[:kept]
        seconds = time.perf_counter() - start
        self.target.set_taps(())
        report = self.decoder.report()
        steps = sum(report.widths.values())
        return {
            "seconds": seconds,
            "argmax": found,
            "tokens_a_step": (len(tokens) - 1) / steps if steps else None,
            "widths": {str(width): count for width, count in report.widths.items()},
            "why": report.why,
        }
