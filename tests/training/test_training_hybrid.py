"""Hybrid models in torch against golden logits, the numpy specifications, our engine, and themselves token by token."""

import numpy as np
import pytest
import torch
from golden_models import target as engine_target
from training_toys import GOLDEN

from sparkinfer.gguf import open_gguf
from sparkinfer.kernels.experts.reference import experts as reference_experts
from sparkinfer.kernels.gated_delta.reference import gated_delta as reference_delta
from sparkinfer.kernels.gated_linear.reference import gated_linear
from sparkinfer.kernels.linear.reference import linear
from sparkinfer.kernels.route.reference import route
from sparkinfer.models.config import MoeConfig
from sparkinfer.training import moe as moe_module
from sparkinfer.training.gated_delta import gated_delta, gated_delta_step, unit, unit_inverse
from sparkinfer.training.hybrid import HybridModel
from sparkinfer.training.moe import Experts
from sparkinfer.training.target import TorchTarget, load_torch_target, rms_norm

HYBRIDS = (
    "qwen35-tiny-F32",
    "qwen35-tiny256-Q4_K_M",
    "qwen35moe-tiny-F32",
    "qwen35moe-tiny256-Q4_K_M",
)


def load(name: str) -> TorchTarget:
    return load_torch_target(open_gguf(GOLDEN / f"{name}.gguf"), "cpu", torch.float32)


@pytest.mark.parametrize("name", HYBRIDS)
def test_golden_logits(name: str) -> None:
    model = load(name)
    assert isinstance(model, HybridModel)
    golden = np.load(GOLDEN / f"{name}.npz")
    tokens = torch.from_numpy(golden["tokens"].astype(np.int64))[None]
    got = model.logits(tokens)[0].numpy()
    assert np.abs(got - golden["logits"]).max() < 1e-3


@pytest.mark.parametrize("name", HYBRIDS)
def test_token_by_token_equals_the_whole(name: str) -> None:
    model = load(name)
    tokens = torch.randint(0, 320, (3, 21), generator=torch.Generator().manual_seed(0))
    whole, cache = model.logits(tokens), model.new_cache(3, 21)
    for place in range(21):
        step = model.step(tokens[:, place], cache, place)
        assert torch.allclose(step, whole[:, place], atol=1e-3)


@pytest.mark.parametrize("name", ["qwen35-tiny-F32", "qwen35moe-tiny-F32"])
def test_features_are_the_streams_that_serving_taps(name: str) -> None:
    taps, tokens = (0, 1, 2), list(range(5, 65))
    served = engine_target(name, "f32")
    served.set_taps(taps)
    try:
        served.forward(served.new_state(), tokens, rows="none")
        wanted = served.tapped(len(tokens)).copy()
    finally:
        served.set_taps(())
    got, final = load(name).features(torch.tensor([tokens]), taps)
    assert final is None
    assert np.abs(got[0].numpy() - wanted).max() < 1e-3 * np.abs(wanted).max()


def random_rule(rows: int, n: int = 16) -> list[torch.Tensor]:
    """q, k, v, alpha, beta of two key heads and four value heads, and the decay rate and time bias of these."""
    random = torch.Generator().manual_seed(7)
    make = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    q, k, v = make(2, rows, 2, n), make(2, rows, 2, n), make(2, rows, 4, n)
    return [q, k, v, make(2, rows, 4), make(2, rows, 4), -make(4).exp(), make(4)]


