"""Whole runs on the CPU: a toy pair that reaches a stated acceptance, resuming, the command line."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_toys import GOLDEN, LLAMA, QWEN3, random_draft

from sparkinfer.cli.app import main
from sparkinfer.dflash.config_gguf import read_gguf_config
from sparkinfer.engine import Engine
from sparkinfer.errors import OptionError, RequestError
from sparkinfer.gguf import open_gguf
from sparkinfer.training.config import DataPlan, TrainPlan, default_taps
from sparkinfer.training.corpus import Batches, Corpus
from sparkinfer.training.evaluate import HeldOut, acceptance, walk
from sparkinfer.training.export import read_draft_gguf, read_folder
from sparkinfer.training.pipeline import Job, run_job
from sparkinfer.training.target import TorchTarget
from sparkinfer.training.trainer import Trainer

TOY = Job(
    model=QWEN3,
    output=Path(),
    data=DataPlan(384, 96, 192, answer_limit=48, user_limit=4, warm_share=0.0),
    plan=TrainPlan(steps=150, rows=12, anchors=24, lr=4e-3, report_every=50),
    layers=1,
    taps=(0, 2, 3),
    block=3,
    from_anchor=True,
    markov_rank=64,
    quantisation="F32",
    device="cpu",
)
TOY_TAU = 2.0  # at width 4, on conversations set aside; 1 would be no use at all


def quiet(_text: object, *_more: object) -> None:
    """Neither status lines nor progress."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float], list[str]]:
    """A trained pair: its folder, tau by width on what was set aside, what the run said."""
    folder = tmp_path_factory.mktemp("toy")
    lines: list[str] = []
    measured = run_job(replace(TOY, output=folder), lines.append, quiet)
    assert measured is not None
    return folder, measured.tau, lines


def test_a_toy_pair_reaches_the_stated_tau(toy: tuple[Path, dict[int, float], list[str]]) -> None:
    folder, tau, lines = toy
    assert tau[4] >= TOY_TAU
    assert tau[2] <= tau[3] <= tau[4] <= 4
    record = json.loads((folder / "training.json").read_text())
    assert record["steps"] == 150
    assert [entry["step"] for entry in record["curve"]] == [50, 100, 150, 150]
    assert record["curve"][2]["train_tau"] > record["curve"][0]["train_tau"]
    assert record["curve"][-1]["tau"]["4"] == pytest.approx(tau[4], abs=1e-3)
    assert any("tau in training" in line for line in lines)


def test_the_file_tells_what_was_measured(
    toy: tuple[Path, dict[int, float], list[str]],
) -> None:
    folder, _, _ = toy
    with open_gguf(folder / "draft.gguf") as file:
        config = read_gguf_config(file, 0)
    held_out = json.loads((folder / "training.json").read_text())["held_out"]
    rates = [accepted / reached for reached, accepted in held_out["slots"]]
    assert config.prior is not None and len(config.prior.claims) == 3
    assert config.prior.acceptance == pytest.approx(rates)
    assert config.prior.claims[0].kept == pytest.approx(rates[0])
    assert 0.0 < config.prior.claims[0].claim < 1.0


def test_a_finished_run_is_not_trained_again(
    toy: tuple[Path, dict[int, float], list[str]],
) -> None:
    folder, tau, _ = toy
    before = (folder / "draft.gguf").read_bytes()
    measured = run_job(replace(TOY, output=folder), quiet, quiet)
    assert measured is not None and measured.tau == tau
    assert (folder / "draft.gguf").read_bytes() == before


