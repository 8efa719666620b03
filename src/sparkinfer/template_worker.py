"""The process in which chat templates run: they are code from a model file, so they get no trust.

Run by path, not imported: `python -I -S template_worker.py <memory bytes> <cpu seconds> <path>...`.
It writes an empty answer when it is ready, then reads frames from standard input and answers each
on standard output. A frame is 8 bytes of length (little-endian) and that much JSON.
Request: {"template", "variables", "limit"}; answer: {"text"} or {"error", "message"} with error one
of syntax, forbidden, raised, failed, output, memory.
"""

import json
import os
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO, NoReturn


class OutputLimitError(Exception):
    """The rendered text is longer than asked for."""


class RaisedError(Exception):
    """The template refused its input through raise_exception()."""


def main() -> None:
    """Serve until the other side closes the pipe."""
    memory, cpu_seconds = int(sys.argv[1]), int(sys.argv[2])
    sys.path[:0] = sys.argv[3:]
    _compiled(
        ""
    )  # imports before limits, so that a failure to start is not taken for a bad template
    _limit_resources(memory)
    _write({})  # ready
    while (request := _read(sys.stdin.buffer)) is not None:
        _limit_cpu(cpu_seconds)
        _write(_answer(request))


def _write(answer: dict[str, str]) -> None:
    frame = json.dumps(answer).encode("ascii")
    sys.stdout.buffer.write(len(frame).to_bytes(8, "little") + frame)
    sys.stdout.buffer.flush()


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(8)
    if len(head) < 8:
        return None
    request: dict[str, Any] = json.loads(stream.read(int.from_bytes(head, "little")))
    return request


def _answer(request: dict[str, Any]) -> dict[str, str]:
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.exceptions import SecurityError

    kinds: tuple[tuple[type[BaseException], str], ...] = (
        (OutputLimitError, "output"),
        (RaisedError, "raised"),
        (TemplateSyntaxError, "syntax"),
        (SecurityError, "forbidden"),
        (TemplateError, "failed"),
        (MemoryError, "memory"),
    )
    try:
        return {"text": _render(**request)}
    except Exception as error:  # whatever the template provokes belongs to the answer
        kind = next((name for cls, name in kinds if isinstance(error, cls)), "failed")
        where = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        name = (
            "" if isinstance(error, (TemplateError, RaisedError)) else type(error).__name__ + ": "
        )
        return {"error": kind, "message": where + name + str(error)[:1000]}


def _render(template: str, variables: dict[str, Any], limit: int) -> str:
    parts = []
    for part in _compiled(template).generate(variables):
        parts.append(part)
        limit -= len(part)
        if limit < 0:
            raise OutputLimitError("the text is too long")
    return "".join(parts)


@lru_cache(maxsize=4)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> Any:
    """The sandbox, with the helpers that Hugging Face templates expect."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}` marks text for training and renders it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    raise RaisedError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _limit_resources(memory: int) -> None:
    """No more than `memory` bytes of address space, no file written, no core dump."""
    if sys.platform == "win32":
        return
    import resource

    for what, value in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (value, value))
    if sys.platform != "darwin":  # macOS does not take this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _limit_cpu(seconds: int) -> None:
    """End this process if the coming request uses more than about `seconds` of processor time.

    The other side's clock ends it earlier; this one holds when the other side is gone.
    """
    if sys.platform == "win32":
        return
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime) + seconds + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the other side is gone; nobody is to be told
        os._exit(0)
