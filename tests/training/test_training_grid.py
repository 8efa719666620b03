"""Training through Q4_1: the grid is the file's, the update goes to the exact weights, the end is on the grid."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_toys import LLAMA, random_draft

from sparkinfer.errors import OptionError
from sparkinfer.gguf import open_gguf
from sparkinfer.quant.encode import quantize
from sparkinfer.quant.formats import QUANT_FORMATS, dequantize
from sparkinfer.training.config import DataPlan, TrainPlan
from sparkinfer.training.corpus import Batches, Corpus
from sparkinfer.training.export import read_draft_gguf, write_draft_gguf
from sparkinfer.training.grid import Grid, on_grid
from sparkinfer.training.pipeline import Job, run_job
from sparkinfer.training.target import TorchTarget
from sparkinfer.training.trainer import Trainer
from sparkinfer.training.weights import arrays_of


def as_stored(values: np.ndarray) -> np.ndarray:
    blocks = quantize("Q4_1", values, fit=True).view(np.uint8)
    size = QUANT_FORMATS["Q4_1"].block_bytes
    return dequantize("Q4_1", blocks.reshape(-1, size)).reshape(values.shape)


@pytest.mark.parametrize("scale", [1e-3, 0.05, 300.0])
def test_a_file_keeps_values_on_the_grid_exactly(scale: float) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(40, 96, generator=random) * scale
    values[3] = 0.5
    (grid,) = on_grid([values])
    assert np.array_equal(as_stored(grid.numpy()), grid.numpy())
    assert (grid - values).abs().max() < 0.3 * scale + 1e-6
    assert len({*grid[0, :32].tolist()}) <= 16
    assert (
        torch.equal(on_grid([grid])[0], grid) or scale < 1e-5
    )  # half precision has no smaller steps


def trainer(target: TorchTarget, grid_from: float, steps: int = 6) -> Trainer:
    random = np.random.default_rng(0)
    tokens = random.integers(5, 320, (16, 24)).astype(np.uint32)
    batches = Batches(Corpus(tokens, np.ones_like(tokens, np.bool_)), 4, 0, target.device)
    plan = TrainPlan(steps=steps, rows=4, anchors=4, lr=5e-3, grid_from=grid_from)
    return Trainer(target, random_draft(target, markov_rank=32), None, batches, plan)


def test_a_step_sees_the_grid_and_changes_the_exact_weights(target: TorchTarget) -> None:
    run = trainer(target, 0.0)
    matrix = run.draft.layers[0].down_proj
    before = matrix.detach().clone()
    seen: list[torch.Tensor] = []
    run.draft.layers[0].register_forward_hook(lambda *_a: seen.append(matrix.detach().clone()))
    run.step()
    assert torch.equal(seen[0], on_grid([before])[0]) and not torch.equal(seen[0], before)
    moved = (matrix.detach() - before).abs()
    assert 0 < moved.max() <= 1.01 * run.optimiser.parts[0].param_groups[0]["lr"]


def test_only_matrices_that_the_file_quantises_so(target: TorchTarget) -> None:
    draft = random_draft(target, markov_rank=32, own_head=True)
    own = {id(matrix) for matrix in Grid(draft).matrices}
    names = {name for name, parameter in draft.named_parameters() if id(parameter) in own}
    assert {"fc", "lm_head", "layers.0.q_proj", "layers.1.down_proj"} <= names
    assert not any("markov" in name or "norm" in name for name in names)


def test_it_begins_where_asked_and_ends_on_the_grid(target: TorchTarget, tmp_path: Path) -> None:
    plain, late, always = (trainer(target, share) for share in (1.0, 0.5, 0.0))
    for run in (plain, late, always):
        run.run()
    assert torch.equal(late.draft.fc, on_grid([late.draft.fc.detach()])[0])
    assert not torch.equal(plain.draft.fc, on_grid([plain.draft.fc.detach()])[0])
    assert not torch.equal(late.draft.fc, always.draft.fc)
    half = trainer(target, 1.0)
    for number in range(3):  # the first half of the late run
        half._progress = number / 6
        half.step()
    rerun = trainer(target, 0.5, steps=6)
    for number in range(3):
        rerun._progress = number / 6
        rerun.step()
    assert torch.equal(half.draft.fc, rerun.draft.fc)
    path = tmp_path / "draft.gguf"
    write_draft_gguf(path, late.draft.shape, arrays_of(late.draft, None), matrices="Q4_1")
    _, stored = read_draft_gguf(open_gguf(path))
    assert np.array_equal(stored["fc.weight"], late.draft.fc.detach().numpy())


def test_another_format_is_refused(tmp_path: Path) -> None:
    plan = TrainPlan(steps=1, grid_from=0.5)
    job = Job(LLAMA, tmp_path, DataPlan(16), plan, quantisation="Q8_0")
    with pytest.raises(OptionError, match=r"Q4_1, not Q8_0"):
        run_job(job, lambda _text: None, lambda *_anything: None)
    with pytest.raises(OptionError, match=r"grid_from 1\.5: expected 0 to 1"):
        replace(plan, grid_from=1.5)
