"""Pretraining: the loss by hand, what a run learns and writes, what is left when it goes wrong, export round trips."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_toys import GOLDEN, LLAMA

from sparkinfer.errors import ModelOutputError, OptionError, RequestError
from sparkinfer.gguf import open_gguf
from sparkinfer.models import load_target
from sparkinfer.training.config import TrainPlan
from sparkinfer.training.corpus import Batches, Corpus
from sparkinfer.training.export_target import Formats, format_of, write_target_gguf
from sparkinfer.training.hybrid import HybridModel
from sparkinfer.training.hybrid_weights import file_tensors, random_hybrid
from sparkinfer.training.pretrain import (
    Pretrainer,
    embedding_of,
    next_token_loss,
    read_conversations,
)
from sparkinfer.training.pretrain_config import PretrainJob, TargetShape
from sparkinfer.training.pretrain_run import job_of, run_pretraining
from sparkinfer.training.target import load_torch_target

SHAPE = TargetShape(
    n_embd=64, layers=2, interval=2, heads=2, kv_heads=1, head_size=32, rotated=8, key_heads=1, value_heads=2,
    ssm_size=32, experts=4, used=2, width=32, shared=32, context=256,
)  # fmt: skip
PLAN = TrainPlan(steps=12, rows=4, lr=1e-2, distill=0.5, report_every=4)


def quiet(_text: object) -> None:
    """No status lines."""


def repeating(rows: int = 32, length: int = 32) -> Corpus:
    """Rows that count upwards by one: quickly learnt."""
    starts = np.random.default_rng(0).integers(0, 280, (rows, 1))
    tokens = (starts + np.arange(length)).astype(np.uint32)
    return Corpus(tokens, np.ones_like(tokens, bool))


def job(folder: Path, **plan: object) -> PretrainJob:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    repeating().save(data / "conversations-0.npz")
    return PretrainJob(
        teacher=LLAMA,
        data=data,
        output=folder / "out",
        shape=SHAPE,
        plan=replace(PLAN, **plan),  # type: ignore[arg-type]
        held_out=4,
        device="cpu",
        name="toy",
    )


def test_next_token_loss_by_hand() -> None:
    streams = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [5.0, 5.0]]])
    head = torch.eye(2)
    tokens = torch.tensor([[0, 1, 0]])
    objective, hard = next_token_loss(streams, head, tokens, None, 0.0)
    # Position 0 should say 1 with logits (1, 0), position 1 should say 0 with logits (0, 2); the last says nothing.
    wanted = (np.log(1 + np.e) + np.log(1 + np.exp(2.0))) / 2
    assert objective == pytest.approx(wanted) and hard == pytest.approx(wanted)
    soft = torch.zeros(1, 3, 2)
    objective, hard = next_token_loss(streams, head, tokens, soft, 0.25)
    even = np.mean([np.log(1 + np.e) - 0.5, np.log(1 + np.exp(2.0)) - 1.0])
    assert objective == pytest.approx(0.75 * wanted + 0.25 * even, rel=1e-5)
    assert hard == pytest.approx(wanted)


def test_the_teachers_own_logits_are_the_best_soft_labels() -> None:
    streams = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    head = torch.eye(8)
    objective, _ = next_token_loss(streams, head, torch.zeros(1, 4).long(), streams.detach(), 1.0)
    objective.backward()
    assert streams.grad is not None and streams.grad.abs().max() < 1e-6


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_run_learns_and_writes(tmp_path: Path, optimiser: str) -> None:
    wanted = job(tmp_path, steps=25, optimiser=optimiser, distill=0.1, evaluate_every=20)
    record = run_pretraining(wanted, quiet)
    curve = record["curve"]
    assert curve[-1]["held_out_loss"] < 0.8 * curve[0]["loss"]
    assert 0 <= curve[-1]["teacher_agrees"] <= 1
    assert record["as_written"]["held_out_loss"] == pytest.approx(
        curve[-1]["held_out_loss"], rel=0.05
    )
    assert record["notes"] == [] and record["steps"] == 25
    assert record["tokens_seen"] == 25 * 4 * 32
    assert json.loads((tmp_path / "out" / "pretraining.json").read_text()) == record
    with open_gguf(tmp_path / "out" / "target.gguf") as file, open_gguf(LLAMA) as teacher:
        assert file.architecture == "qwen35moe"
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template"):
            assert file.metadata[key] == teacher.metadata[key]
            assert file.type_name(key) == teacher.type_name(key)
    assert not (tmp_path / "out" / "checkpoint.pt").exists()


def test_equal_seeds_give_equal_files(tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        run_pretraining(job(tmp_path / name, steps=3), quiet)
        files.append((tmp_path / name / "out" / "target.gguf").read_bytes())
    assert files[0] == files[1]


def test_a_loss_that_is_no_number_leaves_the_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Pretrainer.step

    def spoilt(trainer: Pretrainer, progress: float) -> None:
        step(trainer, progress)
        if trainer.step_number == 7:
            with torch.no_grad():
                trainer.model.output_norm.fill_(float("nan"))

    monkeypatch.setattr(Pretrainer, "step", spoilt)
    record = run_pretraining(job(tmp_path, save_every=5), quiet)
    assert len(record["notes"]) == 1 and "ModelOutputError" in record["notes"][0]
    assert record["as_written"]["held_out_loss"] < 20
    with pytest.raises(ModelOutputError, match="the loss is nan"):
        run_pretraining(job(tmp_path, save_every=0), quiet)


def test_an_interruption_still_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Pretrainer.step

    def interrupted(trainer: Pretrainer, progress: float) -> None:
        if trainer.step_number == 5:
            raise KeyboardInterrupt
        step(trainer, progress)

    monkeypatch.setattr(Pretrainer, "step", interrupted)
    record = run_pretraining(job(tmp_path), quiet)
    assert record["steps"] == 5 and "KeyboardInterrupt" in record["notes"][0]
    assert (tmp_path / "out" / "target.gguf").exists()


def test_a_failing_compiler_is_noted_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_trainer: Pretrainer) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(Pretrainer, "compile", broken)
    record = run_pretraining(replace(job(tmp_path, steps=2), compiled=True), quiet)
    assert "no compiler here" in record["notes"][0]
    assert record["steps"] == 2


def test_the_clock_ends_a_run(tmp_path: Path) -> None:
    record = run_pretraining(job(tmp_path, steps=10**9, minutes=0.02), quiet)
    assert 1 <= record["steps"] < 10**6


@pytest.mark.parametrize("name", ["qwen35-tiny256-Q4_K_M", "qwen35moe-tiny256-Q4_K_M"])
def test_export_keeps_every_tensor(name: str, tmp_path: Path) -> None:
    source = open_gguf(GOLDEN / f"{name}.gguf")
    model = load_torch_target(source, "cpu", torch.float32)
    assert isinstance(model, HybridModel)
    path = tmp_path / "copy.gguf"
    write_target_gguf(path, model, source, name="copy", formats=Formats("F32", "F32"))
    with open_gguf(path) as copy:
        assert set(copy.tensors) == set(source.tensors)
        for key in source.metadata:
            if key.startswith(source.architecture):
                assert copy.metadata[key] == source.metadata[key], key
        again = dict(file_tensors(load_torch_target(copy, "cpu", torch.float32)))  # type: ignore[arg-type]
    for tensor, values in file_tensors(model):
        assert np.allclose(again[tensor], values, rtol=1e-6, atol=0), tensor


def test_the_exported_model_serves_what_it_computed(tmp_path: Path) -> None:
    """Quantised, loaded by the engine: the logits of the same file in torch."""
    shape = replace(SHAPE, n_embd=256, head_size=128, ssm_size=128, width=256, shared=256)
    model = random_hybrid(shape.config(320, "random"), 4)
    path = tmp_path / "target.gguf"
    with open_gguf(LLAMA) as teacher:
        kinds = write_target_gguf(path, model, teacher, name="random")
    assert {kinds[f"blk.0.{part}.weight"] for part in ("attn_qkv", "ssm_out", "ffn_down_exps")} == {
        "Q4_K"
    }
    assert {kinds[n] for n in ("blk.0.ssm_alpha.weight", "blk.0.ffn_gate_inp.weight")} == {"F32"}
    tokens = list(range(30, 70))
    with open_gguf(path) as file:
        wanted = load_torch_target(file, "cpu", torch.float32).logits(torch.tensor([tokens]))[0]
    engine = load_target(path, context=64, threads=1, activations="f32")
    try:
        got = engine.forward(engine.new_state(), tokens, rows="all")
        assert np.abs(got - wanted.numpy()).max() < 1e-3 * wanted.abs().max()
    finally:
        engine.close()


def test_formats_fall_back_where_rows_do_not_fit() -> None:
    both = Formats("Q4_K", "Q6_K")
    assert format_of("blk.0.attn_qkv.weight", (64, 512), both) == "Q4_K"
    assert format_of("token_embd.weight", (320, 512), both) == "Q6_K"
    assert format_of("blk.0.attn_qkv.weight", (64, 96), both) == "Q8_0"
    assert format_of("blk.0.attn_qkv.weight", (64, 40), both) == "F32"
    assert format_of("blk.0.ssm_conv1d.weight", (512, 4), both) == "F32"


def test_the_embedding_of_a_teacher_keeps_its_geometry() -> None:
    teacher = load_torch_target(open_gguf(LLAMA), "cpu", torch.float32)
    same = embedding_of(teacher, teacher.config.n_embd)
    table = teacher.embedding.float()
    scale = (same.square().mean() / table.square().mean()).sqrt()
    assert torch.allclose(same @ same.T, table @ table.T * scale**2, atol=1e-4)
    assert embedding_of(teacher, 16).shape == (320, 16)
    with pytest.raises(RequestError, match="64 columns, the model needs 65"):
        embedding_of(teacher, 65)


def test_conversations_of_a_folder_are_joined_and_cut(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no conversations-\*\.npz"):
        read_conversations(tmp_path)
    repeating(3, 20).save(tmp_path / "conversations-0.npz")
    repeating(2, 12).save(tmp_path / "conversations-7.npz")
    assert read_conversations(tmp_path).tokens.shape == (5, 12)


def test_a_dense_hybrid_learns_too() -> None:
    model = random_hybrid(replace(SHAPE, experts=0).config(320, "dense"), 0)
    assert model.config.architecture == "qwen35"
    batches = Batches(repeating(), 4, 0, torch.device("cpu"))
    trainer = Pretrainer(model, None, batches, replace(PLAN, distill=0.0, report_every=5, steps=15))
    trainer.run()
    assert trainer.curve[2]["loss"] < trainer.curve[0]["loss"]
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


def test_the_command_line() -> None:
    line = "--teacher a.gguf --data d --output o --minutes 3 --shape-layers 8 --shape-interval 4"
    given = job_of([*line.split(), "--table", "Q8_0"])
    assert (given.shape.layers, given.shape.interval, given.table) == (8, 4, "Q8_0")
    assert given.plan.minutes == 3 and given.plan.steps > 10**6
    with pytest.raises(OptionError, match="interval"):
        TargetShape(layers=2, interval=3)
