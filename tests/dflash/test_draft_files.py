"""The same draft from every kind of file gives the same logits; damaged and foreign files are one clear error."""

import json
from pathlib import Path
from typing import Any

import golden_models
import numpy as np
import pytest
from draft_models import (
    Recipe,
    block_hidden,
    features,
    gguf_metadata,
    gguf_name,
    write_folder,
    write_gguf_draft,
)
from kernel_machine import random_blocks
from safetensors.numpy import save_file

from sparkinfer.dflash.checkpoint import open_safetensors
from sparkinfer.dflash.draft import BlockDraft, load_draft
from sparkinfer.errors import GGUFError, MissingFileError, ShapeError, UnsupportedError
from sparkinfer.gguf import write_gguf
from sparkinfer.quant.formats import dequantize

RECIPE = Recipe(windows=(24, 0))
DIALECTS = ("dflash", "qwen35-dflash-draft", "dflash-draft", "gemma4-dflash-draft")


def loaded(path: Path, activations: str = "f32", name: str = "llama-tiny-F32") -> BlockDraft:
    return load_draft(path, golden_models.target(name, activations))


def slots(draft: BlockDraft, anchor: int = 7, rows: int = 40) -> np.ndarray:
    """Logits [depth, ids] after some context."""
    draft.begin([])
    h = draft.config.n_embd
    draft.extend(golden_models.tokens(rows), features(rows, len(draft.taps), h=h))
    proposals = draft.propose(anchor, draft.max_depth)
    return np.stack([proposals.row(slot, anchor) for slot in range(proposals.depth)])


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return slots(loaded(write_folder(tmp_path_factory.mktemp("draft"), RECIPE)))


@pytest.mark.parametrize("arch", DIALECTS)
def test_gguf_dialects(tmp_path: Path, arch: str, wanted: np.ndarray) -> None:
    """Fact 9: upstream counts tapped layers from 1, the others from 0."""
    draft = loaded(write_gguf_draft(tmp_path / "draft.gguf", RECIPE, arch))
    assert draft.taps == RECIPE.taps
    assert draft.config.causal == (True, False)
    assert draft.plan["layout"] == f"gguf {arch}"
    golden_models.assert_same_bits(slots(draft), wanted)


def bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_float_types_of_safetensors(tmp_path: Path) -> None:
    """BF16 has no numpy type: its bytes are read as they are."""
    full = {
        n: (bf16(v).astype(np.uint32) << 16).view(np.float32) for n, v in RECIPE.tensors().items()
    }
    one = slots(loaded(write_folder(tmp_path / "f32", RECIPE, full)))
    write_bf16(tmp_path / "bf16", {n: bf16(v) for n, v in full.items()})
    draft = loaded(tmp_path / "bf16")
    golden_models.assert_same_bits(slots(draft), one)
    halves = {n: v.astype(np.float16) for n, v in full.items()}
    half = slots(loaded(write_folder(tmp_path / "f16", RECIPE, halves)))
    np.testing.assert_allclose(half, one, atol=0.05)


def test_floats_become_q8_0_beside_an_int8_target(tmp_path: Path, wanted: np.ndarray) -> None:
    """Half the bytes to read, and nearly the same proposals; in float32 mode nothing is rounded."""
    folder = write_folder(tmp_path, RECIPE)
    model = golden_models.target("llama-tiny-F32", "int8")
    short, stored = load_draft(folder, model), load_draft(folder, model, floats="stored")
    np.testing.assert_allclose(slots(stored), wanted, rtol=0, atol=0.05)  # the cache is float16
    assert np.corrcoef(slots(short).ravel(), wanted.ravel())[0, 1] > 0.995
    exact = loaded(folder)
    assert exact.plan["weight_bytes"].keys() == {"F32"}
    golden_models.assert_same_bits(slots(exact), wanted)


