"""Files that are well formed GGUF and no runnable model: one line that names what is wrong, never a hang or a crash."""

import time

import golden_models as gm
import numpy as np
import pytest

from sparkinfer.backend.cpu import CpuBackend
from sparkinfer.errors import GGUFError, RequestError, ShapeError, SparkError, UnsupportedError
from sparkinfer.gguf import open_gguf, write_gguf
from sparkinfer.models import load_target
from sparkinfer.models.config import read_config


def variant(tmp_path, name="llama-tiny-F32", drop=(), change=None, tensors=None):
    """A copy of a golden file without some tensors and keys, with others in their place."""
    change, tensors = change or {}, tensors or {}
    with open_gguf(gm.FOLDER / f"{name}.gguf") as file:
        metadata = {k: v for k, v in file.metadata.items() if k not in drop} | change
        kept = [
            (info.name, info.shape, info.type_name, bytes(file.data(info.name)))
            for info in file.tensors.values()
            if info.name not in drop and info.name not in tensors
        ]
    kept += [(key, *value) for key, value in tensors.items()]
    target = tmp_path / "variant.gguf"
    write_gguf(target, metadata, kept)
    return target


def floats(*shape):
    values = np.random.default_rng(0).standard_normal(shape[::-1]).astype(np.float32)
    return shape, "F32", values.tobytes()


def refused(path, error=ShapeError, **options):
    """The one line of the error; loading takes no time and no memory that the file does not justify."""
    start = time.monotonic()
    with pytest.raises(error) as caught:
        load_target(path, threads=2, **options).close()
    assert time.monotonic() - start < 5
    assert caught.value.exit_code == {RequestError: 2}.get(error, 65)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unchanged_copy_loads(tmp_path):
    model = load_target(variant(tmp_path), threads=1, context=32)
    row = model.forward(model.new_state(), gm.tokens(5))[0]
    gm.assert_same_bits(row, gm.single_rows("llama-tiny-F32", "int8", 5)[4])
    model.close()


def test_all_missing_tensors_and_wrong_shapes_are_listed(tmp_path):
    path = variant(
        tmp_path,
        drop=("blk.1.attn_k.weight", "blk.3.ffn_norm.weight"),
        tensors={"blk.0.attn_q.weight": floats(64, 48), "output_norm.weight": floats(32)},
    )
    line = refused(path)
    for part in (
        "blk.1.attn_k.weight is missing",
        "blk.3.ffn_norm.weight is missing",
        "blk.0.attn_q.weight is 64 x 48, expected 64 x 64",
        "output_norm.weight is 32, expected 64",
    ):
        assert part in line


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight"])
def test_a_model_needs_its_ends(tmp_path, name):
    assert f"{name} is missing" in refused(variant(tmp_path, drop=(name,)))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("qwen35-tiny-F32", "blk.1.ssm_a"),
        ("qwen35-tiny-F32", "blk.0.ssm_conv1d.weight"),
        ("qwen35moe-tiny-F32", "blk.1.ffn_gate_exps.weight"),
        ("qwen35moe-tiny-F32", "blk.0.ffn_gate_inp_shexp.weight"),
    ],
)
def test_hybrid_layers_need_theirs(tmp_path, file, name):
    assert f"{name} is missing" in refused(variant(tmp_path, file, drop=(name,)))


def test_an_unknown_architecture_lists_the_known_ones(tmp_path):
    line = refused(variant(tmp_path, change={"general.architecture": "mamba9"}), UnsupportedError)
    assert "mamba9" in line
    for known in ("llama", "qwen3", "qwen35", "qwen35moe"):
        assert known in line


def test_weights_that_nothing_reads_are_refused(tmp_path):
    line = refused(variant(tmp_path, tensors={"blk.2.attn_q.bias": floats(64)}), UnsupportedError)
    assert "blk.2.attn_q.bias" in line


def test_a_type_without_decoder_is_named_with_the_known_ones(tmp_path):
    data = ((256, 64), "IQ1_S", bytes(64 * 50))
    path = variant(
        tmp_path, change={"llama.embedding_length": 256}, tensors={"output.weight": data}
    )
    with open_gguf(path) as file, pytest.raises(UnsupportedError, match="IQ1_S") as caught:
        file.require_decodable(["output.weight"])
    assert "Q4_K" in str(caught.value)


@pytest.mark.parametrize("key", ["attention.head_count", "embedding_length", "block_count",
                                 "attention.layer_norm_rms_epsilon", "context_length"])  # fmt: skip
