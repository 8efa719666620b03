"""The recorded step of generation, run under Triton's interpreter and without recording."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sparkinfer.training.config import DataPlan
from sparkinfer.training.generate import ANSWER, Piece, Script, converse, make_script
from sparkinfer.training.prompts import Frame
from sparkinfer.training.target import TorchTarget

triton = pytest.importorskip("triton")
END = 3
FRAME = Frame((1, 10), (END, 11), (10,), frozenset({END}))


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """Kernels that are defined now run in Python; a count that a kernel loads may end a loop."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        keep = scope[-1].set_attr if scope else setattr
        keep(tensor, "__index__", lambda value: int(value.handle.data.item()))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
        import sparkinfer.training.decode_kernels  # noqa: F401

        yield


@pytest.mark.parametrize("place", [0, 1, 64, 70])
def test_attention_to_the_cache(place: int) -> None:
    from sparkinfer.training.decode_kernels import attend

    random = torch.Generator().manual_seed(place)
    keys, values = torch.randn(2, 2, 3, 80, 16, generator=random)
    q = torch.randn(2, 9, 16, generator=random)
    k, v = torch.randn(2, 2, 3, 16, generator=random)
    before = keys.clone()
    out = attend(q, k, v, keys, values, torch.tensor([place], dtype=torch.int32))
    assert torch.equal(keys[:, :, place], k)
    assert torch.equal(values[:, :, place], v)
    assert torch.equal(keys[:, :, :place], before[:, :, :place])
    seen = slice(0, place + 1)
    expected = F.scaled_dot_product_attention(
        q.view(2, 3, 3, 16), keys[:, :, seen], values[:, :, seen]
    )
    torch.testing.assert_close(out, expected.reshape(2, 9, 16), atol=1e-5, rtol=1e-5)


def test_the_choice_of_a_token_is_greedy_or_drawn() -> None:
    from sparkinfer.training.decode_kernels import choose

    logits = 2 * torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    logits[0, 7] = logits[0, 290] = 30.0  # a tie
    heats, cool = torch.tensor([0.7, 0.7]), torch.tensor([1, 0], dtype=torch.int8)
    drawn: Counter[int] = Counter()
    for seed in range(150):
        first, second = choose(
            logits, heats, cool, torch.tensor([seed]), math.log(0.1), 256
        ).tolist()
        assert first == 7
        drawn[second] += 1
    chances = (logits[1] / 0.7).softmax(-1)
    chances[logits[1] < logits[1].max() + 0.7 * math.log(0.1)] = 0
    chances /= chances.sum()
    assert all(chances[token] > 0 for token in drawn)
    distance = sum(abs(drawn[t] / 150 - float(p)) for t, p in enumerate(chances)) / 2
    assert distance < 0.15, "about 0.06 is chance"


def test_rows_are_those_of_the_other_way(target: TorchTarget) -> None:
    from sparkinfer.training.graph_writer import GraphWriter

    plan = DataPlan(3, 24, 3, answer_limit=6, user_limit=5, warm_share=0.0)
    later = [((70, 71), True)]
    script = make_script([((50, 51), True), ((60,), True), ((61, 62, 63), True)], later, FRAME)
    writer = GraphWriter(target, script, [END], plan, graph=False)
    # Only greedy answers and given tokens: nothing depends on noise.
    for _ in range(2):  # the second batch starts anew in the same memory
        tokens, answers = writer.write(4)
        expected, marks = converse(target, script, [END], plan, 9)
        assert torch.equal(tokens, expected)
        assert torch.equal(answers, marks)
    other = make_script([((80,), True), ((81,), True), ((82,), True)], later, FRAME)
    assert writer.serves(other)
    assert torch.equal(writer.write(5)[0], converse(target, other, [END], plan, 9)[0])


def test_a_script_that_does_not_fit_is_refused(target: TorchTarget) -> None:
    from sparkinfer.training.graph_writer import GraphWriter

    plan = DataPlan(1, 8, 1, warm_share=0.0)
    writer = GraphWriter(
        target,
        Script([Piece((1, 40), ANSWER)], [], Piece((END, 11), ANSWER)),
        [END],
        plan,
        graph=False,
    )
    long = Piece((1, *range(20, 220)), ANSWER)
    assert not writer.serves(Script([long], [], Piece((END, 11), ANSWER)))
    more = [Piece((1, 40), ANSWER)] * 2
    assert not writer.serves(Script(more, [], Piece((END, 11), ANSWER)))
