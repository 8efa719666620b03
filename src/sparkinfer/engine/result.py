"""What a generation returns: pieces while it runs, one Result at its end."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sparkinfer.decoding import SpeculationReport, StepResult
from sparkinfer.sampling import TokenLogprob

FinishReason = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added. `text` may be empty while a character or a stop string is open."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What ended the output: a token id, a stop string, or a stop string that is one token."""

    token: int | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; `cached_tokens` of the prompt were still in the engine's state."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent inside the engine (a caller's own work between two pieces is not counted).

    `prefill_tokens` were computed in `prefill_s`; `ttft_s` runs from the start of the request to
    its first token; `decode_tokens` came after the first step, in `decode_s`. `parts` splits the
    time of all steps ("target", "sample", ...).
    """

    load_s: float = 0.0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0
    total_s: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens a second, 0.0 if none was computed."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Output tokens a second after the first step, 0.0 if there was none."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first step (TPOT), 0.0 if there was none."""
        return self.decode_s / self.decode_tokens if self.decode_tokens else 0.0


@dataclass(slots=True)
class PathCount:
    """Steps that took one path in one mode, and what they did."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, step: StepResult, kept: int) -> None:
        """Count one step of which `kept` tokens became output."""
        self.steps += 1
        self.rows += step.rows
        self.tokens += kept
        self.drafted += step.drafted
        self.accepted += step.accepted


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation.

    `tokens` ends with the token that completed the stop, so `text` is the decoded tokens cut
    before a stop string and without a stop id; `logprobs` match `tokens` one to one, or are empty
    when none were asked for. `seed` is the one that was used. `paths` counts steps by path,
    "path" or "path/mode". `speculation` is None for plain decoding.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop: StopMatch | None
    usage: Usage
    timings: Timings
    paths: Mapping[str, PathCount]
    seed: int
    speculation: SpeculationReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, derived rates included."""
        values = asdict(self)
        values["usage"]["total_tokens"] = self.usage.total_tokens
        for name in ("prefill_tok_s", "decode_tok_s", "tpot_s"):
            values["timings"][name] = getattr(self.timings, name)
        if self.speculation is not None:
            values["speculation"]["tau"] = self.speculation.tau
        return values
