"""Rows of an embedding table: what is kept expanded, and for how long."""

import numpy as np
import pytest

from sparkinfer.models import table
from sparkinfer.models.table import Table
from sparkinfer.quant.encode import encode_q8_0


@pytest.fixture
def rows(monkeypatch):
    """A table of 64 rows of which few are kept, and how often it expands."""
    monkeypatch.setattr(table, "_KEPT_ROWS", 4)
    values = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    made = Table("Q8_0", encode_q8_0(values.reshape(-1, 32)).reshape(64, -1))
    asked = []
    expand = made.take

    def take(self, ids):
        asked.append(list(ids))
        return expand(ids)

    monkeypatch.setattr(Table, "take", take)
    return made, asked, expand(slice(None))


def test_rows_are_those_of_the_file(rows):
    made, _, whole = rows
    out = np.zeros((3, 64), np.float32)
    made.write([7, 3, 7], out)
    assert np.array_equal(out, whole[[7, 3, 7]])
    assert np.array_equal(made.row(3), whole[3]) and made.width == 64


def test_rows_are_expanded_once_until_too_many_are_kept(rows):
    made, asked, _ = rows
    for index in (1, 2, 1, 2, 3, 4, 1):
        made.row(index)
    assert asked == [[1], [2], [3], [4]]
    made.row(5)
    made.row(1)
    assert asked[4:] == [[5], [1]]


def test_held_rows_are_never_expanded_again(rows):
    made, asked, whole = rows
    made.hold(np.array([10, 11, 12, 13, 14, 15]))
    for index in range(20):
        assert np.array_equal(made.row(index), whole[index])
    assert [10] not in asked and asked.count([10, 11, 12, 13, 14, 15]) == 1
    before = len(asked)
    made.row(13)
    assert len(asked) == before
