"""Which context rows a draft holds, and where in its cache they lie."""

from collections.abc import Sequence

from sparkinfer.backend.base import Memory
from sparkinfer.kernels.attention import SPLIT
from sparkinfer.models.config import MAX_WIDTH
from sparkinfer.state.kv_cache import KvCache, KvShape

_SLACK = 1024  # positions between two moves of a cache that only keeps its window


def cache_rows_of(context: int, window: int) -> int:
    """Rows of a cache for `context` tokens and a block after them; `window` (not 0): no layer looks back further.

    A bounded cache holds a window, the rows that come before it moves, and what rounding to whole splits keeps.
    """
    if window:
        context = min(context, -(-window // SPLIT) * SPLIT + SPLIT + _SLACK)
    return context + MAX_WIDTH


class ContextRows:
    """Tokens whose keys and values the cache holds. Positions count from the sequence's start.

    The cache begins at position `base`, a multiple of SPLIT, so that moving it changes no bits.
    Positions below `first` have no row.
    """

    def __init__(
        self, shape: KvShape, context: int, window: int, memory: Memory | None = None
    ) -> None:
        """`memory`: of the backend whose kernels use the cache (default: the host's)."""
        self.context, self.window = context, window
        self.size = cache_rows_of(context, window)
        self.cache = KvCache(shape, self.size, memory)
        self.n_bytes = shape.n_bytes(self.size)
        self.base = self.first = 0
        self._tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self._tokens)

    def begin(self, tokens: Sequence[int]) -> None:
        """Stand after `tokens`: keep the rows of their common beginning if that is all of them, else none.

        Interrupted (Ctrl-C), it leaves no tokens: the next call then keeps nothing.
        """
        common, length = _common(self._tokens, tokens), len(tokens)
        self._tokens = []
        if common < length or length <= self.base:
            self.first, self.base = length, length // SPLIT * SPLIT
        elif self.base and length - self.window + 1 < self.base:
            self.first = max(self.first, self.base)
        self.first = min(self.first, length)
        self._tokens = list(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Note rows that were written for `tokens`."""
        self._tokens += tokens

    def assume(self, length: int) -> None:
        """Pretend to hold rows for `length` tokens, all zero, of tokens that no text has."""
        self._tokens = []
        fits = length + MAX_WIDTH <= self.size
        self.first, self.base = 0, 0 if fits else self._window_start(length)
        self.cache.clear(min(length - self.base + MAX_WIDTH, self.size))
        self._tokens = [-1] * length

    def make_room(self, count: int) -> None:
        """Move the cache so that `count` rows after the last one lie in it."""
        if self.length + count - self.base <= self.size:
            return
        tokens, self._tokens = (
            self._tokens,
            [],
        )  # an interrupt must not leave rows that have half moved
        base = self._window_start(len(tokens))
        self.cache.drop(base - self.base, len(tokens) - self.base)
        self.base = base
        self._tokens = tokens

    def _window_start(self, length: int) -> int:
        """The last split that a window after `length` tokens does not reach behind."""
        return max(0, length - self.window + 1) // SPLIT * SPLIT


def _common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (ours, theirs) in enumerate(zip(held, tokens, strict=False)):
        if ours != theirs:
            return index
    return min(len(held), len(tokens))
