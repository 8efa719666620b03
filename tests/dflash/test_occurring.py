"""A vocabulary of which a part waits: what has occurred is proposed as if all tokens always were."""

from pathlib import Path

import golden_models
import numpy as np
import pytest
from draft_models import Recipe, features, write_folder

from sparkinfer.dflash import occurring
from sparkinfer.dflash.draft import BlockDraft, load_draft
from sparkinfer.dflash.proposals import LEAST
from sparkinfer.errors import ShapeError

RECIPE = Recipe(windows=(24, 0))
ACTIVE, ROOM = 19, 5  # no multiples of a tile's rows
IDS = np.random.default_rng(4).permutation(320)[:90]
WAITING = IDS[ACTIVE:]


@pytest.fixture(autouse=True)
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occurring, "ROOM", ROOM)


def loaded(path: Path, active: int, *, own: bool, markov: bool, kind: str) -> BlockDraft:
    rng = np.random.default_rng(2)
    more = {"draft_ids": IDS.astype(np.int32)}
    head = rng.standard_normal((len(IDS), 64)).astype(np.float32)
    if own:
        more["lm_head.weight"] = head
    if markov:
        more["markov_head.markov_w1.weight"] = rng.standard_normal((320, 32)).astype(np.float32)
        w2 = rng.standard_normal((len(IDS), 32)).astype(np.float32)
        more["markov_head.markov_w2.weight"] = w2
    recipe = Recipe(windows=(24, 0), extra=(("draft_active_size", active),) if active else ())
    folder = write_folder(path, recipe, RECIPE.tensors() | more)
    return load_draft(folder, golden_models.target("llama-tiny-F32", kind))


def extend(draft: BlockDraft, tokens: list[int]) -> None:
    """Rows for these tokens, of features in the memory of the draft's backend."""
    values, backend = features(len(tokens), 3), draft.tapes.backend
    there = backend.buffer(*values.shape)
    backend.upload(there, values)
    draft.extend(tokens, there.array)


def said(draft: BlockDraft, tokens: list[int]) -> np.ndarray:
    """Logits [depth, 320] of every slot after 7, after these tokens."""
    draft.begin([])
    extend(draft, tokens)
    proposals = draft.propose(7, 5)
    best = [proposals.best(slot, 7) for slot in range(5)]
    rows = np.stack([proposals.row(slot, 7) for slot in range(5)])
    assert best == rows.argmax(1).tolist()
    return rows


@pytest.mark.parametrize("kind", golden_models.ACTIVATIONS)
@pytest.mark.parametrize(("own", "markov"), [(True, True), (True, False), (False, True)])
def test_what_has_occurred_has_the_logits_of_a_whole_vocabulary(
    tmp_path: Path, own: bool, markov: bool, kind: str
) -> None:
    whole = loaded(tmp_path / "whole", 0, own=own, markov=markov, kind=kind)
    part = loaded(tmp_path / "part", ACTIVE, own=own, markov=markov, kind=kind)
    assert part.plan["head_ids"] == ACTIVE + ROOM and part.plan["vocabulary"] == len(IDS)
    always, shown = IDS[:ACTIVE].tolist(), WAITING[:ROOM].tolist()
    for new in ([], [WAITING[20]], WAITING[[30, 40, 31, 2]].tolist(), WAITING[50:57].tolist()):
        tokens = [*always[:6], *map(int, new), *always[:3]]
        for token in map(int, new):  # by hand: the one that was away longest goes
            if token in shown:
                shown.remove(token)
            else:
                shown.pop(0)
            shown.append(token)
        rows, wanted = said(part, tokens), said(whole, tokens)
        there = np.array(always + shown)
        golden_models.assert_same_bits(
            np.ascontiguousarray(rows[:, there]), np.ascontiguousarray(wanted[:, there])
        )
        elsewhere = np.setdiff1d(np.arange(320), there)
        assert (rows[:, elsewhere] == LEAST).all()


def test_a_chain_uses_what_the_new_token_adds(tmp_path: Path) -> None:
    """The tokens chosen on the tape are those that slot after slot would choose, also after a row that changed."""
    draft = loaded(tmp_path, ACTIVE, own=True, markov=True, kind="int8")
    seen = set()
    for start in range(0, 60, ROOM):
        tokens = WAITING[start : start + ROOM].tolist()
        draft.begin([])
        extend(draft, tokens)
        for anchor in range(40):
            proposals = draft.propose(anchor, 5)
            chain = proposals.chain
            assert chain is not None
            previous = anchor
            for slot, token in enumerate(chain.tokens):
                assert token == int(proposals.row(slot, previous).argmax())
                previous = token
            seen |= set(chain.tokens)
    assert len(seen & set(WAITING.tolist())) > ROOM


def test_tokens_of_a_kept_state_count_too(tmp_path: Path) -> None:
    """The target may hold the beginning of a text that this draft gets no rows of."""
    draft = loaded(tmp_path, ACTIVE, own=True, markov=False, kind="int8")
    assert draft.propose(7, 1).row(0, 7)[WAITING[60]] == LEAST
    draft.begin(WAITING[60:62].tolist())
    assert draft.propose(7, 1).row(0, 7)[WAITING[60]] > LEAST


def test_active_tokens_must_be_in_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(
        ShapeError, match="91 of its tokens can always be proposed, expected 0 to 90"
    ):
        loaded(tmp_path, 91, own=True, markov=False, kind="f32")
