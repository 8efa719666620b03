"""What a draft's files say, wherever they say it, and every way in which draft and target do not belong together."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import golden_models
import numpy as np
import pytest
from draft_models import Recipe, features, write_folder

from sparkinfer.dflash.config import DraftConfig, default_taps, read_json_config
from sparkinfer.dflash.draft import load_draft
from sparkinfer.dflash.rotation import Rotation
from sparkinfer.errors import (
    GGUFError,
    MemoryLimitError,
    RequestError,
    ShapeError,
    UnsupportedError,
)

RECIPE = Recipe()
TWO_SLIDING = ["sliding_attention"] * 2


def config_of(folder: Path, **changes: Any) -> DraftConfig:
    """The configuration after changes of the top level; None removes a key."""
    values = RECIPE.json() | changes
    values = {key: value for key, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return read_json_config(folder)


def nested(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": RECIPE.json()["dflash_config"] | changes}


# ---- where the fields are ----


def test_nested_fields_come_before_the_top_level(tmp_path: Path) -> None:
    """Fact 48: the block size moved into `dflash_config`; read there first, the depth is one less."""
    assert config_of(tmp_path).block == 6
    old = {key: value for key, value in nested()["dflash_config"].items() if key != "block_size"}
    config = config_of(tmp_path, dflash_config=old, block_size=8)
    assert (config.block, config.max_depth) == (8, 7)
    assert config_of(tmp_path, block_size=8).block == 6
    assert config_of(tmp_path, dflash_config=old).block == 16
    everything = old | {"block_size": 9, "sample_from_anchor": True}
    config = config_of(tmp_path, dflash_config=None, **everything)
    assert (config.block, config.max_depth, config.mask_id, config.taps) == (9, 9, 317, (0, 2, 3))


def test_dspark_drafts_predict_the_next_token(tmp_path: Path) -> None:
    config = config_of(tmp_path, architectures=["Qwen3DSparkModel"], **nested(block_size=7))
    assert (config.from_anchor, config.max_depth) == (True, 7)
    config = config_of(
        tmp_path, architectures=["Qwen3DSparkModel"], **nested(sample_from_anchor=False)
    )
    assert not config.from_anchor


def test_the_widest_block_fills_the_widest_window(tmp_path: Path) -> None:
    assert config_of(tmp_path, **nested(block_size=16)).max_depth == 15
    assert config_of(tmp_path, **nested(block_size=16, sample_from_anchor=True)).max_depth == 15


@pytest.mark.parametrize(
    ("target_layers", "count", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (40, 5, (1, 10, 19, 28, 37)),
        (40, 8, (1, 6, 11, 16, 22, 27, 32, 37)),
        (64, 5, (1, 16, 31, 46, 61)),
        (24, 5, (1, 6, 11, 16, 21)),
        (30, 5, (1, 8, 14, 20, 27)),
        (30, 3, (1, 14, 27)),
        (30, 1, (15,)),
    ],
)
def test_layers_that_are_read_where_no_file_says(
    target_layers: int, count: int, taps: tuple[int, ...]
) -> None:
    assert default_taps(target_layers, count) == taps


def test_taps_left_out_follow_the_number_of_layers(tmp_path: Path) -> None:
    config = config_of(tmp_path, dflash_config={"mask_token_id": 5}, num_target_layers=36)
    assert config.taps == (1, 33)


# ---- sliding layers and causality ----


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({}, (0, 0), (False, False)),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}, (24, 0), (True, False)),
        ({"layer_types": TWO_SLIDING, "sliding_window": 24, "is_causal": False}, (24, 24), (False, False)),
        ({"is_causal": True}, (0, 0), (True, True)),
        (nested(causal=True), (0, 0), (True, True)),
        (nested(causal=False, use_swa=True, swa_window_size=9), (9, 9), (False, False)),
        ({"sliding_window": 24, "max_window_layers": 1}, (0, 24), (False, True)),
        ({"layer_types": TWO_SLIDING, "use_sliding_window": False}, (0, 0), (True, True)),
    ],
)  # fmt: skip
def test_attention_of_every_layer(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int, ...], causal: tuple[bool, ...]
) -> None:
    """Fact 10: layer types are obeyed; what the file says of causality beats what the types imply."""
    values = (
        {"layer_types": None, "use_sliding_window": True} if "max_window_layers" in changes else {}
    )
    if "use_swa" in changes.get("dflash_config", {}):
        values = {"layer_types": None, "use_sliding_window": None}
    elif "layer_types" in changes:
        values = {"use_sliding_window": True}
    config = config_of(tmp_path, **(values | changes))
    assert (config.windows, config.causal) == (windows, causal)
    assert config.shortens == all(causal)


# ---- rotation ----


def test_the_draft_turns_whole_heads_whatever_its_target_does(tmp_path: Path) -> None:
    """Fact 53: partial rotation and rotary sections are inherited from targets; drafts turn every dimension."""
    plain = write_folder(tmp_path / "a", RECIPE)
    extras = {
        "rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [4, 2, 2],
    }  # fmt: skip
    other = write_folder(
        tmp_path / "b", dataclasses.replace(RECIPE, top=(("rope_parameters", extras),))
    )
    model = golden_models.target("qwen35-tiny-F32", "f32")
    assert model.config.rotated < model.config.head_size
    rows = []
    for folder in (plain, other):
        values = json.loads((folder / "config.json").read_text()) | {"num_target_layers": 6}
        (folder / "config.json").write_text(json.dumps(values))
        draft = load_draft(folder, model)
        draft.extend([1] * 20, features(20))
        rows.append(draft.propose(3, 5).row(4, 3))
    golden_models.assert_same_bits(rows[1], rows[0])


def test_rope_theta_in_either_place(tmp_path: Path) -> None:
    assert config_of(tmp_path).rotation.base == 10000.0
    assert config_of(tmp_path, rope_parameters=None, rope_theta=1e7).rotation.base == 1e7
    config = config_of(tmp_path, rope_parameters={"rope_theta": 5e6}, rope_theta=1e7)
    assert config.rotation == Rotation(5e6)


def test_scaled_rotation(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 4.0}
    config = config_of(tmp_path, rope_parameters=None, rope_theta=1e4, rope_scaling=scaling)
    slow, plain = config.rotation.table(41, 32), Rotation(1e4).table(41, 32)
    np.testing.assert_allclose(slow[40], plain[10], atol=1e-5)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    yarn = config_of(tmp_path, rope_parameters=scaling | {"rope_theta": 1e4}).rotation
    assert yarn.original == 64
    assert yarn.attention == pytest.approx(0.1 * np.log(4) + 1)
    divisors = yarn.divisors(32)
    assert divisors is not None
    assert divisors[0] == 1.0 and divisors[-1] == 4.0 and (np.diff(divisors) >= 0).all()
    with pytest.raises(
        UnsupportedError, match="rope type 'llama3' is not supported; accepted: def"
    ):
        config_of(tmp_path, rope_parameters={"rope_type": "llama3"})
    with pytest.raises(GGUFError, match="factor is -1, expected a positive number"):
        config_of(tmp_path, rope_parameters=scaling | {"factor": -1})


# ---- values that are wrong ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64', expected a whole number"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"is_causal": 1}, "causal or is_causal is 1, expected true or false"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x', expected a number"),
        (nested(target_layer_ids="1"), "target_layer_ids is '1', expected a list of whole numbers"),
        (nested(mask_token_id=None), "mask_token_id is missing"),
        ({"dflash_config": 5}, "dflash_config is no object"),
        ({"layer_types": ["full_attention"]}, r"layer_types is \['full_attention'\], expected 2 entries"),
        ({"layer_types": ["full_attention", "x"]}, "layer_types has x; supported: full_attention"),
        ({"layer_types": TWO_SLIDING, "use_sliding_window": True}, "sliding_window is missing"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "architectures is .*Eagle3.*; drafts are: DFl"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        ({"attention_bias": True}, "attention_bias is True; supported: a draft without it"),
        (nested(attention_sink_bias=True), "attention_sink_bias is True"),
        (nested(attention_value_scale=0.5), "attention_value_scale is 0.5; supported: 1"),
        ({"num_hidden_layers": 0}, "0 layers of 6 heads"),
    ],
)  # fmt: skip
def test_bad_values_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((GGUFError, ShapeError, UnsupportedError), match=message):
        config_of(tmp_path, **changes)


def problem(folder: Path, tensors: dict[str, Any] | None = None, **changes: Any) -> str:
    """The one line that loading a draft fails with."""
    recipe = RECIPE
    write_folder(folder, recipe, recipe.tensors() if tensors is None else tensors)
    values = recipe.json() | changes
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises((ShapeError, UnsupportedError)) as error:
        load_draft(folder, golden_models.target("llama-tiny-F32"))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "its hidden size is 128, the target's is 64"),
        ({"vocab_size": 321}, "its vocabulary has 321 ids, the target's 320"),
        ({"num_target_layers": 36}, "it was made for a target of 36 layers, this one has 4"),
        (nested(target_layer_ids=[0, 2, 4]), r"it reads layers \[4\], the target has 0 \.\. 3"),
        (nested(target_layer_ids=[-1, 2, 3]), r"it reads layers \[-1\]"),
        (nested(target_layer_ids=[]), "it lists no layers of the target to read"),
        (nested(mask_token_id=320), "its mask token 320 is outside the vocabulary of 320"),
        (nested(block_size=1), r"its block size is 1, expected 2 \.\. 16"),
        (nested(block_size=17), r"blocks of 17 are not supported; accepted: 2 \.\. 16"),
        (nested(target_layer_ids=[0, 3]), "fc.weight is 192 x 64, expected 128 x 64"),
        ({"num_attention_heads": 3}, "q_proj.weight is 64 x 192, expected 64 x 96"),
        ({"num_key_value_heads": 4}, "6 heads are no multiple of 4 kv heads"),
        ({"num_key_value_heads": 2}, "k_proj.weight is 64 x 96, expected 64 x 64"),
        ({"head_dim": 16}, "q_norm.weight is 32, expected 16"),
        ({"intermediate_size": 64}, "up_proj.weight is 64 x 96, expected 64 x 64"),
    ],
)  # fmt: skip
def test_every_mismatch_has_its_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Fact 58: a draft of another family is refused at load, with what differs."""
    import re

    assert re.search(message, problem(tmp_path, **changes))


