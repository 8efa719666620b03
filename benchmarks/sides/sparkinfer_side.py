"""Our engine as a side.

Settings: `model` (path), `threads`, `context`, `activations` ("int8" or "f32").
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from contextlib import closing
from importlib.metadata import version
from typing import Any

import numpy as np
from protocol import Reply, run_side
from speculation import Speculation

import sparkinfer
from sparkinfer.chat import ChatTemplate
from sparkinfer.decoding import best_rows, picked
from sparkinfer.gguf import open_gguf
from sparkinfer.models import load_target
from sparkinfer.state import Sequence, Snapshot
from sparkinfer.tokenizer import Tokenizer


class SparkInfer:
    """One target; a state at a depth is computed once and restored from its snapshot.

    A snapshot shares the sequence's cache rows, so every context has a sequence of its own.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        start = time.perf_counter()
        self.file = open_gguf(settings["model"])
        self.context = int(settings["context"])
        self.target = load_target(
            self.file,
            context=self.context,
            threads=settings["threads"],
            activations=settings.get("activations", "int8"),
        )
        self.states: dict[tuple[int, ...], tuple[Sequence, Snapshot]] = {}
        self.speculation: dict[tuple[str | None, float | None], Speculation] = {}
        self.load_s = time.perf_counter() - start

    def info(self) -> Reply:
        return {
            "engine": "sparkinfer",
            "versions": {
                "sparkinfer": sparkinfer.__version__,
                "numba": version("numba"),
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            "plan": self.target.plan,
            "n_vocab": self.target.config.n_vocab,
            "weight_bytes_per_token": self.target.weight_bytes_per_token,
            "load_s": self.load_s,
        }

    def _at(self, context: list[int]) -> Sequence:
        """A state at the end of `context`; computed once, then restored."""
        key = tuple(context)
        if key not in self.states:
            state = self.target.new_state(self.context)
            if context:
                self.target.forward(state, context, rows="none")
            self.states[key] = state, state.snapshot()
        state, snapshot = self.states[key]
        state.restore(snapshot)
        return state

    def prompt(self, tokens: list[int]) -> Reply:
        state = self._at([])
        start = time.perf_counter()
        best = int(picked(self.target, self.target.forward(state, tokens, rows="last"))[0].argmax())
        return {"seconds": time.perf_counter() - start, "argmax": best}

    def decode(self, context: list[int], tokens: list[int]) -> Reply:
        state = self._at(context)
        best = []
        start = time.perf_counter()
        for token in tokens:
            best.append(int(best_rows(self.target, state, [token])[0].argmax()))
        return {"seconds": time.perf_counter() - start, "argmax": best}

    def speculate(
        self, context: list[int], tokens: list[int], draft: str | None, tokens_a_step: float | None
    ) -> Reply:
        """Decode the known answer `tokens` to the prompt `context` with a draft (see `speculation.py`)."""
        key = (draft, tokens_a_step)
        if key not in self.speculation:
            self.speculation[key] = Speculation(self.target, draft, tokens_a_step)
        return self.speculation[key].run(context, tokens)

    def rows(self, context: list[int], tokens: list[int], repeats: int) -> Reply:
        seconds = []
        for _ in range(repeats):
            state = self._at(context)
            start = time.perf_counter()
            logits = self.target.forward(state, tokens, rows="all", verify=True)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "argmax": logits.argmax(axis=1).tolist()}

    def greedy(self, tokens: list[int], count: int) -> Reply:
        state = self._at([])
        found: list[int] = []
        margins: list[float] = []
        row = self.target.forward(state, tokens)[0]
        while True:
            second, first = np.partition(row, -2)[-2:]
            found.append(int(row.argmax()))
            margins.append(float(first - second))
            if len(found) == count:
                return {"tokens": found, "margins": margins}
            row = self.target.forward(state, found[-1:])[0]

    def logits(self, tokens: list[int], path: str) -> Reply:
        state = self._at([])
        np.save(path, self.target.forward(state, tokens, rows="all"))
        return {"rows": len(tokens)}

    def tokenize(self, text: str) -> Reply:
        tokenizer = Tokenizer.from_gguf(self.file)
        return {"tokens": tokenizer.encode(text, parse_special=True)}

    def chat(self, text: str) -> Reply:
        """Prompt tokens of one user message, and the tokens that end an answer."""
        tokenizer = Tokenizer.from_gguf(self.file)
        with closing(ChatTemplate.from_gguf(self.file, tokenizer)) as template:
            tokens = template.encode([{"role": "user", "content": text}])
        return {"tokens": tokens, "stop_ids": sorted(tokenizer.stop_ids)}


if __name__ == "__main__":
    run_side(SparkInfer)
