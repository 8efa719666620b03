"""The engine: requests in, text out, over any decoder."""

from sparkinfer.engine.conversation import Conversation
from sparkinfer.engine.engine import Engine
from sparkinfer.engine.generation import Generation, cancel_on_interrupt
from sparkinfer.engine.request import Request, RequestOptions
from sparkinfer.engine.result import (
    Delta,
    FinishReason,
    PathCount,
    Result,
    StopMatch,
    Timings,
    Usage,
)

__all__ = [
    "Conversation",
    "Delta",
    "Engine",
    "FinishReason",
    "Generation",
    "PathCount",
    "Request",
    "RequestOptions",
    "Result",
    "StopMatch",
    "Timings",
    "Usage",
    "cancel_on_interrupt",
]
