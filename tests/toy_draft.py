"""Speculation over a toy target: a scripted draft, a fixed policy, an engine made of them."""

from collections.abc import Sequence
from typing import Any

from toy_model import BOS, END, TURN, ToyTarget, ToyTemplate, ToyTokenizer, scripted_logits

from sparkinfer.bench.fixed import Forced
from sparkinfer.dflash.costs import Cost, CostTable
from sparkinfer.dflash.loop import DFlashDecoder
from sparkinfer.dflash.scripted import ScriptedDraft
from sparkinfer.dflash.verify import Paths
from sparkinfer.engine import Engine

TOKENIZER = ToyTokenizer([b"a", b"b", b"c", b" "])
A, B, C, SPACE = range(3, 7)
PROMPT = [BOS, TURN, A, TURN]  # what a question of one letter becomes


class CostlessForced(Forced):
    """A forced policy over a machine on which a plain step takes `plain` seconds."""

    plain = 1.0

    def plain_seconds(self, length: int) -> float:
        return self.plain


class BrokenPaths(Paths):
    """Every window's second row is exchanged for one that says END: what a wrong kernel would do."""

    def pick(self, preferred: str, width: int) -> Any:
        path = super().pick(preferred, width)
        return _Broken(path)


class _Broken:
    def __init__(self, path: Any) -> None:
        self._path, self.name = path, path.name

    def run(self, state: Any, window: Sequence[int], judge: Any) -> Any:
        def wrong(index: int, row: Any) -> bool:
            if index == 1:
                row = row.copy()
                row[:] = 0.0
                row[SPACE] = 9.0
            return judge(index, row)

        return self._path.run(state, window, wrong)

    def commit(self, state: Any, kept: int) -> None:
        self._path.commit(state, kept)


def toy_costs(widths: Sequence[int] = range(2, 17), row: float = 0.1) -> CostTable:
    """A machine on which a plain step takes 1 ms and each further row `row` ms, on three paths."""
    steps = {
        name: {width: Cost((1e-3 * (1 + row * width),), (1e-5,)) for width in widths}
        for name in ("window", "block", "token_loop")
    }
    return CostTable([64], (1e-3,), steps)


def toy_engine(
    script: Sequence[int],
    accept: Sequence[int],
    *,
    turns: Sequence[tuple[int, str]] = ((4, "window"),),
    paths: type[Paths] = Paths,
    plain: float = 1.0,
    context: int = 256,
    start: int = len(PROMPT),
) -> Engine:
    """An engine that answers `script` to a one-letter question, and drafts with scripted acceptance."""
    target = ToyTarget(scripted_logits(TOKENIZER.n_vocab, start, script), context)
    draft = ScriptedDraft([*PROMPT, *script, END], accept, TOKENIZER.n_vocab)
    policy = CostlessForced("forced", turns)
    policy.plain = plain
    decoder = DFlashDecoder(target, draft, policy, paths(target))
    return Engine(target, TOKENIZER, ToyTemplate(TOKENIZER), decoder=decoder)