def test_served_acceptance_is_the_measured_one(
    toy: tuple[Path, dict[int, float], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real greedy decoding at full width accepts exactly what the walk by teacher forcing says."""
    from sparkinfer.training.draft import DraftModel
    from sparkinfer.training.evaluate import right_slots
    from sparkinfer.training.target import load_torch_target
    from sparkinfer.training.weights import draft_of

    folder, _, _ = toy
    monkeypatch.setenv("SPARKINFER_DFLASH_PROPOSALS", "3")
    with open_gguf(folder / "draft.gguf") as file:
        shape, arrays = read_draft_gguf(file)
    draft: DraftModel = draft_of(shape, arrays)[0]
    target = load_torch_target(open_gguf(QWEN3), "cpu", torch.float32)
    engine = Engine.load(
        QWEN3, draft=folder / "draft.gguf", activations="f32", context=256, spec="on"
    )
    try:
        for start in (20, 90, 200):
            prompt = [start, 18, 54, 7]
            result = engine.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)
            report = result.speculation
            assert report is not None and report.steps
            tokens = torch.tensor([[*prompt, *result.tokens]])
            answers = torch.arange(tokens.shape[1])[None] >= len(prompt)
            right = right_slots(draft, target, target.head, None, tokens, answers)[0].numpy()
            steps = walk(right, answers[0].numpy(), 4)
            full = steps[:-1]  # the last step asks for no token that the limit would cut off
            assert report.accepted >= sum(step.accepted for step in full)
            assert report.accepted <= sum(step.accepted for step in steps)
    finally:
        engine.close()


def small_trainer(target: TorchTarget, steps: int, **plan: object) -> Trainer:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 320, (12, 24)).astype(np.uint32)
    corpus = Corpus(tokens, np.arange(24)[None].repeat(12, 0) >= 8)
    draft = random_draft(target, markov_rank=8, vocabulary=128)
    values: dict[str, object] = {
        "steps": steps,
        "rows": 3,
        "anchors": 4,
        "seed": 3,
        "report_every": 4,
    }
    return Trainer(
        target,
        draft,
        torch.arange(128),
        Batches(corpus, 3, 3, torch.device("cpu")),
        TrainPlan(**{**values, **plan}),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    target: TorchTarget, tmp_path: Path, optimiser: str
) -> None:
    whole = small_trainer(target, 10, optimiser=optimiser)
    whole.run()
    stopped = small_trainer(target, 10, optimiser=optimiser, save_every=6)
    checkpoint = tmp_path / "checkpoint.pt"

    class Stop(Exception):
        pass

    def interrupt(entry: dict[str, object]) -> None:
        if entry["step"] == 8:
            raise Stop

    stopped.report = interrupt
    with pytest.raises(Stop):
        stopped.run(checkpoint)
    resumed = small_trainer(target, 10, optimiser=optimiser)
    resumed.run(checkpoint)
    assert resumed.step_number == 10
    for one, two in zip(whole.draft.parameters(), resumed.draft.parameters(), strict=True):
        assert torch.equal(one, two)
    strip = [{k: v for k, v in entry.items() if k != "seconds"} for entry in whole.curve]
    assert [{k: v for k, v in entry.items() if k != "seconds"} for entry in resumed.curve] == strip


def test_a_checkpoint_of_another_draft_is_refused(target: TorchTarget, tmp_path: Path) -> None:
    trainer = small_trainer(target, 1)
    trainer.run(tmp_path / "c.pt")
    other = small_trainer(target, 2)
    other.draft = random_draft(target, layers=1)
    with pytest.raises(RequestError, match="another shape"):
        other.run(tmp_path / "c.pt")


def test_equal_seeds_give_equal_drafts(target: TorchTarget) -> None:
    runs = [small_trainer(target, 4, distill=0.5) for _ in range(2)]
    for run in runs:
        run.run()
    assert all(
        torch.equal(a, b)
        for a, b in zip(runs[0].draft.parameters(), runs[1].draft.parameters(), strict=True)
    )


def test_the_target_is_frozen_and_everything_else_learns(target: TorchTarget) -> None:
    before = target.embedding.clone()
    trainer = small_trainer(target, 3)
    start = {name: p.detach().clone() for name, p in trainer.draft.named_parameters()}
    trainer.run()
    assert torch.equal(target.embedding, before)
    still = [n for n, p in trainer.draft.named_parameters() if torch.equal(p, start[n])]
    assert not still


def test_walk_by_hand() -> None:
    answers = np.array([0, 1, 1, 1, 1, 1, 1, 0, 1, 1], bool)
    right = np.zeros((10, 3), bool)
    right[1] = [True, False, True]
    right[3] = [True, True, True]
    right[8] = [True, False, False]
    steps = walk(right, answers, 4)
    # From 1: one slot right, its own token besides. From 3: three right, and the answer ends. From 8: one label only.
    assert [(s.place, s.accepted, s.labelled, s.gained) for s in steps] == [
        (1, 1, 3, 2),
        (3, 3, 3, 3),
        (8, 1, 1, 1),
    ]
    held = HeldOut(torch.zeros(1, 10).long(), torch.from_numpy(answers)[None], ("chat",))
    measured = acceptance(right[None], held)
    assert measured.tau[4] == pytest.approx(6 / 3)
    assert measured.slots == ((3, 3), (2, 1), (1, 1))
    assert measured.domains["chat"][2] == pytest.approx(6 / 4)


def test_default_taps_of_published_drafts() -> None:
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert default_taps(30, 5) == (1, 8, 14, 20, 27)
    assert default_taps(24, 5) == (1, 6, 11, 16, 21)
    assert default_taps(30, 1) == (15,)


def run_cli(folder: Path, *more: str) -> int:
    return main(
        [
            *("train", "-m", str(LLAMA), "-o", str(folder), "--device", "cpu"),
            *(
                "--conversations",
                "16",
                "--length",
                "48",
                "--answer-limit",
                "16",
                "--generate-batch",
                "8",
            ),
            *(
                "--steps",
                "3",
                "--rows",
                "2",
                "--anchors",
                "4",
                "--layers",
                "1",
                "--block",
                "3",
                *more,
            ),
        ]
    )


def test_the_command_line_trains(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_cli(tmp_path / "out", "--vocabulary", "128", "--markov", "32", "--taps", "0,2") == 0
    out, err = capfd.readouterr()
    assert "tau by width" in out
    assert "128" in err and "draft.gguf" in err
    shape, tensors = read_folder(tmp_path / "out")
    assert (shape.layers, shape.taps, shape.vocabulary, shape.markov_rank) == (1, (0, 2), 128, 32)
    assert len(tensors["draft_ids"]) == 128


def test_the_command_line_names_what_it_refuses(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(tmp_path, "--taps", "0,9") == 2
    assert "0 to 3" in capfd.readouterr().err
    assert run_cli(tmp_path, "--taps", "x") == 2
    assert run_cli(tmp_path, "--device", "tpu") == 69
    assert "auto, cpu, cuda" in capfd.readouterr().err


def test_an_earlier_draft_is_trained_further(
    toy: tuple[Path, dict[int, float], list[str]], tmp_path: Path
) -> None:
    folder, tau, _ = toy
    short = replace(TOY.plan, steps=5, lr=1e-4)
    job = replace(TOY, output=tmp_path, plan=short, start_draft=folder)
    measured = run_job(job, quiet, quiet)
    assert measured is not None
    assert measured.tau[4] == pytest.approx(tau[4], rel=0.1)  # from the start it would be near 1
    with pytest.raises(RequestError, match="differs from this run in window"):
        run_job(replace(job, output=tmp_path / "other", window=9), quiet, quiet)


def test_a_run_can_start_from_a_smaller_drafts_file(
    toy: tuple[Path, dict[int, float], list[str]], tmp_path: Path
) -> None:
    folder, tau, _ = toy
    short = replace(TOY.plan, steps=5, lr=1e-4)
    job = replace(
        TOY, output=tmp_path, plan=short, start_draft=folder / "draft.gguf", layers=2, own_head=True
    )
    measured = run_job(job, quiet, quiet)
    assert measured is not None and measured.tau[4] == pytest.approx(tau[4], rel=0.1)
    shape, tensors = read_folder(tmp_path)
    assert shape.layers == 2 and "lm_head.weight" in tensors


def test_without_torch_the_error_names_the_extra(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith("sparkinfer.training")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run_cli(tmp_path) == 69
    assert "sparkinfer[train]" in capfd.readouterr().err


def test_a_draft_for_a_hybrid_target(tmp_path: Path) -> None:
    """Written, trained, exported and served: the text is the target's own, and rounds were run."""
    model = GOLDEN / "qwen35moe-tiny-F32.gguf"
    job = replace(
        TOY,
        model=model,
        output=tmp_path,
        data=DataPlan(24, 48, 24, answer_limit=24, user_limit=4),
        plan=replace(TOY.plan, steps=4),
        taps=(0, 2),
    )
    assert run_job(job, quiet, quiet) is not None
    prompt, texts = [20, 18, 54, 7], []
    for draft, spec in ((tmp_path / "draft.gguf", "on"), (None, "off")):
        engine = Engine.load(model, draft=draft, activations="f32", context=128, spec=spec)
        try:
            result = engine.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True)
        finally:
            engine.close()
        texts.append(result.tokens)
        if draft is not None:
            assert result.speculation is not None and result.speculation.steps > 0
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"kv_heads": 3}, r"kv heads 3: expected a divisor of \d+ heads"),
        ({"vocabulary": 32, "active": 40}, r"active tokens 40: .* the draft vocabulary, 32"),
        ({"new_vocabulary": True}, r"--new-vocabulary: expected with --start-draft"),
        ({"window": -1}, r"window -1: expected 0 or more"),
        ({"quantisation": "Q9"}, r"--quantisation Q9 is not accepted; expected F32 \| .*Q8_0"),
        ({"output": Path(__file__)}, r"test_training_run.py cannot be a folder: File exists"),
    ],
)
def test_choices_that_do_not_fit_are_refused_at_once(
    choice: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        run_job(replace(TOY, **{"output": tmp_path, **choice}), quiet, quiet)


def test_too_few_conversations_are_refused_before_they_are_written(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(RequestError, match="4 conversations are too few"):
        run_job(replace(TOY, output=tmp_path, data=DataPlan(4, 48, 2)), said.append, quiet)
    assert said == []
