"""A whole pretraining run: files, model, training, what remains when something fails, export."""

from __future__ import annotations

import argparse
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sparkinfer.errors import ModelOutputError, RequestError
from sparkinfer.gguf import GGUFFile, open_gguf
from sparkinfer.training.config import TrainPlan
from sparkinfer.training.corpus import Batches, Corpus
from sparkinfer.training.export_target import Formats, write_target_gguf
from sparkinfer.training.hybrid import HybridModel
from sparkinfer.training.hybrid_weights import random_hybrid
from sparkinfer.training.pipeline import join_processes
from sparkinfer.training.pretrain import (
    Pretrainer,
    embedding_of,
    is_first,
    read_conversations,
    short_products,
)
from sparkinfer.training.pretrain_config import PretrainJob, TargetShape
from sparkinfer.training.target import load_torch_target

Say = Callable[[str], None]
_ENDINGS = (signal.SIGINT, signal.SIGTERM)
_UNBOUNDED = 10**9  # steps of a run that ends by the clock


def run_pretraining(job: PretrainJob, say: Say) -> dict[str, Any]:
    """Train a hybrid model and write `job.output`/target.gguf and pretraining.json; the record.

    A loss that is no number, or an interruption, ends the training early: the last state that was kept is written, and
    the record says so.

    Raises: RequestError, DeviceError, MissingFileError, UnsupportedError, ModelOutputError (before any state was kept).
    """
    started = time.monotonic()
    device, rank, world = join_processes(job.device)
    if rank:
        say = _nothing
    job.output.mkdir(parents=True, exist_ok=True)
    try:
        with open_gguf(job.teacher) as file, short_products():
            return _run(job, file, device, rank, world, started, say)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _nothing(_text: str) -> None:
    """What processes other than the first say."""


def _run(
    job: PretrainJob,
    file: GGUFFile,
    device: torch.device,
    rank: int,
    world: int,
    started: float,
    say: Say,
) -> dict[str, Any]:
    corpus = read_conversations(job.data)
    corpus, held_out = _apart(corpus, job.held_out)
    say(f"{len(corpus):,} conversations, {corpus.tokens.size:,} tokens, {len(held_out)} held out")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    teacher = load_torch_target(file, device, dtype)
    model = random_hybrid(job.shape.config(teacher.config.n_vocab, job.name), job.plan.seed)
    if not job.fresh_embedding:
        with torch.no_grad():
            model.embedding.copy_(embedding_of(teacher, job.shape.n_embd).cpu())
    model = model.to(device)
    weights = sum(p.numel() for p in model.parameters())
    say(f"{model.config.architecture}: {weights / 1e6:.1f} M weights; {_waited(started)}")
    trainer = Pretrainer(
        model,
        teacher if job.plan.distill > 0 else None,
        Batches(corpus, job.plan.rows, job.plan.seed * 64, device, rank, world),
        job.plan,
        balance=job.balance,
        held_out=torch.from_numpy(held_out.tokens.astype(np.int64)).to(device),
        report=lambda entry: say(_line(entry)),
        started=started,
    )
    notes = _train(job, trainer, say)
    record = {
        "shape": asdict(job.shape),
        "plan": asdict(job.plan),
        "weights": weights,
        "conversations": len(corpus),
        "tokens": int(corpus.tokens.size),
        "tokens_seen": trainer.step_number * job.plan.rows * world * corpus.tokens.shape[1],
        "steps": trainer.step_number,
        "seconds": round(trainer.seconds, 1),
        "first_step_seconds": round(trainer.first_step, 1),
        "processes": world,
        "notes": notes,
        "curve": trainer.curve,
    }
    if is_first():
        with _undisturbed():
            path = _export(job, model, file, record)
        say(f"wrote {path}; {_waited(started)}")
        with open_gguf(path) as written:
            record["as_written"] = trainer.evaluate(load_torch_target(written, device, dtype))
        say(f"as written: {record['as_written']}; {_waited(started)}")
        _write_record(job, record)
    return record


def _train(job: PretrainJob, trainer: Pretrainer, say: Say) -> list[str]:
    """Run the trainer; what went wrong on the way."""
    notes: list[str] = []
    checkpoint = job.output / "checkpoint.pt"
    checkpoint.unlink(missing_ok=True)

    def keep() -> None:
        if is_first():
            temporary = checkpoint.with_suffix(".new")
            torch.save(trainer.model.state_dict(), temporary)
            temporary.replace(checkpoint)

    if job.compiled:
        _first_step(trainer, notes)
        say("; ".join([*notes, f"first step done; {_waited(trainer.started)}"]))
    try:
        trainer.run(keep)
    except (ModelOutputError, KeyboardInterrupt) as error:
        notes.append(f"ended at step {trainer.step_number}: {type(error).__name__} {error}")
        say(notes[-1])
        if isinstance(error, ModelOutputError):
            if not checkpoint.exists():
                raise
            state = torch.load(checkpoint, map_location=trainer.device, weights_only=True)
            trainer.model.load_state_dict(state)
    checkpoint.unlink(missing_ok=True)
    return notes


