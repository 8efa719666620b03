"""How long an evaluation still takes, from how long its slots took."""

from collections.abc import Sequence

from sparkinfer.evaluation.record import Sample, Scope


class Timer:
    """How long slots take, and so how long is left."""

    def __init__(self, scope: Scope) -> None:
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        slots = 4 * (scope.aa_blocks + scope.blocks)
        self._guess = 60 * scope.minutes / slots if scope.minutes else None

    def add(self, seconds: float, guards: bool) -> None:
        self._seconds[guards].append(seconds)

    def left(self, scope: Scope, aa: Sequence[Sample], samples: Sequence[Sample]) -> str:
        """Return ", at most about 12 min left", "" while nothing is known."""
        seconds = 0.0
        parts = (
            (False, scope.aa_blocks - blocks_in(aa)),
            (True, scope.blocks - blocks_in(samples)),
        )
        for guards, blocks in parts:
            known = self._seconds[guards] or self._seconds[not guards]
            each = sum(known) / len(known) if known else self._guess
            if each is None:
                return ""
            seconds += 4 * blocks * each
        words = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        return f", at most about {words} left"


def blocks_in(samples: Sequence[Sample]) -> int:
    """Return how many blocks there are samples of."""
    return len({sample.block for sample in samples})
