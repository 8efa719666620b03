"""One command at a time over a pipe: what every side of a comparison speaks.

A side is a process of its own Python environment. It reads one JSON object per line from standard
input, answers with one JSON object per line, and sleeps in `readline` in between, so a side that
is not being measured uses no processor time. Standard library only: each side's Python imports it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

Reply = dict[str, Any]


class Side(Protocol):
    """What a side can do; times are seconds of the side's own monotonic clock."""

    def info(self) -> Reply:
        """Name, versions, plan, `n_vocab`, `weight_bytes_per_token` (None if unknown)."""

    def prompt(self, tokens: list[int]) -> Reply:
        """Read a prompt from an empty state: `seconds`, `argmax` (one id, of the last row)."""

    def decode(self, context: list[int], tokens: list[int]) -> Reply:
        """Feed `tokens` one by one after `context` (untimed): `seconds`, `argmax` of each row."""

    def speculate(
        self, context: list[int], tokens: list[int], draft: str | None, tokens_a_step: float | None
    ) -> Reply:
        """The known greedy answer `tokens` after the prompt `context`, drafting if the side can: as `decode`."""

    def rows(self, context: list[int], tokens: list[int], repeats: int) -> Reply:
        """One forward of all `tokens` after `context`, every row's logits: `seconds` (a list)."""

    def greedy(self, tokens: list[int], count: int) -> Reply:
        """Greedy continuation: `tokens` and the top-2 logit `margins` at each of them."""

    def logits(self, tokens: list[int], path: str) -> Reply:
        """Write float32 [len(tokens), n_vocab] logits of every position to a .npy file."""

    def tokenize(self, text: str) -> Reply:
        """Ids of a text in which special tokens are parsed: `tokens`."""


def private_stdout() -> TextIO:
    """Keep the pipe for replies: whatever else prints to standard output goes to stderr."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return pipe


def peak_rss_bytes() -> int:
    """Peak resident set in bytes. Not ru_maxrss, which keeps the parent's size through exec."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def serve(side: Side, pipe: TextIO) -> None:
    """Answer commands until standard input closes or `quit` arrives."""
    for line in sys.stdin:
        command = json.loads(line)
        op = command.pop("op")
        if op == "quit":
            return
        try:
            reply = getattr(side, op)(**command)
            reply["peak_rss"] = peak_rss_bytes()
        except Exception as error:  # reported to the driver, which stops
            reply = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        pipe.write(json.dumps(reply) + "\n")
        pipe.flush()


def run_side(make: Callable[[Mapping[str, Any]], Side]) -> None:
    """Entry point of a side: `side.py '{"model": ..., "threads": ...}'`.

    With `"once": text` in the settings the process answers one line at its first token and ends;
    otherwise it serves commands.
    """
    start = time.perf_counter()
    settings = json.loads(sys.argv[1])
    pipe = private_stdout()
    side = make(settings)
    loaded = time.perf_counter()
    if "once" not in settings:
        serve(side, pipe)
        return
    tokens = side.tokenize(settings["once"])["tokens"]
    first = side.prompt(tokens)["argmax"]
    done = time.perf_counter()
    reply = {
        "token": first,
        "prompt_tokens": len(tokens),
        "import_and_load_s": loaded - start,
        "prompt_s": done - loaded,
        "peak_rss": peak_rss_bytes(),
    }
    pipe.write(json.dumps(reply) + "\n")
    pipe.flush()
