"""Both layouts of a draft: what is written comes back, and serving computes what training did."""

import json
from dataclasses import replace
from pathlib import Path

import golden_models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from training_toys import LLAMA, random_draft

from sparkinfer.dflash.draft import load_draft
from sparkinfer.errors import GGUFError, MissingFileError, UnsupportedError
from sparkinfer.gguf import open_gguf
from sparkinfer.training.draft import DraftModel
from sparkinfer.training.export import (
    base_metadata,
    read_draft_gguf,
    read_folder,
    tensor_names,
    write_draft_gguf,
    write_folder,
)
from sparkinfer.training.target import TorchTarget
from sparkinfer.training.trainer import output_head
from sparkinfer.training.weights import arrays_of, draft_of

VARIANTS = [
    {},
    {"causal": False, "markov_rank": 32},
    {"from_anchor": True, "vocabulary": 96, "markov_rank": 32, "window": 6},
    {"vocabulary": 96, "own_head": True},
]
IDS = torch.arange(7, 7 + 96 * 3, 3)


def ids_of(draft: DraftModel) -> torch.Tensor | None:
    return IDS if draft.shape.vocabulary else None


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_the_folder_comes_back(
    target: TorchTarget, tmp_path: Path, changes: dict[str, object]
) -> None:
    draft = random_draft(target, **changes)
    arrays = arrays_of(draft, ids_of(draft))
    write_folder(tmp_path, draft.shape, arrays)
    shape, back = read_folder(tmp_path)
    assert shape == draft.shape
    assert list(arrays) == tensor_names(shape)
    for name, array in arrays.items():
        assert np.abs(back[name] - array).max() <= np.abs(array).max() / 256, name  # bfloat16
    again, ids = draft_of(shape, back)
    assert all(
        torch.equal(torch.from_numpy(back[n]), torch.from_numpy(a))
        for n, a in arrays_of(again, ids).items()
    )


def test_config_says_what_published_drafts_say(target: TorchTarget, tmp_path: Path) -> None:
    draft = random_draft(target, window=6)
    write_folder(tmp_path, draft.shape, arrays_of(draft, None))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"]["target_layer_ids"] == [0, 2]
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert (config["sliding_window"], config["is_causal"], config["block_size"]) == (6, True, 4)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q4_1"])
def test_the_file_comes_back(
    target: TorchTarget, tmp_path: Path, changes: dict[str, object], kind: str
) -> None:
    draft = random_draft(target, **changes)
    arrays = arrays_of(draft, ids_of(draft))
    write_draft_gguf(tmp_path / "d.gguf", draft.shape, arrays, matrices=kind)
    with open_gguf(tmp_path / "d.gguf", check_tensors=not draft.shape.vocabulary) as file:
        assert file.require("dflash.target_layers", list) == [1, 3]  # upstream counts from 1
        shape, back = read_draft_gguf(file)
    assert replace(shape, eps=0.0, rope_base=0.0) == replace(draft.shape, eps=0.0, rope_base=0.0)
    assert (shape.eps, shape.rope_base) == pytest.approx(
        (draft.shape.eps, draft.shape.rope_base), rel=1e-6
    )
    share = {"F32": 0.0, "Q8_0": 1 / 200, "Q4_0": 1 / 7, "Q4_1": 1 / 6}[kind]
    for name, array in arrays.items():
        assert np.abs(back[name] - array).max() <= np.abs(array).max() * share, name


def test_the_file_names_its_base_and_how_it_is_stored(target: TorchTarget, tmp_path: Path) -> None:
    facts = {
        "name": "Some 1B",
        "organization": "Somebody",
        "license": "apache-2.0",
        "size_label": "1B",
    }
    base = base_metadata({f"general.{key}": value for key, value in facts.items()})
    draft = random_draft(target)
    arrays = arrays_of(draft, None)
    write_draft_gguf(tmp_path / "d.gguf", draft.shape, arrays, matrices="Q4_1", extra=base)
    with open_gguf(tmp_path / "d.gguf") as file:
        said = {key: value for key, value in file.metadata.items() if key.startswith("general.")}
    assert said == {
        "general.architecture": "dflash",
        "general.type": "model",
        "general.name": "DFlash draft",
        "general.quantization_version": 2,
        "general.file_type": 3,
        "general.base_model.count": 1,
        "general.base_model.0.name": "Some 1B",
        "general.base_model.0.organization": "Somebody",
        "general.license": "apache-2.0",
    }
    assert base_metadata({"general.architecture": "llama"}) == {}


def test_what_is_missing_is_named(target: TorchTarget, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"config\.json"):
        read_folder(tmp_path)
    with open_gguf(LLAMA) as file, pytest.raises(GGUFError, match=r"dflash\."):
        read_draft_gguf(file)
    draft = random_draft(target)
    arrays = arrays_of(draft, None)
    with pytest.raises(UnsupportedError, match=r"Q9_9.*accepted"):
        write_draft_gguf(tmp_path / "d.gguf", draft.shape, arrays, matrices="Q9_9")
    with pytest.raises(GGUFError, match=r"fc\.weight is"):
        draft_of(draft.shape, {**arrays, "fc.weight": arrays["fc.weight"][:1]})


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("layout", ["folder", "file"])
def test_serving_computes_what_training_did(
    target: TorchTarget, tmp_path: Path, changes: dict[str, object], layout: str
) -> None:
    """Logits of every slot after several anchors, through the engine's own draft in float32."""
    made = random_draft(target, **changes)
    arrays = arrays_of(made, ids_of(made))
    path = tmp_path / "d.gguf" if layout == "file" else tmp_path / "d"
    if layout == "file":
        write_draft_gguf(path, made.shape, arrays, matrices="F32")
        trained, ids = made, ids_of(made)
    else:
        write_folder(path, made.shape, arrays)
        trained, ids = draft_of(*read_folder(path))  # rounded to bfloat16
    served_target = golden_models.target(LLAMA.stem, "f32")
    served = load_draft(path, served_target)
    assert served.taps == made.shape.taps and served.max_depth == made.shape.depth
    tokens = golden_models.tokens(20)
    features, _ = target.features(torch.tensor([tokens]), made.shape.taps)
    head, _ = output_head(target, ids)
    served.begin([])
    for anchor in (3, 4, 11, 19):
        count = anchor - served.length
        served.extend(tokens[anchor - count : anchor], features[0, anchor - count : anchor].numpy())
        proposals = served.propose(tokens[anchor], made.shape.depth)
        place = torch.tensor([[anchor]])
        with torch.no_grad():
            embedded = F.embedding(torch.tensor([[tokens[anchor]]]), target.embedding)
            streams = trained(features, embedded, place)[0, 0]
        previous = tokens[anchor]
        for slot in range(made.shape.depth):
            wanted = trained.logits(streams[slot], torch.tensor(previous), head).detach().numpy()
            row = proposals.row(slot, previous)
            got = row if ids is None else row[ids.numpy()]
            np.testing.assert_allclose(got, wanted, atol=2e-4 * np.abs(wanted).max())
            previous = proposals.best(slot, previous)
            assert previous == int(wanted.argmax() if ids is None else ids[wanted.argmax()])
