"""A stand-in for the measuring program: the same orders and events, made-up times. Run as a script.

The environment says how the side behaves: FAKE_SPEED multiplies its rates, FAKE_MODE makes it misbehave.
Times are so small that no clock disbelieves them.
"""

import json
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

SPEED = float(os.environ.get("FAKE_SPEED", "1"))
MODE = os.environ.get("FAKE_MODE", "")
NOISE = float(os.environ.get("FAKE_NOISE", "0.002"))
MARK = Path(os.environ.get("FAKE_MARK", "/nonexistent"))  # a file: what already happened once
EOS = 2


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def encode(text: str) -> list[int]:
    return [3 + sum(map(ord, word)) % 300 for word in text.split()]


def tokens_of(prompt: list[int], count: int) -> list[int]:
    if MODE == "loop":
        return [7] * count
    draw = random.Random(str(prompt))
    tokens = [draw.randrange(3, 303) for _ in range(count)]
    if MODE == "other":
        tokens[1] = 1
    return tokens


def rows_of(tokens: list[int], top: int) -> list[list[Any]]:
    shift = 0.3 if MODE == "shifted" else 0.0
    others = [[304 + place, -3.0 - 0.2 * place - shift] for place in range(max(0, top - 1))]
    return [[token, -0.4 + shift, [[token, -0.4 + shift], *others]] for token in tokens]


def request(order: dict[str, Any]) -> dict[str, Any]:
    options, prompt = order["options"], order["prompt"]
    count = options["max_tokens"]
    rate = (
        4000 * SPEED * (1.5 if options["speculate"] else 1.0) * math.exp(random.gauss(0.0, NOISE))
    )
    rate *= 100 if "logprobs" in options else 1  # checked, not timed
    tokens = tokens_of(prompt, count)
    if MODE == "lossy" and options["speculate"]:
        tokens = [*tokens[:-1], 5]
    steps = count - 1
    path = "window/graph" if options["speculate"] else "ar/graph"
    first, decode = len(prompt) / (40000 * SPEED), steps / rate
    logprobs = rows_of(tokens, options["logprobs"]) if "logprobs" in options else []
    count_of = {"steps": steps, "rows": steps, "tokens": steps, "drafted": 0, "accepted": 0}
    return {
        "first_s": first,
        "decode_s": decode,
        "total_s": 100.0 if MODE == "clock" else first + decode,
        "in_first": 1,
        "tokens": tokens,
        "text": " ".join(map(str, tokens)),
        "finish": "length",
        "logprobs": logprobs,
        "paths": {"prefill": {**count_of, "steps": 1}, path: count_of},
        "parts": {"target": 0.8 * decode, "sample": 0.1 * decode},
        "report": None,
    }


def misbehave() -> None:
    global SPEED
    if MODE == "stumbles":  # the second process is four times as fast
        done = int(MARK.read_text()) if MARK.exists() else 0
        MARK.write_text(str(done + 1))
        SPEED *= 4 if done == 1 else 1
    if MODE == "old":
        say("refused", reason="this build's requests have no speculate")
        sys.exit(3)
    if MODE == "memory":
        say("error", type="MemoryLimitError", message="the model needs 9 GiB", code=71)
        sys.exit(4)
    if MODE == "hang":
        time.sleep(60)
    if MODE == "garbage":
        print("hello from a build", flush=True)
    if MODE == "silent":
        sys.exit(0)
    if MODE in ("crash", "crash once") and not MARK.exists():
        if MODE == "crash once":
            MARK.touch()
        print("Segmentation fault in a kernel", file=sys.stderr)
        sys.exit(9)


def main() -> None:
    orders = json.loads(Path(sys.argv[1]).read_text())
    say("hello", protocol=1, python="3", pid=os.getpid())
    say("imported", seconds=0.01, file="fake")
    misbehave()
    phases = {"compile": 0.2}
    say("loaded", seconds=0.5, phases=phases, version="1", context=64, speculation="on", plan={})
    answers: dict[str, list[int]] = {}
    encoded: dict[str, list[list[int]]] = {}
    for order in orders["do"]:
        say("start", id=order["id"])
        if "prompt_of" in order:
            name, number, length = order["prompt_of"]
            order["prompt"] = encoded[name][number][:length]
        if order["kind"] == "encode":
            encoded[order["id"]] = [encode(text) for text in order["texts"]]
            done: dict[str, Any] = {"ids": encoded[order["id"]]}
        elif order["kind"] == "teach":
            answer = answers[order["answer_of"]] if "answer_of" in order else order["answer"]
            done = {"rows": rows_of(answer[: order["count"]], order["options"]["logprobs"])}
        else:
            done = request(order)
            answers[order["id"]] = done["tokens"]
        say("done", id=order["id"], **done)
    say("bye", peak_rss=1 << 20)


if __name__ == "__main__":
    main()
