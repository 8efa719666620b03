"""The measuring program: the evaluator runs this file with the Python of each build's environment.

It belongs to the evaluator, not to what is measured: both sides get the same file, and it takes its own
times around public calls (`Engine.load`, `Engine.stream`, request options, results). It imports nothing of
the evaluator. Its orders come as one JSON file, its answers are JSON lines on standard output; whatever a
build prints goes to standard error. Exit codes: 0 done, 3 the build's interface lacks something (one line
says what), 4 out of memory, 1 any other error.
"""

import dataclasses
import gc
import importlib
import inspect
import json
import os
import resource
import sys
import traceback
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, TextIO

PROTOCOL = 1
EXIT_OLD, EXIT_MEMORY = 3, 4
MEMORY_CODE = 71  # `exit_code` of the engine's own out-of-memory error
_NEEDED = ("max_tokens", "temperature", "seed", "logprobs", "ignore_eos", "reuse_prefix")


class TooOldError(Exception):
    """The build lacks a part of the public interface that a measurement needs."""


class Lines:
    """Writes one event a line to what was standard output; prints of the build go to standard error."""

    def __init__(self) -> None:
        self._file: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}, default=str) + "\n")
        self._file.flush()


class Phases:
    """How long each part of loading took, by the labels of the build's own progress reports."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {}

    def __call__(self, label: str, _done: int, _total: int) -> None:
        now = perf_counter()
        self.seen.setdefault(label, [now, now])[1] = now

    def seconds(self) -> dict[str, float]:
        return {label: last - first for label, (first, last) in self.seen.items()}


def main(path: str) -> int:
    """Carry out the orders in the file and return the exit code."""
    lines = Lines()
    lines.write("hello", protocol=PROTOCOL, python=sys.version.split()[0], pid=os.getpid())
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123  (pathlib would be one more import)
            _carry_out(json.load(file), lines)
    except TooOldError as error:
        lines.write("refused", reason=str(error))
        return EXIT_OLD
    except Exception as error:
        traceback.print_exc()
        code = getattr(error, "exit_code", 1)
        full = isinstance(error, MemoryError) or code == MEMORY_CODE
        lines.write("error", type=type(error).__name__, message=str(error), code=code)
        return EXIT_MEMORY if full else 1
    return 0


def _carry_out(orders: Mapping[str, Any], lines: Lines) -> None:
    started = perf_counter()
    package = importlib.import_module("sparkinfer")
    engine_class = _engine_class(package)
    lines.write("imported", seconds=perf_counter() - started, file=str(package.__file__))
    arguments = _load_arguments(engine_class, orders)
    phases = Phases()
    if "progress" in inspect.signature(engine_class.load).parameters:
        arguments["progress"] = phases
    started = perf_counter()
    with engine_class.load(orders["model"], **arguments) as engine:
        seconds = perf_counter() - started
        lines.write("loaded", seconds=seconds, phases=phases.seconds(), **_facts(package, engine))
        if orders.get("drafting") and _speculation(engine).startswith("off"):
            raise TooOldError(f"speculation is {_speculation(engine)}; the scope needs a draft")
        said: dict[str, dict[str, Any]] = {}
        for order in orders["do"]:
            lines.write("start", id=order["id"])
            done = said[order["id"]] = _KINDS[order["kind"]](engine, _filled_in(order, said))
            lines.write("done", id=order["id"], **done)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    lines.write("bye", peak_rss=peak * 1024)


def _engine_class(package: Any) -> Any:
    """Return `sparkinfer.Engine`. Raises: TooOldError naming every part that is missing."""
    engine = getattr(package, "Engine", None)
    if engine is None:
        raise TooOldError("this build has no sparkinfer.Engine; the evaluator measures through it")
    missing = [name for name in ("load", "stream", "encode_chat") if not hasattr(engine, name)]
    if missing:
        raise TooOldError(f"this build's Engine lacks {', '.join(missing)}")
    return engine


def _load_arguments(engine_class: Any, orders: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `Engine.load` that are given; None leaves the build's own value."""
    known = inspect.signature(engine_class.load).parameters
    given = {name: value for name, value in orders["load"].items() if value is not None}
    unknown = [name for name in given if name not in known]
    if unknown:
        raise TooOldError(f"this build's Engine.load has no {', '.join(unknown)}")
    return given


def _facts(package: Any, engine: Any) -> dict[str, Any]:
    plan = getattr(engine, "plan", {})
    return {
        "version": str(getattr(package, "__version__", "")),
        "context": getattr(engine, "context", None),
        "speculation": _speculation(engine),
        "chat": getattr(engine, "template", None) is not None,
        "plan": json.loads(json.dumps(dict(plan), default=str)),
    }


