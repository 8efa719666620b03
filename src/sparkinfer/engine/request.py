"""What one generation is asked for, checked before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from operator import index
from typing import Any, TypedDict

from sparkinfer.errors import RequestError
from sparkinfer.sampling import SamplingParams
from sparkinfer.sampling.params import Range, checked_number, short

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
_COUNT_RANGE = Range(0, 2**63 - 1, integer=True)


@dataclass(frozen=True, slots=True)
class Request:
    """One generation from token ids.

    `max_tokens` None runs until the context is full. `stop` strings end the text before them,
    `stop_ids` are added to the model's own end-of-generation ids, which `ignore_eos` (benchmarks)
    switches off. `reuse_prefix` False computes the whole prompt again even if the engine still
    holds a part of it. `speculate` False decodes plainly although the engine has a draft.

    Raises: RequestError naming the field, the value and what is accepted.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    reuse_prefix: bool = True
    speculate: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", _token_ids("the prompt", self.prompt))
        if not self.prompt:
            raise RequestError("the prompt has no tokens; at least one is needed")
        if self.max_tokens is not None:
            checked_number("max_tokens", self.max_tokens, _COUNT_RANGE)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_ids", _token_ids("stop_ids", self.stop_ids))
        _check_count("stop_ids", len(self.stop_ids), MAX_STOP_IDS)
        for name in ("ignore_eos", "reuse_prefix", "speculate"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} must be true or false, not {short(getattr(self, name))}"
                )


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(f"{name} has {count} entries; at most {most} are accepted")


def _token_ids(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    """The ids as plain ints >= 0; anything that is an integer, such as NumPy's, is accepted."""
    try:
        plain = tuple(map(index, ids))
    except TypeError as error:
        raise RequestError(f"{name} must be a list of token ids: {error}") from error
    if plain and min(plain) < 0:
        raise RequestError(f"{name} has token id {min(plain)}; ids start at 0")
    return plain


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(stop, str | list | tuple):
        raise RequestError(f"stop must be a string or a list of strings, not {short(stop)}")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    _check_count("stop", len(stops), MAX_STOPS)
    for text in stops:
        if not isinstance(text, str):
            raise RequestError(f"a stop string must be text, not {short(text)}")
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            accepted = f"1 to {MAX_STOP_CHARS} characters"
            raise RequestError(f"a stop string must have {accepted}, not {len(text)}")
    return stops


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `Engine.generate` and its relatives; see Request and SamplingParams."""

    sampling: SamplingParams
    max_tokens: int | None
    stop: str | Sequence[str]
    stop_ids: Sequence[int]
    ignore_eos: bool
    reuse_prefix: bool
    speculate: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    seed: int | None
    logprobs: int | None


_SAMPLING_NAMES = frozenset(item.name for item in fields(SamplingParams))


def build_request(prompt: Sequence[int], options: Mapping[str, Any]) -> Request:
    """A Request from a prompt and the keyword arguments of a call.

    Single sampling fields replace those of `sampling`.

    Raises: RequestError for an unknown name (with the nearest known one) or a bad value.
    """
    for name in options:
        if name not in RequestOptions.__annotations__:
            raise RequestError(_unknown(name))
    base = options.get("sampling", None)
    if base is not None and not isinstance(base, SamplingParams):
        raise RequestError(f"sampling must be a SamplingParams, not {short(base)}")
    values = base.to_dict() if base else {}
    values |= {name: options[name] for name in options if name in _SAMPLING_NAMES}
    return Request(
        prompt=_token_ids("the prompt", prompt),
        sampling=SamplingParams(**values),
        max_tokens=options.get("max_tokens"),
        stop=options.get("stop", ()),
        stop_ids=options.get("stop_ids", ()),
        ignore_eos=options.get("ignore_eos", False),
        reuse_prefix=options.get("reuse_prefix", True),
        speculate=options.get("speculate", True),
    )


def _unknown(name: str) -> str:
    near = get_close_matches(name, RequestOptions.__annotations__, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown request option {name}{hint}"
