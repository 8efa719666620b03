"""The draft's context: what it holds never depends on how it came, and what it does not hold is never seen."""

import functools
import itertools
from pathlib import Path
from types import SimpleNamespace

import golden_models
import numpy as np
import pytest
from draft_models import Recipe, block_hidden, features, write_folder

from sparkinfer.dflash.block_draft import pieces
from sparkinfer.dflash.draft import BlockDraft, load_draft
from sparkinfer.errors import RequestError

GOLDEN = Path(__file__).parents[1] / "data" / "draft"
NAMES = ("qwen35-4b", "qwen36-35b", "symmetric")
CHUNKINGS = ([1], [64], [16], [5, 3, 17], [63, 2], [33])


@functools.cache
def golden(name: str, activations: str = "int8") -> BlockDraft:
    return load_draft(GOLDEN / name, golden_models.target("llama-tiny-F32", activations))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("draft")


@functools.cache
def made(folder: Path, recipe: Recipe, activations: str = "f32", **kind: object) -> BlockDraft:
    name = write_folder(folder / str(abs(hash(repr(recipe)))), recipe)
    return load_draft(name, golden_models.target("llama-tiny-F32", activations, **kind))  # type: ignore[arg-type]


def feed(draft: BlockDraft, tokens: list[int], rows: np.ndarray, sizes: list[int]) -> None:
    """Extend by all tokens from the draft's length on, in chunks of these sizes over and over."""
    turns = itertools.cycle(sizes)
    while draft.length < len(tokens):
        end = min(draft.length + next(turns), len(tokens))
        draft.extend(tokens[draft.length : end], rows[draft.length : end])


def slots(draft: BlockDraft, anchor: int = 7, depth: int | None = None) -> np.ndarray:
    """Logits of every slot [depth, ids]."""
    proposals = draft.propose(anchor, depth or draft.max_depth)
    return np.stack([proposals.row(slot, anchor) for slot in range(proposals.depth)])


def restart(draft: BlockDraft) -> None:
    """Forget everything: another first token shares nothing."""
    draft.begin([319])
    draft.begin([])


@pytest.mark.parametrize("activations", golden_models.ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_every_chunking_has_the_bits_of_a_full_recompute(name: str, activations: str) -> None:
    draft = golden(name, activations)
    tokens = golden_models.tokens(130)
    rows = features(130, len(draft.taps))
    for length in (1, 15, 16, 17, 40, 64, 65, 130):
        wanted = None
        for sizes in CHUNKINGS:
            restart(draft)
            feed(draft, tokens[:length], rows, sizes)
            got = slots(draft)
            wanted = got if wanted is None else wanted
            golden_models.assert_same_bits(got, wanted, f"{length} rows in chunks of {sizes}")


def test_blocks_between_the_chunks_leave_nothing_behind() -> None:
    """A block's keys and values lie where the next context rows go."""
    draft, tokens = golden("qwen36-35b"), golden_models.tokens(60)
    rows = features(60, len(draft.taps))
    restart(draft)
    feed(draft, tokens, rows, [64])
    wanted = slots(draft)
    restart(draft)
    for end in (3, 4, 9, 25, 60):
        feed(draft, tokens[:end], rows, [2])
        slots(draft, anchor=end)
        slots(draft, anchor=end, depth=2)
    golden_models.assert_same_bits(slots(draft), wanted)
    golden_models.assert_same_bits(slots(draft), wanted, "again")


def test_going_back_is_forgetting() -> None:
    draft, tokens = golden("qwen35-4b"), golden_models.tokens(50)
    rows, other = features(50, len(draft.taps)), features(50, len(draft.taps), seed=6)
    restart(draft)
    feed(draft, tokens[:20], rows, [64])
    wanted = slots(draft)
    feed(draft, [*tokens[:20], 1, 2, 3], other, [1])
    draft.begin(tokens[:20])
    assert (draft.length, draft.gap) == (20, 0)
    golden_models.assert_same_bits(slots(draft), wanted)
    feed(draft, tokens, rows, [3])
    draft.begin(tokens[:20])
    golden_models.assert_same_bits(slots(draft), wanted)


def test_tokens_without_rows_are_a_gap_that_no_block_sees(folder: Path) -> None:
    """Fact 4 and 6 of the field: the target was advanced without the draft. Slots are those of the rows there are."""
    recipe = Recipe(windows=(0, 40))
    draft, tokens, rows = made(folder, recipe), golden_models.tokens(60), features(60)
    restart(draft)
    feed(draft, tokens[:30], rows, [64])
    draft.begin(tokens[:45])
    assert (draft.length, draft.gap) == (45, 45)
    assert np.isfinite(slots(draft)).all()
    feed(draft, tokens, rows, [4])
    assert (draft.length, draft.gap) == (60, 45)
    assert_reference(draft, recipe, rows, first=45)
    poison(draft, 0, 45)
    assert_reference(draft, recipe, rows, first=45)
    draft.begin(tokens[:50])
    assert (draft.length, draft.gap) == (50, 45)
    draft.begin(tokens[:40])
    assert (draft.length, draft.gap) == (40, 40)
    draft.begin([])
    assert (draft.length, draft.gap) == (0, 0)


def test_another_beginning_keeps_no_row() -> None:
    draft, tokens = golden("qwen35-4b"), golden_models.tokens(30)
    restart(draft)
    feed(draft, tokens, features(30, len(draft.taps)), [64])
    draft.begin([tokens[0] ^ 1, *tokens[1:20]])
    assert (draft.length, draft.gap) == (20, 20)


def assert_reference(
    draft: BlockDraft, recipe: Recipe, rows: np.ndarray, first: int = 0, anchor: int = 7
) -> None:
    """The draft's slots equal the naive forward's within 1e-4 of their size."""
    model = golden_models.target("llama-tiny-F32", "f32")
    block = model.embedding.take([anchor] + [recipe.mask] * (recipe.block - 1))
    hidden = block_hidden(recipe, recipe.tensors(), rows[: draft.length], block, first)
    wanted = hidden[1:] @ model.embedding.take(range(320)).T
    got = slots(draft, anchor)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)