def _speculation(engine: Any) -> str:
    return str(getattr(engine, "speculation", "off (this build cannot speculate)"))


def _filled_in(order: Mapping[str, Any], said: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the order with what it takes from earlier ones of the same process.

    `answer_of`: the tokens of that request. `prompt_of` [order, number, length]: of a text's tokens the first `length`.
    """
    filled = dict(order)
    if "answer_of" in order:
        filled["answer"] = said[order["answer_of"]]["tokens"]
    if "prompt_of" in order:
        name, number, length = order["prompt_of"]
        filled["prompt"] = said[name]["ids"][number][:length]
    return filled


def _encode(engine: Any, order: Mapping[str, Any]) -> dict[str, Any]:
    """Return token ids of texts: as the one message of a chat where asked for and there is a template."""
    ids = []
    for text in order["texts"]:
        if order["chat"] and engine.template is not None:
            ids.append(list(map(int, engine.encode_chat([{"role": "user", "content": text}]))))
        else:
            ids.append(list(map(int, engine.tokenizer.encode(text))))
    return {"ids": ids}


def _request(engine: Any, order: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one prompt and take the times: to the first piece, and from it to the end."""
    options = _options(engine, order["options"])
    gc.collect()
    started = perf_counter()
    running = engine.stream(order["prompt"], **options)
    first, in_first = 0.0, 0
    for piece in running:
        if not first:
            first, in_first = perf_counter(), len(piece.tokens)
    ended = perf_counter()
    result = running.result
    return {
        "first_s": first - started,
        "decode_s": ended - first,
        "total_s": ended - started,
        "in_first": in_first,
        "tokens": list(map(int, result.tokens)),
        "text": result.text,
        "finish": str(result.finish_reason),
        "logprobs": [_logprob(item) for item in result.logprobs],
        "paths": {name: dataclasses.asdict(count) for name, count in result.paths.items()},
        "parts": dict(getattr(result.timings, "parts", {})),
        "report": _report(result),
    }


def _teach(engine: Any, order: Mapping[str, Any]) -> dict[str, Any]:
    """Return the best log-probabilities after each prefix of a given answer, whatever the build would say.

    The prefixes have 0 to `count` - 1 tokens of the answer, fewer where it is shorter.
    """
    prompt, answer, rows = order["prompt"], order["answer"], []
    options = _options(engine, {**order["options"], "max_tokens": 1, "reuse_prefix": True})
    for place in range(min(order["count"], len(answer))):
        result = engine.stream([*prompt, *answer[:place]], **options).result
        rows.append(_logprob(result.logprobs[0]))
    return {"rows": rows}


def _options(engine: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request's options as this build knows them. Raises: TooOldError for a missing one."""
    fields = _known_options(engine)
    options = dict(wanted)
    if "speculate" not in fields and not options.get("speculate"):
        options.pop("speculate", None)  # without drafts every answer is a plain one
    missing = [name for name in options if name not in fields]
    if missing:
        raise TooOldError(f"this build's requests have no {', '.join(missing)}")
    return options


def _known_options(engine: Any) -> set[str]:
    hints = inspect.signature(type(engine).stream).parameters.get("options")
    module = importlib.import_module("sparkinfer")
    names = {item.name for item in dataclasses.fields(module.Request)}
    names |= {item.name for item in dataclasses.fields(module.SamplingParams)}
    if hints is None or not names.issuperset(_NEEDED):
        lacking = ", ".join(sorted(set(_NEEDED) - names)) or "keyword options"
        raise TooOldError(f"this build's requests have no {lacking}")
    return names


def _logprob(item: Any) -> list[Any]:
    """Return [token, log-probability, [[token, log-probability], ...]], best first."""
    top = [[int(token), float(value)] for token, value in item.top]
    return [int(item.token), float(item.logprob), top]


def _report(result: Any) -> dict[str, Any] | None:
    """Return what the build says about speculation in this answer, None for a plain one."""
    report = getattr(result, "speculation", None)
    if report is None:
        return None
    names = ("steps", "drafted", "accepted", "slots", "widths", "refusals", "why", "expected")
    found = {name: getattr(report, name) for name in (*names, "gain") if hasattr(report, name)}
    values: dict[str, Any] = json.loads(json.dumps(found, default=_plain))
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) else str(value)


_KINDS = {"encode": _encode, "request": _request, "teach": _teach}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
