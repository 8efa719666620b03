"""The target in torch against golden logits, our own engine, and itself token by token."""

from pathlib import Path

import numpy as np
import pytest
import torch
from golden_models import target as engine_target
from training_toys import LLAMA, QWEN3

from sparkinfer.errors import UnsupportedError
from sparkinfer.gguf import open_gguf, write_gguf
from sparkinfer.training.target import KeyValues, TorchTarget, load_torch_target


@pytest.mark.parametrize("path", [LLAMA, QWEN3], ids=lambda p: p.stem)
def test_golden_logits(path) -> None:  # type: ignore[no-untyped-def]
    model = load_torch_target(open_gguf(path), "cpu", torch.float32)
    golden = np.load(path.with_suffix(".npz"))
    tokens = torch.from_numpy(golden["tokens"].astype(np.int64))[None]
    got = model.logits(tokens)[0].numpy()
    assert np.abs(got - golden["logits"]).max() < 2e-4


@pytest.mark.parametrize("path", [LLAMA, QWEN3], ids=lambda p: p.stem)
def test_token_by_token_equals_the_whole(path) -> None:  # type: ignore[no-untyped-def]
    model = load_torch_target(open_gguf(path), "cpu", torch.float32)
    tokens = torch.randint(0, 320, (3, 9), generator=torch.Generator().manual_seed(0))
    whole, cache = model.logits(tokens), KeyValues(model, 3, 9)
    for place in range(9):
        step = model.step(tokens[:, place], cache, place)
        assert torch.allclose(step, whole[:, place], atol=1e-4)


def test_features_are_the_streams_that_serving_taps(target: TorchTarget) -> None:
    taps, tokens = (0, 1, 2), list(range(5, 25))
    served = engine_target(LLAMA.stem, "f32")
    served.set_taps(taps)
    try:
        served.forward(served.new_state(), tokens, rows="none")
        wanted = served.tapped(len(tokens)).copy()
    finally:
        served.set_taps(())
    got, final = target.features(torch.tensor([tokens]), taps)
    assert final is None
    assert np.abs(got[0].numpy() - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_features_keep_the_order_of_the_taps(target: TorchTarget) -> None:
    tokens = torch.tensor([[4, 5, 6]])
    n = target.config.n_embd
    forth, _ = target.features(tokens, (0, 2))
    back, _ = target.features(tokens, (2, 0))
    assert torch.equal(forth[..., :n], back[..., n:])
    assert torch.equal(forth[..., n:], back[..., :n])


def test_another_kind_is_refused_in_one_line(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", {"general.architecture": "gemma"})
    with pytest.raises(UnsupportedError, match=r"gemma target.*accepted: llama, qwen3, qwen35, "):
        load_torch_target(open_gguf(tmp_path / "other.gguf"), "cpu", torch.float32)