def write_bf16(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file with BF16 tensors, written byte by byte."""
    write_folder(folder, RECIPE)
    header: dict[str, Any] = {}
    at = 0
    for name, bits in tensors.items():
        header[name] = {
            "dtype": "BF16",
            "shape": bits.shape,
            "data_offsets": [at, at + bits.nbytes],
        }
        at += bits.nbytes
    text = json.dumps(header).encode()
    body = b"".join(bits.tobytes() for bits in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_shards_and_prefixed_names(tmp_path: Path, wanted: np.ndarray) -> None:
    write_folder(tmp_path, RECIPE)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(RECIPE.tensors())
    places = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(names)}
    for place in set(places.values()):
        part = {f"model.{n}": v for n, v in RECIPE.tensors().items() if places[n] == place}
        save_file(part, tmp_path / place)
    index = {"weight_map": {f"model.{n}": p for n, p in places.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    golden_models.assert_same_bits(slots(loaded(tmp_path)), wanted)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"lacks part-1\.safetensors"):
        loaded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../part"}}')
    with pytest.raises(GGUFError, match=r"names '\.\./part'"):
        loaded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(GGUFError, match="no readable weight_map"):
        loaded(tmp_path)


def test_fused_projections(tmp_path: Path, wanted: np.ndarray) -> None:
    tensors = RECIPE.tensors()
    for layer in range(2):
        parts = [tensors.pop(f"layers.{layer}.self_attn.{x}_proj.weight") for x in "qkv"]
        tensors[f"layers.{layer}.self_attn.qkv_proj.weight"] = np.concatenate(parts)
    golden_models.assert_same_bits(slots(loaded(write_folder(tmp_path, RECIPE, tensors))), wanted)


# ---- quantised drafts ----

BIG = Recipe(h=256, heads=4, kv_heads=2, head_size=64, n_ff=256, taps=(0, 1, 3), windows=(24, 0))
BIG_TARGET = "qwen35-tiny256-Q4_K_M"


def quantised(kind: str) -> dict[str, tuple[str, Any]]:
    """Every matrix as random blocks."""
    found = {}
    for seed, (name, values) in enumerate(BIG.tensors().items()):
        if values.ndim == 2:
            blocks = random_blocks(kind, values.size, seed)
            found[name] = (kind, blocks)
    return found


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q4_0", "Q6_K", "BF16"])
def test_quantised_drafts(tmp_path: Path, kind: str) -> None:
    """Fact 43: every format goes through the same products; in float32 it is the draft of its expanded values."""
    blocks = quantised(kind)
    path = write_gguf_draft(tmp_path / "draft.gguf", BIG, tensors=blocks)
    floats = {
        name: np.asarray(dequantize(*blocks[name]), np.float32).reshape(values.shape)
        if name in blocks
        else values
        for name, values in BIG.tensors().items()
    }
    folder = write_folder(tmp_path / "floats", BIG, floats)
    exact = slots(loaded(folder, "f32", BIG_TARGET))
    golden_models.assert_same_bits(slots(loaded(path, "f32", BIG_TARGET)), exact)
    draft = load_draft(path, golden_models.target(BIG_TARGET), floats="stored")
    assert kind in draft.plan["weight_bytes"]
    got = slots(draft)
    assert np.isfinite(got).all()
    closeness = np.corrcoef(got.ravel(), exact.ravel())[0, 1]
    assert closeness > (0.98 if kind != "BF16" else 0.995), (
        closeness
    )  # the target's head is Q4_K or Q6_K here


def test_a_mix_of_formats_in_one_layer(tmp_path: Path) -> None:
    """k and v of different families read two forms of one activation."""
    q8, floats = quantised("Q8_0"), quantised("BF16")
    chosen = {
        name: (q8 if "k_proj" in name or "up_proj" in name or "layers.1" in name else floats)[name]
        for name in q8
    }
    draft = loaded(
        write_gguf_draft(tmp_path / "draft.gguf", BIG, tensors=chosen), "int8", BIG_TARGET
    )
    values = {
        name: np.asarray(dequantize(*chosen[name]), np.float32).reshape(t.shape)
        if name in chosen
        else t
        for name, t in BIG.tensors().items()
    }
    exact = slots(loaded(write_folder(tmp_path / "floats", BIG, values), "f32", BIG_TARGET))
    assert np.corrcoef(slots(draft).ravel(), exact.ravel())[0, 1] > 0.98


# ---- optional parts ----


def reduced(tmp_path: Path, **tensors: np.ndarray) -> BlockDraft:
    more = {name.replace("__", "."): value for name, value in tensors.items()}
    return loaded(write_folder(tmp_path, RECIPE, RECIPE.tensors() | more))


IDS = np.array([3, 5, 6, 100, 101, 250, 319])
ELSEWHERE = np.setdiff1d(np.arange(320), IDS)


@pytest.mark.parametrize("form", ["d2t", "draft_ids"])
def test_a_reduced_vocabulary_borrows_the_rows_of_the_target(
    tmp_path: Path, form: str, wanted: np.ndarray
) -> None:
    values = IDS - np.arange(len(IDS)) if form == "d2t" else IDS
    draft = reduced(tmp_path, **{form: values.astype(np.int64)})
    got = slots(draft)
    golden_models.assert_same_bits(
        np.ascontiguousarray(got[:, IDS]), np.ascontiguousarray(wanted[:, IDS])
    )
    assert (got[:, ELSEWHERE] < -1e29).all()
    assert np.isfinite(got).all()
    best = [draft.propose(7, 5).best(slot, 7) for slot in range(5)]
    assert best == IDS[wanted[:, IDS].argmax(axis=1)].tolist()
    assert (draft.plan["head"], draft.plan["head_ids"]) == ("rows of the target's", 7)


def test_a_reduced_vocabulary_of_a_quantised_target(tmp_path: Path) -> None:
    """The rows keep the target's format: the slots have the bits of the whole head's."""
    whole = write_folder(tmp_path / "whole", BIG)
    few = write_folder(tmp_path / "few", BIG, BIG.tensors() | {"draft_ids": IDS.astype(np.int32)})
    for activations in golden_models.ACTIVATIONS:
        one, other = (slots(loaded(path, activations, BIG_TARGET)) for path in (whole, few))
        golden_models.assert_same_bits(
            np.ascontiguousarray(other[:, IDS]), np.ascontiguousarray(one[:, IDS])
        )


def hidden(draft: BlockDraft, rows: np.ndarray) -> np.ndarray:
    """Naive final hidden states after the context of `slots`."""
    return block_hidden(RECIPE, RECIPE.tensors(), features(40, 3), rows)


def test_own_head_embedding_and_mask(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    head, table = rng.standard_normal((2, 7, 64)).astype(np.float32)
    table = rng.standard_normal((320, 64)).astype(np.float32)
    mask = rng.standard_normal(64).astype(np.float32)
    draft = reduced(
        tmp_path, d2t=(IDS - np.arange(7)).astype(np.int64), t2d=np.isin(np.arange(320), IDS),
        lm_head__weight=head, embed_tokens__weight=table, mask_embedding=mask,
    )  # fmt: skip
    block = np.stack([table[7]] + [mask] * 5)
    np.testing.assert_allclose(
        slots(draft)[:, IDS], (hidden(draft, block) @ head.T)[1:], rtol=0, atol=1e-4
    )
    assert draft.plan["head"] == "own"


@pytest.mark.parametrize("form", ["all", "reduced", "reduced w2"])
def test_markov_head(tmp_path: Path, form: str, wanted: np.ndarray) -> None:
    """A slot's logits depend on the token chosen before it, and on nothing else that was chosen."""
    rng = np.random.default_rng(9)
    w1, w2 = rng.standard_normal((2, 320, 16)).astype(np.float32)
    more: dict[str, np.ndarray] = {"markov_head__markov_w1__weight": w1}
    more["markov_head__markov_w2__weight"] = w2[IDS] if form == "reduced w2" else w2
    if form != "all":
        more["draft_ids"] = IDS.astype(np.int64)
    draft = reduced(tmp_path, **more)
    ids = np.arange(320) if form == "all" else IDS
    slots(draft)
    proposals = draft.propose(7, 5)
    for slot, previous in ((0, 7), (1, 3), (1, 4), (4, 319)):
        expected = wanted[slot] + w2 @ w1[previous]
        np.testing.assert_allclose(
            proposals.row(slot, previous)[ids], expected[ids], rtol=0, atol=1e-4
        )
        assert proposals.best(slot, previous) == ids[expected[ids].argmax()]
    golden_models.assert_same_bits(proposals.row(1, 3), proposals.row(1, 3))


def test_sampling_from_the_anchor(tmp_path: Path) -> None:
    """Next-token indexing: B inputs give B tokens, slot 0 from the anchor's own row."""
    shifted = Recipe(windows=(24, 0), extra=(("sample_from_anchor", True),))
    draft = loaded(write_folder(tmp_path, shifted))
    assert draft.max_depth == RECIPE.block
    model = golden_models.target("llama-tiny-F32", "f32")
    block = model.embedding.take([7] + [RECIPE.mask] * 5)
    np.testing.assert_allclose(
        slots(draft), hidden(draft, block) @ model.embedding.take(range(320)).T, rtol=0, atol=1e-4
    )


def test_logits_that_are_no_numbers_stay_finite_rows(tmp_path: Path) -> None:
    """A draft gone wrong proposes something; it never stops the target."""
    tensors = RECIPE.tensors()
    tensors["norm.weight"][3] = np.nan
    draft = loaded(write_folder(tmp_path, RECIPE, tensors))
    assert np.isfinite(slots(draft)).all()
    assert 0 <= draft.propose(7, 2).best(0, 7) < 320


# ---- what is refused ----


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="there is no draft at"):
        loaded(tmp_path / "nowhere")
    with pytest.raises(MissingFileError, match=r"has no config\.json"):
        loaded(tmp_path)
    write_folder(tmp_path / "a", RECIPE)
    weights = tmp_path / "a" / "model.safetensors"
    raw = weights.read_bytes()
    for damaged in (raw[:-10], raw[:100], b"", b"\xff" * 64, raw[:8] + b"x" + raw[9:]):
        weights.write_bytes(damaged)
        with pytest.raises(GGUFError, match="no readable safetensors file"):
            loaded(tmp_path / "a")
    weights.unlink()
    with pytest.raises(MissingFileError, match=r"lacks model\.safetensors"):
        loaded(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("{")
    with pytest.raises(GGUFError, match="no readable JSON"):
        loaded(tmp_path / "a")
    path = write_gguf_draft(tmp_path / "b.gguf", RECIPE)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(GGUFError):
        loaded(path)


def test_a_target_is_no_draft() -> None:
    with pytest.raises(UnsupportedError, match="architecture 'llama'; drafts are: dflash, qwen35"):
        loaded(golden_models.FOLDER / "llama-tiny-F32.gguf")


def test_types_without_decoder(tmp_path: Path) -> None:
    tensors = RECIPE.tensors() | {"fc.weight": np.ones((64, 192), np.float64)}
    with pytest.raises(UnsupportedError, match=r"fc\.weight .* has type F64; supported types: F32"):
        loaded(write_folder(tmp_path, RECIPE, tensors))


def test_bad_draft_ids(tmp_path: Path) -> None:
    for ids, shown in (([1, 320], r"1 \.\. 320"), ([-1, 5], r"-1 \.\. 5"), ([4, 4], r"4 \.\. 4")):
        with pytest.raises(ShapeError, match=f"maps to ids {shown}; expected different ids"):
            reduced(tmp_path, draft_ids=np.array(ids, np.int64))
    with pytest.raises(UnsupportedError, match="draft_ids .* has type F32; accepted: I32, I64"):
        reduced(tmp_path, draft_ids=np.ones(3, np.float32))


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.self_attn.q_proj.bias",
        "markov_head.gate.weight",
        "layers.2.input_layernorm.weight",
    ],
)
def test_weights_that_nothing_reads(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"does not use: {name}"):
        loaded(write_folder(tmp_path, RECIPE, RECIPE.tensors() | {name: np.ones(64, np.float32)}))


