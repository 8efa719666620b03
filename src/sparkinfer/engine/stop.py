"""Stop strings over streamed text: byte-exact, however the text is cut into pieces."""

from collections.abc import Sequence


class _Matcher:
    """Knuth-Morris-Pratt over one stop string; `matched` characters of it end the text so far."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._borders = _borders(pattern)

    def feed(self, character: str) -> bool:
        """Advance by one character; True when the whole string has just ended."""
        length = self.matched
        while length and self.pattern[length] != character:
            length = self._borders[length - 1]
        self.matched = length + (self.pattern[length] == character)
        return self.matched == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper border."""
    borders = [0] * len(pattern)
    length = 0
    for end in range(1, len(pattern)):
        while length and pattern[length] != pattern[end]:
            length = borders[length - 1]
        length += pattern[length] == pattern[end]
        borders[end] = length
    return borders


class StopScanner:
    """Lets text through up to the first stop string.

    The first to be complete wins, the longest of those that end at the same character. Text that
    may be the start of a stop string is held back until the next characters decide. The outcome
    depends on the text alone, not on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""
        self.match: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain now; after a match, what stood before it and then nothing."""
        if self.match is not None:
            return ""
        if not self._matchers:
            return text
        for index, character in enumerate(text):
            ended = [matcher.feed(character) for matcher in self._matchers]
            if True in ended:
                self.match = self._matchers[ended.index(True)].pattern
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen[: len(seen) - len(self.match)]
        self._held += text
        return self._release(max(matcher.matched for matcher in self._matchers))

    def flush(self) -> str:
        """The text still held back; the end of the output shows that no stop string began."""
        return self._release(0)

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain
