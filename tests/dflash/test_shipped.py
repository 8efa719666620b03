"""The drafts that come with the package: found for their model, and only for it."""

from types import SimpleNamespace

import pytest

from sparkinfer.dflash.config_gguf import read_gguf_config
from sparkinfer.dflash.shipped import FOLDER, SHIPPED, shipped_draft
from sparkinfer.gguf import open_gguf

FACTS = {
    "general.name": "Smollm2 135M 8k Lc100K Mix1 Ep2",
    "llama.block_count": 30,
    "llama.embedding_length": 576,
}


def model(**changes):
    metadata = {**FACTS, **changes}

    def get(key, kind, default):
        value = metadata.get(key, default)
        assert isinstance(value, kind)
        return value

    return SimpleNamespace(architecture="llama", get=get)


def test_the_default_model_has_a_draft():
    assert shipped_draft(model()) == FOLDER / "smollm2-135m-dflash.gguf"


@pytest.mark.parametrize(
    "changes",
    [{"general.name": "Another"}, {"llama.block_count": 32}, {"llama.embedding_length": 960}],
)
def test_another_model_has_none(changes):
    assert shipped_draft(model(**changes)) is None


@pytest.mark.parametrize("draft", SHIPPED, ids=lambda draft: draft.filename)
def test_every_file_is_there_small_and_made_for_its_model(draft):
    path = FOLDER / draft.filename
    assert 0 < path.stat().st_size <= 20_000_000
    with open_gguf(path) as file:
        config = read_gguf_config(file, 49152)
        assert config.n_embd == draft.n_embd
        assert all(0 <= tap < draft.n_layers for tap in config.taps)
    assert draft.filename in (FOLDER / "README.md").read_text()