# ---- the second generation ----

SECOND = Path(__file__).parents[1] / "data" / "draft" / "dflash2"
SECOND_RECIPE = Recipe(
    heads=4, kv_heads=1, head_size=16, n_ff=32, windows=(12, 12), causal=False, block=8, taps=(0, 1, 3), mask=300,
    base=1e7,
)  # fmt: skip
SECOND_NAMES = {
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
    "candidate_selector.predecessor_codebook": "selector_prev.weight",
    "candidate_selector.successor_codebook": "selector_next.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
SECOND_KEYS = {
    "conv_kernel_size": 4,
    "conv_group_size": 16,
    "selector_rank": 16,
    "selector_top_k": 8,
}


def second_gguf(path: Path, **keys: int) -> Path:
    """The stored second-generation draft in the upstream form."""
    stored = open_safetensors(SECOND)
    rows = []
    for name, entry in stored.tensors.items():
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        short = name.removeprefix(f"layers.{layer}.")
        known = SECOND_NAMES.get(short)
        target = f"blk.{layer}.{known}" if known and layer else known or gguf_name(name, True)
        values = np.asarray(
            dequantize(entry.type_name, stored.data(name).reshape(-1, 2)), np.float32
        )
        rows.append((target, entry.shape, "F32", values))
    more = {f"dflash.{key}": value for key, value in (SECOND_KEYS | keys).items()}
    write_gguf(path, gguf_metadata(SECOND_RECIPE, "dflash") | more, rows)
    return path


def test_the_second_generation_in_gguf(tmp_path: Path) -> None:
    draft, wanted = loaded(second_gguf(tmp_path / "draft.gguf")), loaded(SECOND)
    golden_models.assert_same_bits(slots(draft), slots(wanted))
    assert (draft.plan["convolutions"], draft.plan["candidates"]) == (4, 8)


def test_the_second_generation_beside_an_int8_target(tmp_path: Path) -> None:
    """Quantised matrices; tables and base weights stay what they are. Nothing is left behind between blocks."""
    draft = loaded(SECOND, "int8")
    got, exact = slots(draft), slots(loaded(SECOND))
    assert draft.plan["weight_bytes"].keys() == {"Q8_0"}
    both = (got > -1e29) & (exact > -1e29)
    assert both.sum() > 0.8 * (exact > -1e29).sum()
    np.testing.assert_allclose(got[both], exact[both], atol=1.0)
    golden_models.assert_same_bits(slots(draft, rows=20), slots(draft, rows=20))
    golden_models.assert_same_bits(slots(draft), got)
    one = draft.propose(7, 1)
    golden_models.assert_same_bits(one.row(0, 7), got[0], "depth 1 runs the whole block")


def test_second_generations_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="conv_group_size is 8, expected a multiple of 16"):
        loaded(with_config(tmp_path / "a", conv_group_size=8, widen=True))
    with pytest.raises(ShapeError, match=r"selector_top_k is 0, expected 1 \.\. 320"):
        loaded(with_config(tmp_path / "b", selector_top_k=0))
    with pytest.raises(ShapeError, match="base_kernel is 64 x 4 x 2, expected 64 x 3 x 2"):
        loaded(with_config(tmp_path / "c", conv_kernel_size=3))
    with pytest.raises(UnsupportedError, match="does not use: layers.0.attention_conv.base_kernel"):
        loaded(with_config(tmp_path / "d", conv_kernel_size=0))


def with_config(folder: Path, *, widen: bool = False, **changes: int) -> Path:
    """The stored draft with another `dflash_config`; `widen` doubles the rows of the kernel projections."""
    tensors = {
        name: np.asarray(
            dequantize(entry.type_name, stored.data(name).reshape(-1, 2)), np.float32
        ).reshape(entry.shape[::-1])
        for stored in [open_safetensors(SECOND)]
        for name, entry in stored.tensors.items()
    }
    if widen:
        tensors = {
            n: np.concatenate([v, v]) if "kernel_projection" in n else v for n, v in tensors.items()
        }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((SECOND / "config.json").read_text())
    config["dflash_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder
