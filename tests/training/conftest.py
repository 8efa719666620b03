"""Fixtures of the tests of training."""

import pytest
import torch
from training_toys import LLAMA

from sparkinfer.gguf import open_gguf
from sparkinfer.training.target import TorchTarget, load_torch_target


@pytest.fixture(autouse=True, scope="session")
def few_threads() -> None:
    """Tiny matrices: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target() -> TorchTarget:
    return load_torch_target(open_gguf(LLAMA), "cpu", torch.float32)
