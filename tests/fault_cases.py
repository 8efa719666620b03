"""Small models, plain and speculative, for the tests of known faults."""

import golden_models
from draft_zoo import MAX_DEPTH, accepting, make_draft
from lossless_cases import draft_for, plain_engine, plain_outcome, spec_engine
from toy_model import BOS, END, ToyTarget, ToyTokenizer, scripted_logits

from sparkinfer.dflash.costs import Cost, CostTable
from sparkinfer.tokenizer import Tokenizer

HYBRIDS = ("qwen35-tiny-F32", "qwen35moe-tiny-F32")
ANY = ("qwen3-tiny-Q8_0", "qwen35-tiny-F32")
PIECES = [bytes([c]) for c in b"abcdefghijklm"]
TOY = ToyTokenizer(PIECES)
PROMPT = (BOS, 4, 5)


class Golden:
    """A tiny model, plain and speculative."""

    def __init__(self, name: str) -> None:
        self.target = golden_models.target(name, any_split=True)
        self.tokenizer = Tokenizer.from_gguf(self.target.file)
        self.engine = plain_engine(self.target, self.tokenizer)

    def plain(self, prompt, **options):
        return plain_outcome(self.engine, prompt, **options)

    def draft(self, kind, known, seed=0):
        return draft_for(kind, self.target, self.tokenizer, known, seed)

    def speculative(self, draft, steps, **more):
        return spec_engine(self.target, self.tokenizer, draft, steps, **more)


def some_costs() -> CostTable:
    """A made-up machine: a row more costs a tenth of a plain step."""
    window = {width: Cost((1e-3 + 1e-4 * width,), (2e-4,)) for width in range(2, 17)}
    return CostTable((64,), (1e-3,), {"window": window})


def free(count: int) -> dict:
    return {"max_tokens": count, "ignore_eos": True, "logprobs": 2}


def toy_engine(script, accepted=(MAX_DEPTH,), width=8, path="window", *, draft=None, start=PROMPT):
    """An engine over a model that writes `script`, then END; the draft is right as often as told."""
    target = ToyTarget(scripted_logits(TOY.n_vocab, len(start), script), recurrent=True)
    known = [*start, *script, END]
    zoo = draft or make_draft("oracle", TOY.n_vocab, known)
    if draft is None:
        zoo.guess = accepting(accepted, TOY.n_vocab)
    return spec_engine(target, TOY, zoo, [(width, path)])
