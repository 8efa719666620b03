"""Conversations that the target writes: their form, what is learnt of them, and the corpus on disk."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from training_toys import LLAMA

from sparkinfer.errors import GGUFError, MissingFileError, RequestError
from sparkinfer.training.config import DataPlan
from sparkinfer.training.corpus import Batches, Corpus
from sparkinfer.training.generate import ANSWER, Piece, Script, converse, make_script, pick
from sparkinfer.training.prompts import Frame, domains, random_turns, read_prompts
from sparkinfer.training.target import TorchTarget

END = 3
FRAME = Frame((1, 10), (END, 11), (10,), frozenset({END}))
HELD_OUT = Path(__file__).parents[2] / "benchmarks" / "prompts" / "heldout.jsonl"


def cold(rows: int, length: int, limit: int = 12) -> DataPlan:
    return DataPlan(rows, length, rows, answer_limit=limit, user_limit=5, warm_share=0.0)


def test_rows_follow_the_script(target: TorchTarget) -> None:
    script = make_script([((50, 51), True), ((60,), False)], [((70,), True)], FRAME)
    tokens, answers = converse(target, script, [END], cold(2, 60), 0)
    assert tokens[0, :6].tolist() == [1, 10, 50, 51, END, 11]
    assert tokens[1, :3].tolist() == [1, 10, 60]
    turn = tokens[1, 3:].tolist()
    assert (
        END in turn[:6] and turn[turn.index(END) + 1] == 11
    )  # the model's own turn ends, an answer begins
    assert not answers[0, :6].any() and answers[0, 6]
    for row, own in zip(tokens.tolist(), answers.tolist(), strict=True):
        ends = [i for i in range(len(row) - 5) if own[i] and not own[i + 1]]
        assert ends
        for end in ends:
            # An answer's own end is learnt; of one that was cut off the end is given.
            after = row[end + 1 : end + 5] if row[end] == END else row[end + 2 : end + 6]
            assert row[end] == END or row[end + 1] == END
            assert after[:4] == [10, 70, END, 11][: len(after)]


def test_answers_of_cool_rows_are_the_targets_greedy_choice(target: TorchTarget) -> None:
    script = Script(
        [Piece((1, n, 30), ANSWER) for n in range(40, 46)], [], Piece((END, 11), ANSWER)
    )
    tokens, answers = converse(target, script, [END], cold(6, 20, 40), 0)
    best = target.logits(tokens).argmax(-1)
    assert answers[:, 3].all()
    places = answers[:, 1:]
    assert torch.equal(tokens[:, 1:][places], best[:, :-1][places])


def test_an_answer_that_is_cut_off_learns_no_end(target: TorchTarget) -> None:
    script = Script([Piece((1, 40), ANSWER)], [], Piece((END, 11), ANSWER))
    tokens, answers = converse(target, script, [END], cold(1, 30, 4), 0)
    length = int(answers.sum())
    assert length <= 4
    assert tokens[0, 2 + length :].eq(END).all() and not answers[0, 2 + length :].any()


def test_the_same_seed_gives_the_same_conversations(target: TorchTarget) -> None:
    script = make_script([((50,), False)] * 4, [((70,), False)], FRAME)
    plan = DataPlan(4, 30, 4, answer_limit=8, user_limit=5, warm_share=0.5)
    one, two, other = (converse(target, script, [END], plan, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_draws_follow_the_temperature_and_leave_out_the_unlikely() -> None:
    logits = torch.tensor([[2.0, 1.0, -3.0]]).repeat(20000, 1)
    noise = torch.empty_like(logits).exponential_(generator=torch.Generator().manual_seed(0))
    greedy, drawn = pick(logits, noise, torch.full((20000, 1), 0.5), float(np.log(0.1)))
    assert greedy.eq(0).all()
    shares = torch.bincount(drawn, minlength=3) / 20000
    first = 1 / (1 + np.exp(-2.0))  # the third is less likely than a tenth of the first
    assert shares[2] == 0
    assert shares[0] == pytest.approx(first, abs=0.01)


def test_a_script_without_given_tokens_is_refused(target: TorchTarget) -> None:
    with pytest.raises(RequestError, match="nothing before a turn"):
        converse(
            target, Script([Piece((), ANSWER)], [], Piece((END,), ANSWER)), [END], cold(1, 8), 0
        )


def test_starts_of_turns_are_varied_and_never_a_prompt_kept_for_measuring() -> None:
    kept = frozenset(prompt.text for prompt in read_prompts(HELD_OUT))
    turns = random_turns(20000, 0, kept)
    assert kept.isdisjoint(turn.text for turn in turns)
    assert {turn.domain for turn in turns} == {"free", *domains()}
    assert len({turn.text for turn in turns}) > 2500
    assert turns == random_turns(20000, 0, kept)


def test_prose_is_asked_for_more_often_than_repetition() -> None:
    counts = Counter(turn.domain for turn in random_turns(20000, 0))
    assert 2.5 < counts["chat"] / counts["repetition"] < 3.5
    assert 0.9 < counts["lists"] / counts["chat"] < 1.1


def test_the_share_of_whole_questions_can_be_chosen() -> None:
    def whole(share: float) -> float:
        turns = random_turns(4000, 0, patterns=share)
        return sum(turn.complete for turn in turns) / len(turns)

    assert whole(0.0) == 0.0
    assert 0.2 < whole(0.3) < 0.3  # a few patterns are left open
    assert whole(1.0) > 0.8
    assert random_turns(50, 3) == random_turns(50, 3, patterns=0.3)


def test_words_of_the_vocabulary_make_questions_different() -> None:
    words = [f"word{n}" for n in range(500)]
    turns = random_turns(20000, 0, words=words)
    assert len({turn.text for turn in turns}) > 10000
    assert sum("word" in turn.text for turn in turns) > 4000
    assert not any("{" in turn.text and "}" in turn.text for turn in turns)


def test_later_turns_may_follow_up() -> None:
    turns = random_turns(2000, 0, later=True)
    shares = [turn.domain == "follow-up" for turn in turns]
    assert 0.35 < sum(shares) / len(shares) < 0.45


def test_rows_with_a_sequence_are_left_out() -> None:
    tokens = np.array([[1, 2, 3, 4], [2, 3, 9, 2], [9, 9, 1, 2], [3, 1, 2, 3]], np.uint32)
    rows = Corpus(tokens, tokens > 2).without([[1, 2, 3], [9, 2], [7] * 9, []])
    assert rows.tokens.tolist() == [[9, 9, 1, 2]]
    assert rows.answers.tolist() == [[True, True, False, False]]
    assert len(Corpus(tokens, tokens > 2).without([[4, 1]])) == 4


def test_the_prompts_kept_for_measuring_cover_the_domains() -> None:
    prompts = read_prompts(HELD_OUT)
    assert len({p.text for p in prompts}) == len(prompts) >= 60
    assert {p.domain for p in prompts} == set(domains())


def test_a_file_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert [p.text for p in read_prompts(tmp_path / "a.txt")] == ["one", "two"]
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n{"text": "y"}\n')
    with pytest.raises(RequestError, match="line 2"):
        read_prompts(tmp_path / "b.jsonl")
    with pytest.raises(MissingFileError):
        read_prompts(tmp_path / "none.txt")


def corpus(rows: int = 10, length: int = 8) -> Corpus:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 50, (rows, length)).astype(np.uint32)
    return Corpus(tokens, random.random((rows, length)) < 0.5)


@pytest.mark.parametrize("largest", [49, 70000])
def test_a_corpus_survives_the_disk(tmp_path: Path, largest: int) -> None:
    stored = corpus()
    stored.tokens[0, 0] = largest
    stored.save(tmp_path / "c.npz")
    back = Corpus.load(tmp_path / "c.npz")
    assert np.array_equal(back.tokens, stored.tokens) and np.array_equal(
        back.answers, stored.answers
    )
    assert [p.name for p in tmp_path.iterdir()] == ["c.npz"]


def test_a_bad_corpus_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "c.npz").write_bytes(LLAMA.read_bytes()[:100])
    with pytest.raises((GGUFError, MissingFileError), match=r"c\.npz"):
        Corpus.load(tmp_path / "c.npz")


def test_frequent_tokens_by_hand() -> None:
    tokens = np.array([[5, 5, 5, 7, 7, 2, 9, 9]], np.uint32)
    answers = np.array([[1, 1, 1, 1, 1, 1, 0, 0]], np.bool_)
    made = Corpus(tokens, answers)
    ids = made.frequent(3, 12, always=[11])
    assert ids.tolist() == [5, 7, 11]
    assert made.coverage(ids) == pytest.approx(5 / 6)


def test_batches_follow_from_the_step_alone() -> None:
    one, two = (Batches(corpus(), 3, 4, torch.device("cpu")) for _ in range(2))
    wanted = [one(step)[0] for step in range(12)]
    for step in (11, 0, 5):
        assert torch.equal(two(step)[0], wanted[step])
    first = torch.cat([*wanted[:3], wanted[3][:1]])  # the first epoch: every row once
    rows = sorted(map(tuple, first.tolist()))
    assert rows == sorted(map(tuple, corpus().tokens.astype(np.int64).tolist()))


def test_two_processes_share_an_epoch() -> None:
    parts = [Batches(corpus(), 2, 4, torch.device("cpu"), rank, 2) for rank in range(2)]
    rows = [tuple(r) for step in range(2) for part in parts for r in part(step)[0].tolist()]
    assert len(set(rows)) == 8