def prepared(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the rule takes: unit q and k, g and beta."""
    q, k, v, alpha, beta, rate, bias = parts
    g = rate * torch.nn.functional.softplus(alpha + bias)
    return [unit(q, 1e-6) * q.shape[-1] ** -0.5, unit(k, 1e-6), v, g, beta.sigmoid()]


@pytest.mark.parametrize("rows", [1, 16, 40, 64, 150])
def test_chunks_equal_the_specification_and_single_steps(rows: int) -> None:
    parts = random_rule(rows)
    whole = gated_delta(*prepared(parts))
    state = torch.zeros(2, 4, 16, 16)
    for row in range(rows):
        step = gated_delta_step(*(x[:, row] for x in prepared(parts)), state)
        assert torch.allclose(step, whole[:, row], atol=2e-5)
    for b in range(2):
        q, k, v, alpha, beta = (x[b].numpy() for x in parts[:5])
        rate, bias = parts[5].numpy(), parts[6].numpy()
        empty = np.zeros((4, 16, 16), np.float32)
        wanted, last = reference_delta(q, k, v, alpha, beta, rate, bias, empty, 1e-6)
        assert np.abs(whole[b].numpy() - wanted).max() < 2e-5
        assert np.abs(state[b].numpy() - last).max() < 2e-5


def test_equal_keys_stay_exact() -> None:
    """The worst triangular system: all keys equal, no decay, nothing held back."""
    k = unit(torch.ones(1, 64, 1, 16), 0.0)
    v = torch.randn(1, 64, 1, 16, generator=torch.Generator().manual_seed(0))
    ones, zeros = torch.ones(1, 64, 1), torch.zeros(1, 64, 1)
    assert torch.allclose(gated_delta(k, k, v, zeros, ones), v, atol=1e-4)  # each replaces the last


def test_gradients_of_the_rule_are_those_of_the_recurrence() -> None:
    parts = [x.requires_grad_() for x in random_rule(40)]
    aim = torch.randn(2, 40, 4, 16, generator=torch.Generator().manual_seed(1))
    (gated_delta(*prepared(parts)) * aim).sum().backward()
    got = [x.grad.clone() for x in parts]  # type: ignore[union-attr]
    for x in parts:
        x.grad = None
    q, k, v, g, beta = prepared(parts)
    q, k = q.repeat(1, 1, 2, 1), k.repeat(1, 1, 2, 1)
    state, total = torch.zeros(2, 4, 16, 16), torch.zeros(())
    for row in range(40):
        state = state * g[:, row, :, None, None].exp()
        missing = v[:, row] - torch.einsum("bhij,bhi->bhj", state, k[:, row])
        state = state + torch.einsum("bhi,bhj->bhij", k[:, row], beta[:, row, :, None] * missing)
        total = total + (torch.einsum("bhij,bhi->bhj", state, q[:, row]) * aim[:, row]).sum()
    total.backward()
    for x, grad in zip(parts, got, strict=True):
        assert x.grad is not None
        assert torch.allclose(grad, x.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("size", [5, 16, 64])
def test_triangular_inverse(size: int) -> None:
    random = torch.Generator().manual_seed(2)
    a = torch.randn(3, 2, size, size, generator=random, dtype=torch.float64).tril(-1) * 0.3
    eye = torch.eye(size, dtype=torch.float64)
    assert torch.allclose(unit_inverse(a) @ (eye + a), eye.expand_as(a), atol=1e-9)


@pytest.mark.parametrize("form", ["all", "gathered"])
def test_experts_equal_the_specification(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "gathered":
        monkeypatch.setattr(moe_module, "DENSE_EXPERTS", 0)
    model = load("qwen35moe-tiny-F32")
    part, moe = model.layers[0].feed_forward, model.config.moe
    assert isinstance(part, Experts) and moe is not None
    x = torch.randn(2, 9, model.config.n_embd, generator=torch.Generator().manual_seed(3))
    got, _ = part(x)
    y = rms_norm(x, part.norm, part.eps).flatten(0, 1).numpy()
    array = {name: value.detach().numpy() for name, value in part.named_parameters()}
    ids, weights = route(linear(y, array["router"]), moe.used)
    gate, up = (array[name].reshape(moe.experts, moe.width, -1) for name in ("gate", "up"))
    down = array["down"].reshape(-1, moe.experts, moe.width).transpose(1, 0, 2)
    shared = linear(gated_linear(y, array["shared_gate"], array["shared_up"]), array["shared_down"])
    share = y @ array["shared_router"]
    wanted = reference_experts(y, ids, weights, gate, up, down, shared, share)
    assert np.abs(got.flatten(0, 1).numpy() - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_the_balance_loss_is_one_for_even_use_and_grows() -> None:
    moe = MoeConfig(experts=4, used=2, width=32, shared=32)
    even = torch.full((8, 4), 0.25)
    turns = torch.tensor([[0, 1], [2, 3]] * 4)
    assert moe_module.balance(even, turns, moe) == pytest.approx(1.0)
    skewed = torch.tensor([[0.7, 0.3, 0.0, 0.0]] * 8)
    assert moe_module.balance(skewed, torch.tensor([[0, 1]] * 8), moe) == pytest.approx(2.0)
