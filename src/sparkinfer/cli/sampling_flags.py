"""The flags of a request: sampling, length and stops, under llama.cpp's names where it has one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkinfer.cli.flags import Flag
from sparkinfer.errors import OptionError

if TYPE_CHECKING:
    from sparkinfer.sampling import SamplingParams

_PANEL = "Sampling"
DEFAULT_TOKENS = 512


def _flag(name: str, kind: Any, default: Any, flags: tuple[str, ...], words: str) -> Flag:
    return Flag(name, kind, default, flags, words, _PANEL)


_SAMPLING = (
    _flag("temperature", float, 0.0, ("--temp", "--temperature"), "0 takes the likeliest token."),
    _flag("top_k", int, 0, ("--top-k",), "Keep the k likeliest tokens; 0 keeps all."),
    _flag(
        "top_p", float, 1.0, ("--top-p",), "Keep the likeliest tokens up to this sum; 1 keeps all."
    ),
    _flag(
        "min_p",
        float,
        0.0,
        ("--min-p",),
        "Keep tokens with this share of the likeliest; 0 keeps all.",
    ),
    _flag(
        "repetition_penalty",
        float,
        1.0,
        ("--repeat-penalty",),
        "Over prompt and answer; 1 is none.",
    ),
    _flag(
        "presence_penalty",
        float,
        0.0,
        ("--presence-penalty",),
        "For a token already in the answer.",
    ),
    _flag("frequency_penalty", float, 0.0, ("--frequency-penalty",), "For each time it is there."),
    _flag(
        "seed",
        int | None,
        None,
        ("-s", "--seed"),
        "Same seed, same answer; without one, or with -1, one is drawn.",
    ),
    _flag("logprobs", int | None, None, ("--logprobs",), "Log-probabilities of N alternatives."),
)
_LENGTH = (
    _flag(
        "max_tokens",
        int,
        DEFAULT_TOKENS,
        ("-n", "--predict", "--n-predict"),
        "Tokens at most; -1 goes on until the context is full.",
    ),
    _flag(
        "stop",
        list[str],
        [],
        ("--stop", "-r", "--reverse-prompt"),
        "End before this text; repeatable.",
    ),
)


@dataclass(frozen=True, slots=True)
class RequestParts:
    """What the flags ask of one request; `max_tokens` None goes on until the context is full."""

    sampling: "SamplingParams"
    max_tokens: int | None
    stop: tuple[str, ...]


class RequestFlags:
    """The flag group; argument `request`."""

    argument = "request"
    flags = _SAMPLING + _LENGTH

    def collect(self, values: dict[str, Any]) -> object:
        from sparkinfer.engine.request import Request
        from sparkinfer.sampling import SamplingParams

        count, stop = values.pop("max_tokens"), tuple(values.pop("stop"))
        if count < -1:
            accepted = "a whole number, or -1 until the context is full"
            raise OptionError(f"-n {count} is not accepted; expected {accepted}")
        max_tokens = None if count == -1 else count
        if values["seed"] == -1:
            values["seed"] = None
        sampling = SamplingParams(**values)
        Request(
            (0,), sampling, max_tokens, stop
        )  # what is wrong with them is said before a model is loaded
        return RequestParts(sampling, max_tokens, stop)