def test_a_missing_key_is_named(tmp_path, key):
    line = refused(variant(tmp_path, drop=(f"llama.{key}",)), GGUFError)
    assert f"llama.{key}" in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 0),
        ("llama.block_count", 5),
        ("llama.block_count", 2**31 - 1),
        ("llama.nextn_predict_layers", 4),
        ("llama.nextn_predict_layers", 2**30),
        ("llama.attention.head_count", 3),
        ("llama.attention.head_count", 2**31 - 1),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.head_count_kv", 0),
        ("llama.attention.key_length", 24),
        ("llama.attention.key_length", 2**31 - 16),
        ("llama.attention.value_length", 32),
        ("llama.rope.dimension_count", 18),
        ("llama.rope.dimension_count", 15),
        ("llama.rope.freq_base", 0.0),
        ("llama.rope.freq_base", -1.0),
        ("llama.rope.scaling.type", "yarn"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0),
        ("llama.embedding_length", 2**31 - 16),
        ("llama.feed_forward_length", 2**31 - 32),
        ("llama.expert_count", 8),
    ],
)
def test_contradictory_metadata_is_refused(tmp_path, key, value):
    refused(variant(tmp_path, change={key: value}), SparkError)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_used_count", 9),
        ("expert_used_count", 0),
        ("expert_count", 2**31 - 1),
        ("ssm.state_size", 24),
        ("ssm.inner_size", 128),
        ("ssm.group_count", 3),
        ("ssm.group_count", 0),
        ("ssm.conv_kernel", 5),
        ("ssm.conv_kernel", 2**31 - 1),
        ("ssm.time_step_rank", 8),
        ("full_attention_interval", 0),
        ("full_attention_interval", 3),
        ("attention.recurrent_layers", [True, False]),
    ],
)
def test_contradictory_hybrid_metadata_is_refused(tmp_path, key, value):
    name = "qwen35moe-tiny-F32"
    refused(variant(tmp_path, name, change={f"qwen35moe.{key}": value}), SparkError)


def widths(n_ff):
    change = {"llama.feed_forward_length": n_ff}
    tensors = {}
    for layer in range(4):
        for kind in ("gate", "up"):
            tensors[f"blk.{layer}.ffn_{kind}.weight"] = floats(64, n_ff)
        tensors[f"blk.{layer}.ffn_down.weight"] = floats(n_ff, 64)
    return change, tensors


def test_a_feed_forward_width_the_kernels_cannot_take_is_an_error_not_a_crash(tmp_path):
    change, tensors = widths(48)
    assert "48" in refused(variant(tmp_path, change=change, tensors=tensors), UnsupportedError)


def test_gate_and_up_of_float_and_quantised_types_run(tmp_path):
    """Mixed types are legal; both read the same activation, so the quantised one is expanded."""
    up = ((64, 128), "Q8_0", bytes(128 * 2 * 34))
    model = load_target(
        variant(tmp_path, tensors={"blk.0.ffn_up.weight": up}), threads=1, context=32
    )
    assert np.isfinite(model.forward(model.new_state(), gm.tokens(5), rows="all")).all()
    model.close()


def test_a_context_beyond_the_models_is_refused(tmp_path):
    assert "4096" in refused(variant(tmp_path), RequestError, context=4097)


def test_rotation_divisors_must_fit(tmp_path):
    path = variant(tmp_path, tensors={"rope_freqs.weight": floats(7)})
    assert "rope_freqs.weight has 7 values, expected 8" in refused(path)


def test_rotation_divisors_change_the_logits(tmp_path):
    ones = ((8,), "F32", np.ones(8, np.float32).tobytes())
    other = ((8,), "F32", np.full(8, 8, np.float32).tobytes())
    rows = []
    for divisors in (ones, other):
        path = variant(tmp_path, tensors={"rope_freqs.weight": divisors})
        model = load_target(path, threads=1, context=32)
        rows.append(model.forward(model.new_state(), gm.tokens(5))[0].copy())
        model.close()
    gm.assert_same_bits(rows[0], gm.single_rows("llama-tiny-F32", "int8", 5)[4])
    assert np.abs(rows[0] - rows[1]).max() > 0.01


def test_the_config_of_every_golden_file():
    for name in gm.MODELS:
        with open_gguf(gm.FOLDER / f"{name}.gguf") as file:
            config = read_config(file)
        assert config.architecture == name.split("-")[0]
        assert len(config.recurrent) == config.n_layers
        assert (config.moe is not None) == ("moe" in name)
        assert (config.gdn is not None) == ("qwen35" in name)


def test_heads_that_blocks_of_the_cache_do_not_fit_are_refused(tmp_path):
    line = refused(variant(tmp_path), UnsupportedError, kv_cache="q8_0")
    assert (
        "--kv-cache q8_0 has one scale for 32 values of a head, and this model's heads have 16"
        in line
    )
    assert "f16 and f32 work" in line


def test_a_backend_without_kernels_for_a_cache_says_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(CpuBackend, "cache_formats", ("f32", "f16"))
    path = variant(tmp_path, "qwen3-tiny-Q8_0")
    line = refused(path, UnsupportedError, kv_cache="q8_0", device="cpu")
    assert line == "--kv-cache q8_0 is not supported on the cpu backend; it has f32 and f16"
