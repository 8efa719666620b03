"""What a recording for a GPU is made of: launches, copies, and what holds its two lanes together.

A recording stays a list in an order that is right when all of it runs one after the other. What was recorded aside
belongs to the second lane, which fills multiprocessors that the first one leaves idle: in a graph it starts when all
that stands before its `Fork` is done and runs in order; `Join` makes the first lane wait for a `Mark` of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# Kernels that take the compiler longest, those with the most warps first: one that began last would be waited for.
_LONGEST = (
    "left_out_kernel", "left_hidden_kernel", "wide_kernel", "few_out_kernel", "chunk_kernel", "core_kernel",
    "few_hidden_kernel", "normed_router_gated_kernel", "split_kernel", "result_kernel",
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One kernel over a grid. `options` are its constexpr arguments, num_warps and num_stages; `aside`: of the second
    lane.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]
    aside: bool = field(default=False, kw_only=True)

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)

    @property
    def variant(self) -> tuple[Any, ...]:
        """Equal for launches that share machine code (it may tell more apart than the compiler does)."""
        pairs = zip(self.kernel.params, self.args, strict=False)
        return (
            self.kernel.fn,
            *(_kind(value, param.do_not_specialize) for param, value in pairs),
            *sorted(self.options.items()),
        )

    def turn(self) -> tuple[int, int]:
        """Smaller for what is to be compiled earlier."""
        name = self.kernel.fn.__name__
        place = _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)
        return place, -self.options["num_warps"]

    def compile(self) -> Any:
        """Compile without loading or running."""
        return self.kernel.warmup(*self.args, grid=self.grid, **self.options)


def _kind(value: Any, plain: bool) -> Any:
    """What the compiler looks at in an argument; `plain`: at its type only."""
    if isinstance(value, torch.Tensor):
        return value.dtype, plain or value.data_ptr() % 16 == 0
    if isinstance(value, int):
        wide = value >= 2**31
        return ("int", wide) if plain else ("int", value == 1, value % 16 == 0, wide)
    return type(value)


@dataclass(frozen=True)
class Transfer:
    """A copy between the host's memory and the device's, in the order of the launches."""

    target: torch.Tensor
    source: torch.Tensor

    def run(self) -> None:
        self.target.copy_(self.source, non_blocking=True)


class Fork:
    """The second lane goes on when all that the first one has launched so far is done."""

    def run(self) -> None:
        """Nothing, where all runs in order."""


class Mark:
    """A place in the second lane."""

    def run(self) -> None:
        """Nothing, where all runs in order."""


@dataclass(frozen=True)
class Join:
    """The first lane goes on when the second one has come to a mark."""

    mark: Mark

    def run(self) -> None:
        """Nothing, where all runs in order."""


Step = Launch | Transfer | Fork | Mark | Join


class Pending:
    """Results of the second lane that the first one has not waited for, by the memory they are in."""

    def __init__(self) -> None:
        self._marks: list[tuple[Mark, set[int]]] = []

    def add(self, mark: Mark, results: Sequence[Any]) -> None:
        self._marks.append((mark, {_memory(array) for array in results}))

    def met(self, args: Sequence[Any]) -> Mark | None:
        """The last mark that a launch with these arguments has to wait for; it and all before it are done then."""
        if not self._marks:
            return None
        used = {_memory(arg) for arg in args} - {0}
        last = max((i for i, (_, results) in enumerate(self._marks) if used & results), default=-1)
        if last < 0:
            return None
        mark = self._marks[last][0]
        del self._marks[: last + 1]
        return mark

    def rest(self) -> Mark | None:
        """The last mark of all, if any."""
        marks, self._marks = self._marks, []
        return marks[-1][0] if marks else None


def _memory(value: Any) -> int:
    """Where a tensor, or what a descriptor describes, begins in memory; 0 for anything else."""
    value = getattr(value, "base", value)
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0


def run_lanes(steps: Sequence[Any], second: torch.cuda.Stream) -> None:
    """Start steps on the current stream, those that are aside on another."""
    first = torch.cuda.current_stream()
    events: dict[Mark, torch.cuda.Event] = {}
    for step in steps:
        if isinstance(step, Fork):
            event = torch.cuda.Event()
            event.record(first)
            second.wait_event(event)
        elif isinstance(step, Mark):
            events[step] = torch.cuda.Event()
            events[step].record(second)
        elif isinstance(step, Join):
            first.wait_event(events[step.mark])
        elif getattr(step, "aside", False):
            with torch.cuda.stream(second):
                step.run()
        else:
            step.run()
