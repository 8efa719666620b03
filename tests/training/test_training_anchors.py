"""Where blocks stand, and what their slots are about."""

import torch

from sparkinfer.training.anchors import draw_anchors, every_anchor, slots_of

#          0  1  2  3  4  5  6  7  8  9
TOKENS = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17, 18, 19]])
# Two answers: 2 3 4 5 and 8 9.
ANSWERS = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 1, 1]]).bool()


def slots(*anchors: int) -> object:
    places = torch.tensor([anchors])
    return slots_of(TOKENS, ANSWERS, places, torch.ones_like(places).bool(), 3)


def test_an_anchor_is_an_answers_token_with_a_successor() -> None:
    assert every_anchor(ANSWERS)[0].nonzero()[:, 0].tolist() == [2, 3, 4, 8]


def test_labels_and_positions() -> None:
    got = slots(2, 3, 8)
    assert got.labels[0, 0].tolist() == [13, 14, 15]  # the anchor at 2 says nothing about itself
    assert got.previous[0, 0].tolist() == [12, 13, 14]
    assert got.counts[0].tolist() == [[True] * 3, [True, True, False], [True, False, False]]


def test_a_slot_after_the_end_of_an_answer_never_counts() -> None:
    got = slots(4, 5)
    assert got.counts[0].tolist() == [[True, False, False], [False] * 3]


def test_drawn_anchors_are_fit_different_and_ascending() -> None:
    random = torch.Generator().manual_seed(0)
    answers = ANSWERS.repeat(50, 1)
    places, real = draw_anchors(answers, 3, random)
    assert real.all()
    assert every_anchor(answers).gather(1, places).all()
    assert (places[:, 1:] > places[:, :-1]).all()
    assert len({tuple(row) for row in places.tolist()}) > 1


def test_a_row_with_too_few_anchors_says_so() -> None:
    places, real = draw_anchors(ANSWERS, 6, torch.Generator().manual_seed(0))
    assert real.sum() == 4
    got = slots_of(TOKENS, ANSWERS, places, real, 3)
    assert not got.counts[~real].any()
