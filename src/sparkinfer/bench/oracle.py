"""A scripted draft over recorded answers: acceptance as ordered, for measurements and checks, never for users."""

from collections.abc import Callable, Sequence

from sparkinfer.dflash.base import Draft
from sparkinfer.dflash.scripted import ScriptedDraft
from sparkinfer.engine import Result


class Oracle:
    """Knows each prompt's plain answer once it has been recorded."""

    def __init__(self, n_vocab: int, inner: Draft | None, max_depth: int = 15) -> None:
        """With `inner` a real draft's network runs along at its full cost."""
        self.draft = ScriptedDraft([], [0], n_vocab, inner=inner, max_depth=max_depth)
        self._recordings: dict[int, list[int]] = {}

    def record(self, number: int, prompt: Sequence[int], result: Result) -> None:
        """Note the plain answer to prompt `number`."""
        self._recordings[number] = [*prompt, *result.tokens]

    def load(self, script: Sequence[int]) -> Callable[[int], None]:
        """Return what makes the draft ready for a prompt: `script[i]` drafts of step i are right."""
        fixed = list(script)

        def prepare(number: int) -> None:
            self.draft.recording = self._recordings[number]
            self.draft.script, self.draft.step = fixed, 0

        return prepare
