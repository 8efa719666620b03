"""Targets as folders of safetensors: the same model as the GGUF file with the same weights."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from folder_toys import change_config, largest_difference, write_model_folder
from safetensors.torch import load_file, save_file
from tokenizers import Regex, pre_tokenizers
from training_toys import GOLDEN, LLAMA, QWEN3

from sparkinfer.chat import ChatTemplate
from sparkinfer.errors import GGUFError, MissingFileError, ShapeError, SparkError, UnsupportedError
from sparkinfer.gguf import open_gguf
from sparkinfer.models.config import read_config
from sparkinfer.tokenizer import Tokenizer
from sparkinfer.training import folder_tokenizer
from sparkinfer.training.config import DataPlan, TrainPlan
from sparkinfer.training.folder import ModelFolder
from sparkinfer.training.pipeline import Job, run_job
from sparkinfer.training.target import TorchTarget, load_torch_target

HYBRID, EXPERTS = GOLDEN / "qwen35-tiny-F32.gguf", GOLDEN / "qwen35moe-tiny-F32.gguf"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each golden model, never changed by a test."""
    base = tmp_path_factory.mktemp("folders")
    for source in (LLAMA, QWEN3, HYBRID, EXPERTS):
        write_model_folder(source, base / source.stem)
    return {source.stem: base / source.stem for source in (LLAMA, QWEN3, HYBRID, EXPERTS)}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder that a test may change."""
    write_model_folder(LLAMA, tmp_path / "llama")
    return tmp_path / "llama"


def load(path: Path) -> TorchTarget:
    return load_torch_target(ModelFolder(path), "cpu", torch.float32)


def logits(model: TorchTarget) -> torch.Tensor:
    tokens = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(3))
    return model.logits(tokens)


@pytest.mark.parametrize("source", [LLAMA, QWEN3, HYBRID, EXPERTS], ids=lambda p: p.stem)
def test_the_model_is_that_of_the_file(source: Path, folders: dict[str, Path]) -> None:
    file = open_gguf(source)
    got, wanted = (
        load(folders[source.stem]),
        load_torch_target(file, "cpu", torch.float32),
    )
    name = got.config.name
    assert name == source.stem
    assert replace(got.config, name="", eps=0) == replace(read_config(file), name="", eps=0)
    assert got.config.eps == pytest.approx(wanted.config.eps)
    if source in (LLAMA, QWEN3):
        assert torch.equal(logits(got), logits(wanted))
    else:  # norms less 1 and the logarithm of a decay do not come back to the last bit
        assert largest_difference(logits(got), logits(wanted)) < 2e-3


def test_experts_stacked_or_one_by_one(folders: dict[str, Path], tmp_path: Path) -> None:
    write_model_folder(EXPERTS, tmp_path / "each", each_expert=True)
    names = load_file(tmp_path / "each" / "model.safetensors")
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in names
    assert torch.equal(logits(load(tmp_path / "each")), logits(load(folders[EXPERTS.stem])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_byte_weights_in_shards_beside_a_vision_part(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    write_model_folder(HYBRID, tmp_path / "plain", dtype=dtype)
    wanted = logits(load(tmp_path / "plain"))
    folder = tmp_path / "plain"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    inner = {f"model.language_model.{n.removeprefix('model.')}": t for n, t in tensors.items()}
    inner["model.visual.blocks.0.norm1.weight"] = torch.ones(4)
    names = sorted(inner)
    shards = {
        f"model-{part}.safetensors": {name: inner[name] for name in names[part::2]}
        for part in (0, 1)
    }
    for shard, part in shards.items():
        save_file(part, folder / shard)
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    text = json.loads((folder / "config.json").read_text())
    nested = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(nested))
    assert torch.equal(logits(load(folder)), wanted)


@pytest.mark.parametrize("source", [LLAMA, QWEN3], ids=lambda p: p.stem)
def test_tokenizer_and_template_are_those_of_the_file(
    source: Path, folders: dict[str, Path]
) -> None:
    file, folder = open_gguf(source), ModelFolder(folders[source.stem])
    got, wanted = Tokenizer.from_gguf(folder), Tokenizer.from_gguf(file)
    assert (got.eos_id, got.add_bos, got.add_eos) == (wanted.eos_id, False, False)
    assert got.stop_ids == wanted.stop_ids and got.control == wanted.control
    pick = random.Random(0)
    for _ in range(50):
        text = "".join(pick.choices("abc de.\n'1,<|im_end|>é\U0001f600", k=30))
        for special in (False, True):
            ids = got.encode(text, parse_special=special)
            assert ids == wanted.encode(text, parse_special=special)
            assert got.decode(ids) == wanted.decode(ids)
    template = ChatTemplate.from_gguf(folder, got)
    try:
        assert template.template == file.metadata["tokenizer.chat_template"]
    finally:
        template.close()


def test_a_folder_and_a_file_train_the_same_draft(folders: dict[str, Path], tmp_path: Path) -> None:
    job = Job(
        model=LLAMA,
        output=tmp_path / "file",
        data=DataPlan(16, 32, 16, answer_limit=16, user_limit=4),
        plan=TrainPlan(steps=4, rows=4, anchors=4),
        layers=1,
        taps=(0, 2),
        block=3,
        quantisation="F32",
        device="cpu",
    )
    quiet = lambda *_anything: None  # noqa: E731
    run_job(job, quiet, quiet)
    run_job(replace(job, model=folders[LLAMA.stem], output=tmp_path / "folder"), quiet, quiet)
    one, two = (tmp_path / name / "model.safetensors" for name in ("file", "folder"))
    assert one.read_bytes() == two.read_bytes()
    assert (tmp_path / "folder" / "draft.gguf").stat().st_size > 1000


Q = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

MARKED = (Q % "").replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


@pytest.mark.parametrize(
    ("name", "cutter", "ignore_merges"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False), False),
        (
            "smollm",
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            ),
            False,
        ),
        ("qwen2", split(Q % ""), False),
        ("qwen35", split(MARKED), False),
        ("llama-bpe", split(Q % "{1,3}"), True),
    ],
)  # fmt: skip
def test_cutting_rules_of_published_folders_are_recognised(
    name: str, cutter: pre_tokenizers.PreTokenizer, ignore_merges: bool
) -> None:
    library = type("Library", (), {"pre_tokenizer": cutter})
    assert folder_tokenizer._rule(Path("x"), library, ignore_merges) == name


def test_a_rule_nobody_knows_is_refused() -> None:
    library = type(
        "Library", (), {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}
    )
    with pytest.raises(UnsupportedError, match="none of the known rules"):
        folder_tokenizer._rule(Path("x"), library, False)


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"model_type": "gemma3"}, UnsupportedError, "model_type 'gemma3'; accepted: llama, qwen3"),
        ({"quantization_config": {"bits": 4}}, UnsupportedError, "quantised safetensors"),
        ({"rope_scaling": {"rope_type": "llama3"}, "rope_parameters": None}, UnsupportedError, "'llama3'"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias is True"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act is 'gelu'.*accepted: 'silu'"),
        ({"num_hidden_layers": 2}, UnsupportedError, r"has layers\.2\..* \(and \d+ more\)"),
        ({"num_hidden_layers": 9}, GGUFError, r"no tensor layers\.\d\."),
        ({"num_hidden_layers": None}, GGUFError, "num_hidden_layers is None, expected a whole"),
        ({"intermediate_size": 64}, ShapeError, "ffn_gate.weight is .* expected"),
        ({"rms_norm_eps": "small"}, GGUFError, "rms_norm_eps is 'small', expected a number"),
        ({"tie_word_embeddings": False}, GGUFError, "no tensor lm_head.weight"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_for_is_said_in_one_line(
    llama: Path, values: dict[str, object], error: type[SparkError], says: str
) -> None:
    change_config(llama, **values)
    with pytest.raises(error, match=says) as caught:
        load(llama)
    assert "\n" not in str(caught.value) and str(llama) in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(llama: Path, name: str) -> None:
    (llama / name).unlink()
    with pytest.raises(MissingFileError, match=name.replace(".", r"\.")):
        ModelFolder(llama)


def test_weights_without_a_place_are_refused(llama: Path) -> None:
    path = llama / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}, path)
    with pytest.raises(UnsupportedError, match=r"has layers\.0\.self_attn\.q_proj\.bias"):
        ModelFolder(llama)
    save_file({name: value.to(torch.int8) for name, value in tensors.items()}, path)
    with pytest.raises(UnsupportedError, match="has type I8; accepted: F32, F16, BF16"):
        ModelFolder(llama)


def test_other_tokenizers_are_refused(llama: Path) -> None:
    path = llama / "tokenizer.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"pre_tokenizer": {"type": "Metaspace"}}))
    with pytest.raises(UnsupportedError, match="no byte-level BPE"):
        ModelFolder(llama)
    path.write_text(json.dumps(stored | {"normalizer": {"type": "Lowercase"}}))
    with pytest.raises(UnsupportedError, match="normalises text by Lowercase"):
        ModelFolder(llama)
    (llama / "tokenizer_config.json").unlink()
    change_config(llama, eos_token_id=None)
    path.write_text(json.dumps(stored))
    with pytest.raises(GGUFError, match="names an end token"):
        ModelFolder(llama)
    path.write_text("{")
    with pytest.raises(GGUFError, match="no readable JSON"):
        ModelFolder(llama)
