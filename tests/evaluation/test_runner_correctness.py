"""The checks before speed, on made-up answers: what passes, what is explained, what is refused."""

import math
from typing import Any

import pytest

from sparkinfer.evaluation import schedule
from sparkinfer.evaluation.correctness import (
    Question,
    check_content,
    check_encoding,
    check_lossless,
    check_same_model,
    compare_rows,
    content,
    first_difference,
)
from sparkinfer.evaluation.process import Run
from sparkinfer.evaluation.record import Bars

QUESTION = Question("chat", 0, (1, 2, 3))


def row(token: int, best: float, *others: tuple[int, float]) -> list[Any]:
    return [token, best, [[token, best], *map(list, others)]]


def answer(tokens: list[int], finish: str = "length", second: float = -3.0) -> dict[str, Any]:
    rows = [row(token, -0.5, (token + 1000, second)) for token in tokens]
    return {"tokens": tokens, "text": str(tokens), "finish": finish, "logprobs": rows}


def run_with(plain: dict[str, Any], shift: float = 0.0, **others: dict[str, Any]) -> Run:
    taught = [row(7, -0.5 - shift, (8, -1.5), (9, -2.5)) for _ in range(3)]
    results = {"chat/0/plain": plain, "chat/0/taught": {"rows": taught}}
    return Run(results=results | {f"chat/0/{way}": one for way, one in others.items()})


def same_model(base: Run, candidate: Run) -> dict[str, Any]:
    found = check_same_model([QUESTION], base, candidate, Bars())
    return {one.check: one for one in found}


def test_equal_sides_pass() -> None:
    side = run_with(answer([5, 6, 7]))
    found = same_model(side, side)
    assert found["logits"].passed and found["same_tokens"].passed
    assert found["logits"].numbers["kl"] == 0.0 and found["logits"].numbers["top1"] == 1.0


def test_a_near_tie_explains_another_token_and_nothing_else_does() -> None:
    base = run_with(answer([5, 6, 7], second=-0.51))
    candidate = run_with(answer([5, 1006, 9]), shift=0.01)
    assert same_model(base, candidate)["same_tokens"].passed
    exact = run_with(answer([5, 1006, 9]))  # log-probabilities are equal, so nothing explains it
    assert not same_model(base, exact)["same_tokens"].passed
    clear = run_with(answer([5, 6, 7], second=-0.6))  # 0.1 nats apart: never a near-tie
    assert not same_model(clear, run_with(answer([5, 1006, 9]), shift=0.2))["same_tokens"].passed
    unknown = same_model(base, run_with(answer([5, 77, 9]), shift=0.01))["same_tokens"]
    assert not unknown.passed and "not among the base's best" in unknown.detail


def test_a_shorter_answer_is_another_answer() -> None:
    found = same_model(run_with(answer([5, 6, 7])), run_with(answer([5, 6], finish="stop")))
    assert not found["same_tokens"].passed


def test_divergence_is_that_of_the_distributions() -> None:
    base, other = (
        row(1, math.log(0.6), (2, math.log(0.4))),
        row(1, math.log(0.5), (2, math.log(0.5))),
    )
    numbers = compare_rows([(base, other)])
    expected = 0.6 * math.log(0.6 / 0.5) + 0.4 * math.log(0.4 / 0.5)
    assert numbers["kl"] == pytest.approx(expected, abs=1e-9)
    assert numbers["top1"] == 1.0
    assert numbers["largest"] == pytest.approx(math.log(0.5 / 0.4))
    flipped = row(2, math.log(0.6), (1, math.log(0.4)))
    assert compare_rows([(base, flipped)])["top1"] == 0.0
    tie = row(1, math.log(0.5), (2, math.log(0.5)))
    assert compare_rows([(tie, row(2, math.log(0.5), (1, math.log(0.5))))])["top1"] == 1.0
    assert compare_rows([])["top1"] == 0.0  # nothing compared is no agreement


def test_speculation_must_agree_in_every_part() -> None:
    plain = answer([5, 6, 7, 8])
    good = check_lossless([QUESTION], run_with(plain, draft=plain), "candidate", Bars())[0]
    assert good.passed and good.numbers["agree"] == 1.0
    late = run_with(plain, draft=answer([5, 6, 7, 9]))
    wrong = check_lossless([QUESTION], late, "candidate", Bars())[0]
    assert not wrong.passed and wrong.numbers["agree"] == 0.75 and "token 3" in wrong.detail
    shifted = run_with(plain, draft={**plain, "logprobs": []})
    assert "logprobs differ" in check_lossless([QUESTION], shifted, "base", Bars())[0].detail
    nothing = check_lossless([QUESTION], run_with(plain), "candidate", Bars())[0]
    assert not nothing.passed  # 0 of 0 is no agreement


def test_a_loop_is_refused_unless_the_base_loops_as_well() -> None:
    text, loop = answer(list(range(40)), "stop"), answer([1, 2] * 20)
    good, bad = run_with(text), run_with(loop)
    assert check_content([QUESTION], good, good, "candidate")[0].passed
    found = check_content([QUESTION], bad, good, "candidate")[0]
    assert (
        not found.passed and "repeats itself" in found.detail and "no answer ends" in found.detail
    )
    assert check_content([QUESTION], bad, bad, "candidate")[0].passed
    assert not check_content([QUESTION], run_with(answer([])), good, "candidate")[0].passed


def test_repetition_and_distinct_pairs() -> None:
    numbers = content([answer([1, 2, 3, 4, 1, 2, 3, 4])])
    assert numbers["repetition"] == pytest.approx(1 - 4 / 5)
    assert numbers["distinct2"] == pytest.approx(4 / 7)
    assert content([answer([1])]) == {"repetition": 0, "distinct2": 1, "eos": 0, "tokens": 1}


def test_prompts_must_have_the_bases_tokens() -> None:
    assert check_encoding([[1, 2]], [[1, 2]]).passed
    assert not check_encoding([[1, 2], [3]], [[1, 2], [4]]).passed
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1, 2]) is None


def test_blocks_are_mirrored_by_a_fair_coin_of_the_seed() -> None:
    blocks = schedule.blocks(1, 1000)
    assert blocks == schedule.blocks(1, 1000) != schedule.blocks(2, 1000)
    assert blocks[:10] == schedule.blocks(1, 10)
    assert set(blocks) == {
        ("base", "candidate", "candidate", "base"),
        ("candidate", "base", "base", "candidate"),
    }
    heads = sum(block[0] == "base" for block in blocks)
    assert 400 < heads < 600  # 6 standard deviations
    assert {side for block in schedule.aa_blocks(1, 8) for side in block} == {"a1", "a2"}
    assert [schedule.backwards(slot, 4) for slot in range(4)] == [False, False, True, True]
