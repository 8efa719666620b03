"""Request-level sampling parameters: one frozen type, every field checked with one clear line."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from sparkinfer.errors import RequestError

MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BIAS = 100.0
MIN_TEMPERATURE = 1e-6  # below this float32 logits divided by it lose their meaning
_INT31 = 2**31 - 1


class Range(NamedTuple):
    """Inclusive bounds of one numeric field; `integer` says whether fractions are refused."""

    low: float
    high: float
    integer: bool = False


RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "temperature": Range(0.0, 100.0),
        "top_k": Range(0, _INT31, integer=True),
        "top_p": Range(0.0, 1.0),
        "min_p": Range(0.0, 1.0),
        "repetition_penalty": Range(0.01, 100.0),
        "presence_penalty": Range(-2.0, 2.0),
        "frequency_penalty": Range(-2.0, 2.0),
        "min_tokens": Range(0, _INT31, integer=True),
        "seed": Range(0, 2**64 - 1, integer=True),
        "logprobs": Range(0, MAX_LOGPROBS, integer=True),
    }
)
_OPTIONAL = frozenset({"seed", "logprobs"})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from a row of logits.

    The transforms run in this order, each on the result of the one before:

    1. ids beyond the tokenizer's vocabulary (padding rows of the model) are cut off;
    2. `repetition_penalty` over prompt and output: a positive logit is divided, others multiplied;
    3. `presence_penalty` (once) and `frequency_penalty` (times the count) over the output only;
    4. `logit_bias` is added;
    5. while fewer than `min_tokens` tokens exist, the ids that would end the output are banned;
    6. `temperature` 0 takes the largest logit (lowest id on a tie) and ends here; else divides;
    7. `top_k` keeps the k largest (lowest ids on a tie); 0 keeps all;
    8. `top_p` keeps the smallest set of largest probabilities whose sum reaches it; 1 keeps all;
    9. `min_p` keeps what has at least `min_p` times the largest probability; 0 keeps all;
    10. what is left is renormalised and drawn from with a number keyed by (seed, position).

    `logprobs` asks for the log-probability of the chosen token and of that many best alternatives,
    always of the model's own distribution (after step 1 only), so they do not depend on the rest.
    A `seed` of None lets the engine draw one and report it.

    Raises: RequestError naming the field, its value and the accepted range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, bounds in RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            object.__setattr__(self, name, checked_number(name, value, bounds))
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            accepted = f"0 (greedy) or a number from {MIN_TEMPERATURE:g} to 100"
            raise RequestError(f"temperature must be {accepted}, not {self.temperature}")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """True when the largest logit is taken and no randomness is used."""
        return self.temperature == 0.0

    @property
    def adjusts(self) -> bool:
        """True when penalties or biases change the logits before the choice."""
        neutral = self.repetition_penalty == 1.0 and not self.logit_bias
        return not (neutral and self.presence_penalty == 0.0 and self.frequency_penalty == 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values of all fields, for records and JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return values | {"logit_bias": dict(self.logit_bias)}


def checked_number(name: str, value: object, bounds: Range) -> int | float:
    """The value as int or float if it lies within its bounds.

    Raises: RequestError naming the field, the value and the bounds.
    """
    kind = "an integer" if bounds.integer else "a number"
    accepted = f"{kind} from {bounds.low:g} to {bounds.high:g}"
    if bounds.integer:
        accepted = f"{kind} from {int(bounds.low)} to {int(bounds.high)}"
    if isinstance(value, int) and not isinstance(value, bool):
        if bounds.low <= value <= bounds.high:
            return value if bounds.integer else float(value)
    elif isinstance(value, float) and not bounds.integer and bounds.low <= value <= bounds.high:
        return value  # a NaN fails both comparisons
    raise RequestError(f"{name} must be {accepted}, not {short(value)}")


def _checked_bias(bias: object) -> Mapping[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, not {short(bias)}")
    if len(bias) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(bias)} entries; at most {MAX_BIASES} are accepted")
    checked: dict[int, float] = {}
    for token, value in bias.items():
        key = checked_number("logit_bias token id", token, Range(0, _INT31, integer=True))
        bounds = Range(-MAX_BIAS, MAX_BIAS)
        checked[int(key)] = float(checked_number(f"logit_bias[{token}]", value, bounds))
    return MappingProxyType(checked)


def short(value: object) -> str:
    """A value for an error line, at most 40 characters."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = repr(value[:40]) if isinstance(value, str | bytes) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