def test_all_mismatches_come_together(tmp_path: Path) -> None:
    line = problem(tmp_path, vocab_size=9, num_target_layers=7, intermediate_size=64)
    assert line.count(";") >= 4
    for part in ("9 ids", "7 layers", "layers.0.mlp.gate_proj", "layers.1.mlp.down_proj"):
        assert part in line


def test_missing_tensors(tmp_path: Path) -> None:
    tensors = RECIPE.tensors()
    del tensors["fc.weight"], tensors["layers.1.self_attn.k_norm.weight"]
    line = problem(tmp_path, tensors)
    assert "fc.weight is missing; layers.1.self_attn.k_norm.weight is missing" in line


def test_widths_the_kernels_do_not_have(tmp_path: Path) -> None:
    recipe = Recipe(head_size=24, heads=3, n_ff=80, kv_heads=3)
    with pytest.raises(UnsupportedError) as error:
        load_draft(write_folder(tmp_path, recipe), golden_models.target("llama-tiny-F32"))
    for part in ("head size is 24", "attention is 72", "feed-forward width is 80, expected a mul"):
        assert part in str(error.value)


def test_context_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path, RECIPE)
    model = golden_models.target("llama-tiny-F32")
    assert load_draft(folder, model, context=100).plan["context"] == 100
    with pytest.raises(RequestError, match=r"draft context 641 is outside 1 \.\. 640"):
        load_draft(folder, model, context=641)
    monkeypatch.setattr(type(model.backend), "memory", lambda _self: 1000)
    with pytest.raises(MemoryLimitError, match=r"needs about 0\.0 GiB .* are available"):
        load_draft(folder, model)


def test_the_plan_says_what_was_resolved(tmp_path: Path) -> None:
    """Facts 45 and 48: the depth in use and the draft's memory are there to be printed."""
    plan = load_draft(write_folder(tmp_path, RECIPE), golden_models.target("llama-tiny-F32")).plan
    assert json.loads(json.dumps(plan)) == plan
    assert (plan["block"], plan["max_depth"], plan["mask_id"]) == (6, 5, 317)
    assert plan["cache_bytes"] == 2 * 2 * 3 * (640 + 16) * 32 * 2
    assert plan["weight_bytes"].keys() == {"Q8_0"}
    stored = load_draft(tmp_path, golden_models.target("llama-tiny-F32"), floats="stored").plan
    assert stored["weight_bytes"].keys() == {"F32"}
    assert stored["weight_bytes"]["F32"] > 3 * plan["weight_bytes"]["Q8_0"]