def _first_step(trainer: Pretrainer, notes: list[str]) -> None:
    """One compiled step. Whatever a compiler runs into on this machine is noted, and training goes on without it."""
    try:
        trainer.compile()
        trainer.step(0.0)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        notes.append(f"continued without compilation: {type(error).__name__}: {error}"[:2000])
        trainer.interpret()
        trainer.optimiser.forget()
    trainer.first_step = trainer.seconds


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore requests to end while results are written (in the main thread, where such requests arrive)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _export(job: PretrainJob, model: HybridModel, file: GGUFFile, record: dict[str, Any]) -> Path:
    path = job.output / "target.gguf"
    write_target_gguf(
        path,
        model,
        file,
        name=job.name,
        formats=Formats(job.matrices, job.table),
        extra={"general.license": file.get("general.license", str, "unknown")},
    )
    _write_record(job, record)
    return path


def _write_record(job: PretrainJob, record: dict[str, Any]) -> None:
    (job.output / "pretraining.json").write_text(json.dumps(record, indent=1) + "\n")


def _apart(corpus: Corpus, count: int) -> tuple[Corpus, Corpus]:
    """The corpus without its last rows, and these. Raises RequestError when nothing would remain."""
    count = min(count, len(corpus) // 8)
    if not count:
        raise RequestError(f"{len(corpus)} conversations are too few: at least 8 are needed")
    return (
        Corpus(corpus.tokens[:-count], corpus.answers[:-count]),
        Corpus(corpus.tokens[-count:], corpus.answers[-count:]),
    )


def _line(entry: dict[str, Any]) -> str:
    words = (f"{name} {value}" for name, value in entry.items() if name not in ("step", "seconds"))
    return f"step {entry['step']:,} ({entry['seconds']:.0f} s): {', '.join(words)}"


def _waited(started: float) -> str:
    return f"{time.monotonic() - started:.0f} s since the start"


def job_of(arguments: Sequence[str] | None = None) -> PretrainJob:
    """The job that a command line describes."""
    parser = argparse.ArgumentParser(
        prog="python -m sparkinfer.training.pretrain",
        description="Train a small hybrid model from scratch on conversations that a teacher wrote.",
    )
    add = parser.add_argument
    add("--teacher", type=Path, required=True, help="GGUF: tokenizer, template, distribution")
    add("--data", type=Path, required=True, help="folder of conversations-*.npz")
    add("--output", type=Path, required=True, help="folder for target.gguf and pretraining.json")
    add("--minutes", type=float, default=0.0, help="end after this time, compilation included")
    add(
        "--steps", type=int, default=0, help="updates, at most; default 1000, or what minutes allow"
    )
    add("--rows", type=int, default=64, help="conversations a step")
    add("--lr", type=float, default=2e-3, help="peak learning rate; matrices take twice that")
    add("--optimiser", default="muon", help="muon | adamw")
    add(
        "--distill", type=float, default=0.5, help="share of the loss on the teacher's distribution"
    )
    add("--balance", type=float, default=0.01, help="weight of the loss that spreads the experts")
    add("--fresh-embedding", action="store_true", help="do not start from the teacher's embedding")
    add("--seed", type=int, default=0)
    add("--held-out", type=int, default=128, help="conversations set aside for measuring")
    add("--report-every", type=int, default=50)
    add("--evaluate-every", type=int, default=400)
    add("--save-every", type=int, default=200)
    add("--matrices", default="Q4_K", help="format of the layers' matrices")
    add("--table", default="Q4_K", help="format of the embedding")
    add("--name", default="hybrid", help="general.name of the file")
    add("--device", default="auto", help="auto | cpu | cuda")
    add("--compile", action="store_true", help="compile the step; pays in runs of minutes")
    for field in fields(TargetShape):
        flag = "--shape-" + field.name.replace("_", "-")
        add(flag, type=type(field.default), default=field.default, dest=f"shape_{field.name}")
    given = parser.parse_args(arguments)
    shape = {f.name: getattr(given, f"shape_{f.name}") for f in fields(TargetShape)}
    plan = TrainPlan(
        steps=given.steps or (_UNBOUNDED if given.minutes else 1000),
        minutes=given.minutes,
        rows=given.rows,
        optimiser=given.optimiser,
        lr=given.lr,
        distill=given.distill,
        seed=given.seed,
        report_every=given.report_every,
        evaluate_every=given.evaluate_every,
        save_every=given.save_every,
    )
    return PretrainJob(
        teacher=given.teacher,
        data=given.data,
        output=given.output,
        shape=TargetShape(**shape),
        plan=plan,
        balance=given.balance,
        fresh_embedding=given.fresh_embedding,
        held_out=given.held_out,
        matrices=given.matrices,
        table=given.table,
        name=given.name,
        device=given.device,
        compiled=given.compile,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. A request to end, like Ctrl-C, ends the training and writes what there is."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_pretraining(job_of(arguments), lambda text: print(text, flush=True))