RECIPES = {
    "full": Recipe(),
    "sliding": Recipe(windows=(24, 24)),
    "mixed": Recipe(windows=(24, 0, 24), taps=(0, 1, 3)),
    "symmetric": Recipe(windows=(24, 24), causal=False),
    "one kv head": Recipe(heads=4, kv_heads=1, head_size=64, windows=(0, 24)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_at_twice_the_window_every_layer_equals_a_naive_masked_forward(
    folder: Path, name: str
) -> None:
    """Facts 2 and 10: sliding layers are sliding; head sizes and kv heads need not be the target's (4, 2, 16)."""
    recipe = RECIPES[name]
    draft, rows = made(folder, recipe), features(300)
    restart(draft)
    for length in (1, 23, 24, 25, 48, 240, 256, 300):
        feed(draft, golden_models.tokens(300)[:length], rows, [64])
        assert_reference(draft, recipe, rows)


def test_window_and_causality_can_be_overridden(folder: Path) -> None:
    """Files do not always say how a draft was trained; both answers can be tried."""
    path = write_folder(folder / "override", Recipe(windows=(24, 0), seed=6))
    model, rows = golden_models.target("llama-tiny-F32", "f32"), features(60)
    for kind, windows, causal in (
        ({"window": 20}, (20, 20), None),
        ({"window": 30, "causal": False}, (24, 30), False),
        ({"causal": True}, (24, 0), True),
    ):
        draft = load_draft(path, model, **kind)  # type: ignore[arg-type]
        wanted = Recipe(windows=windows, causal=causal, seed=6)
        feed(draft, golden_models.tokens(60), rows, [64])
        if causal is None:  # still what the layers' types imply
            assert draft.config.causal == (True, False)
            continue
        assert_reference(draft, wanted, rows)
    with pytest.raises(RequestError, match="draft window 0: expected a positive number"):
        load_draft(path, model, window=0)


def poison(draft: BlockDraft, first: int, end: int) -> None:
    """NaN in the cache rows first .. end of every layer."""
    cache = draft._rows.cache
    shape = cache._shape
    kind = np.float32 if shape.format == "f32" else np.float16
    used = shape.layers * shape.kv_heads * cache.plane_bytes
    planes = (
        cache._keys[:used]
        .view(kind)
        .reshape(shape.layers * shape.kv_heads, -1, shape.head_size, 16)
    )
    keys = planes.transpose(0, 1, 3, 2).reshape(len(planes), -1, shape.head_size).copy()
    keys[:, first:end] = np.nan
    planes[:] = keys.reshape(len(planes), -1, 16, shape.head_size).transpose(0, 1, 3, 2)
    values = cache._values[:used].view(kind).reshape(len(planes), -1, shape.head_size)
    values[:, first:end] = np.nan


@pytest.mark.parametrize("activations", golden_models.ACTIVATIONS)
def test_unused_cache_rows_may_hold_anything(folder: Path, activations: str) -> None:
    """Fact 54: poison everything outside the rows that are there; the output is finite and the same."""
    recipe = Recipe(windows=(24, 24), causal=False, seed=3)
    draft, tokens, rows = made(folder, recipe, activations), golden_models.tokens(90), features(90)
    restart(draft)
    feed(draft, tokens, rows, [64])
    wanted = slots(draft)
    poison(draft, 90, draft._rows.size)
    golden_models.assert_same_bits(slots(draft), wanted, "rows after the context")
    poison(draft, 0, 90 - 23)
    golden_models.assert_same_bits(slots(draft), wanted, "rows before the window")
    assert np.isfinite(wanted).all()


def test_a_windowed_draft_keeps_a_bounded_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts 11 and 45: memory and work end at the window; moving the cache changes no bits."""
    recipe = Recipe(windows=(24, 24), causal=False, seed=4)
    tokens, rows = golden_models.tokens(2048), features(2048)
    model = golden_models.target("llama-tiny-F32", "f32", context=2048)
    draft = load_draft(write_folder(folder / "long", recipe), model)
    monkeypatch.setattr("sparkinfer.dflash.context._SLACK", 10_000)
    whole = load_draft(folder / "long", model)
    assert draft.plan["cache_rows"] < whole.plan["cache_rows"] == 2048 + 16
    assert draft.plan["cache_bytes"] < whole.plan["cache_bytes"]
    for end in (1000, 1285, 1290, 1291, 1600, 2000, 2040, 2048):
        feed(draft, tokens[:end], rows, [64, 7])
        feed(whole, tokens[:end], rows, [64])
        golden_models.assert_same_bits(slots(draft), slots(whole), f"{end} rows")
    assert draft._rows.base > 0
    back = draft._rows.base + 5
    draft.begin(tokens[:back])
    assert draft.gap == draft._rows.base, "part of its window is gone"
    assert np.isfinite(slots(draft)).all()
    draft.begin(tokens[:3])
    assert (draft.length, draft.gap) == (3, 3)
    assert np.isfinite(slots(draft)).all()


def test_a_draft_computes_only_the_rows_it_was_asked_for(folder: Path) -> None:
    """Fact 47: a causal draft, or one trained with shorter blocks, runs depth + 1 rows; its slots are the same."""
    causal = made(folder, Recipe(causal=True, block=10))
    short = made(folder, Recipe(block=10, extra=(("variable_block", True),)))
    fixed = made(folder, Recipe(block=10))
    for draft in (causal, short, fixed):
        restart(draft)
        feed(draft, golden_models.tokens(20), features(20), [64])
        slots(draft, depth=3)
        draft.propose(7, 3)
    assert (4, 1, 3) in causal.tapes._blocks
    assert (4, 1, 3) in short.tapes._blocks
    assert (10, 1, 3) in fixed.tapes._blocks
    golden_models.assert_same_bits(slots(causal, depth=3), slots(causal)[:3])
    golden_models.assert_same_bits(slots(fixed, depth=3), slots(fixed)[:3])
    assert (slots(short, depth=3) != slots(short)[:3]).any(), "it sees fewer rows"


def test_blocks_are_shortened_when_asked(folder: Path) -> None:
    """Then a draft that was trained on whole blocks is one that was trained on shorter ones too, and says so."""
    model = golden_models.target("llama-tiny-F32", "f32")
    path = write_folder(folder / "whole", Recipe(block=10))
    whole, short = load_draft(path, model), load_draft(path, model, shorten=True)
    like = made(folder, Recipe(block=10, extra=(("variable_block", True),)))
    rows, tokens = features(9), list(range(9))
    for draft in (whole, short, like):
        restart(draft)
        feed(draft, tokens, rows, [4])
    assert np.array_equal(slots(short, depth=3), slots(like, depth=3))
    assert not np.array_equal(slots(short, depth=3), slots(whole, depth=3))
    assert whole.plan["rows"] == "block" and like.plan["rows"] == "depth"
    assert short.plan["rows"].startswith("depth, as asked")


def test_no_new_rows_is_no_work() -> None:
    """Fact 23: a prompt that is wholly cached brings zero rows."""
    draft = golden("qwen35-4b")
    restart(draft)
    assert np.isfinite(slots(draft)).all(), "a block after nothing"
    feed(draft, [4, 5], features(2, len(draft.taps)), [64])
    wanted = slots(draft)
    draft.extend([], features(0, len(draft.taps)))
    draft.begin([4, 5])
    golden_models.assert_same_bits(slots(draft), wanted)


@pytest.mark.parametrize(
    "kind", [{"threads": 1}, {"isa": "avx2"}, {"isa": "portable", "threads": 1}]
)
@pytest.mark.parametrize("activations", golden_models.ACTIVATIONS)
def test_machines_and_threads_do_not_change_the_bits(
    folder: Path, kind: dict[str, object], activations: str
) -> None:
    recipe = Recipe(windows=(24, 0), seed=9)
    drafts = [made(folder, recipe, activations), made(folder, recipe, activations, **kind)]
    for draft in drafts:
        restart(draft)
        feed(draft, golden_models.tokens(70), features(70), [64, 3])
    golden_models.assert_same_bits(slots(drafts[1]), slots(drafts[0]), str(kind))


def test_assumed_rows_cost_what_real_ones_do(folder: Path) -> None:
    for recipe in (Recipe(), Recipe(windows=(24, 24))):
        draft = made(folder, recipe)
        draft.assume(500)
        assert (draft.length, draft.gap) == (500, 0)
        assert np.isfinite(slots(draft)).all()
        draft.extend([1, 2], features(2))
        assert draft.length == 502
        restart(draft)


def test_an_interrupt_while_the_cache_moves_loses_rows_but_never_mixes_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(windows=(24, 24), seed=11)
    model = golden_models.target("llama-tiny-F32", "f32", context=2048)
    draft = load_draft(write_folder(folder / "interrupt", recipe), model)
    tokens, rows = golden_models.tokens(1600), features(1600)

    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(draft._rows.cache, "drop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        feed(draft, tokens, rows, [64])
    monkeypatch.undo()
    draft.begin(tokens[:1400])
    assert (draft.length, draft.gap) == (1400, 1400)
    feed(draft, tokens, rows, [64])
    assert_reference(draft, recipe, rows, first=1400)


def test_assumed_rows_are_never_taken_for_real_ones() -> None:
    draft = golden("qwen35-4b")
    draft.assume(20)
    draft.begin([0] * 20)
    assert draft.gap == 20
    restart(draft)


def test_bad_calls_are_refused() -> None:
    draft = golden("qwen35-4b")
    restart(draft)
    width = len(draft.taps)
    with pytest.raises(RequestError, match="depth 16 is outside 1 .. 15"):
        draft.propose(1, 16)
    with pytest.raises(RequestError, match="depth 0"):
        draft.propose(1, 0)
    with pytest.raises(RequestError, match="anchor 320 is outside the vocabulary of 320"):
        draft.propose(320, 1)
    with pytest.raises(RequestError, match=r"features are \(2, 64\), expected \(2, 320\)"):
        draft.extend([1, 2], features(2, 1))
    with pytest.raises(RequestError, match="65 context rows at once"):
        draft.extend([0] * 65, features(65, width))
    with pytest.raises(RequestError, match="641 tokens exceed the draft's context of 640"):
        draft.begin([0] * 641)
    draft.assume(639)
    with pytest.raises(RequestError, match="2 more tokens after 639 exceed"):
        draft.extend([1, 2], features(2, width))
    assert np.isfinite(slots(draft)).all(), "a block may end beyond the context"
    restart(draft)


@pytest.mark.parametrize("on_host", [True, False])
def test_pieces_add_up(on_host: bool) -> None:
    backend = SimpleNamespace(chunk=64, on_host=on_host)
    for count in range(65):
        split = pieces(count, backend)
        assert sum(split) == count
        assert all(size <= 16 or size % 16 == 0 for size in split)
        assert not on_host or set(split) <= {*range(1, 17), 64}
