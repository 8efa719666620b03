"""A whole run: target, conversations, training, measurement, export."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparkinfer.chat import ChatTemplate
from sparkinfer.errors import DeviceError, OptionError, RequestError
from sparkinfer.gguf import open_gguf
from sparkinfer.models.config import ModelConfig
from sparkinfer.quant.encode import ENCODERS
from sparkinfer.tokenizer import Tokenizer
from sparkinfer.training.config import DataPlan, DraftShape, TrainPlan, default_taps
from sparkinfer.training.corpus import Batches, Corpus, write_conversations
from sparkinfer.training.draft import DraftModel, start_from_target
from sparkinfer.training.evaluate import Acceptance, HeldOut
from sparkinfer.training.export import (
    base_metadata,
    prior_metadata,
    read_draft_gguf,
    read_folder,
    write_draft_gguf,
    write_folder,
)
from sparkinfer.training.folder import open_model
from sparkinfer.training.generate import ANSWER, Piece, Script, converse
from sparkinfer.training.grid import FORMAT
from sparkinfer.training.grow import check_growth, grow
from sparkinfer.training.prompts import Frame, Prompt, Turn, read_frame, read_prompts
from sparkinfer.training.target import TorchTarget, load_torch_target
from sparkinfer.training.trainer import Trainer, output_head
from sparkinfer.training.weights import arrays_of, draft_of

HELD_OUT_ROWS = 64  # rows set aside where no prompts for measuring are given
SHARE = 8  # of so many, one
Progress = Callable[[str, int, int], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What to train. `layers` and the following overrule what follows from the target; 0 or () leaves that."""

    model: Path
    output: Path
    data: DataPlan
    plan: TrainPlan
    layers: int = 3
    width: int = 0
    kv_heads: int = 0
    taps: tuple[int, ...] = ()
    block: int = 8
    from_anchor: bool = False
    causal: bool = True
    window: int = 0
    vocabulary: int = 0
    active: int = 0
    markov_rank: int = 0
    own_head: bool = False
    start_layers: tuple[int, ...] = ()
    start_draft: Path | None = None
    new_vocabulary: bool = False
    conversations: Path | None = None
    prompts: Path | None = None
    held_out: Path | None = None
    held_out_tokens: int = 256
    device: str = "auto"
    compiled: bool = False
    quantisation: str = "Q8_0"


@dataclass
class Setting:
    """Everything of a run that is open: files read, target on the device."""

    target: TorchTarget
    tokenizer: Tokenizer
    template: ChatTemplate
    frame: Frame
    say: Say
    progress: Progress


def run_job(job: Job, say: Say, progress: Progress) -> Acceptance | None:
    """Train a draft and write it to `job.output`; what was measured on held-out conversations.

    Raises: UnsupportedError for a target of a kind that cannot be trained for, DeviceError, RequestError,
    MissingFileError, OptionError for choices that contradict each other.
    """
    if job.quantisation not in ENCODERS:
        raise OptionError(
            f"--quantisation {job.quantisation} is not accepted; expected {' | '.join(ENCODERS)}"
        )
    if job.plan.grid_from < 1 and job.quantisation != FORMAT:
        raise OptionError(
            f"grid_from trains for a draft in {FORMAT}, not {job.quantisation}: give --quantisation {FORMAT}"
        )
    device, rank, world = join_processes(job.device)
    if rank:
        say, progress = (lambda _text: None), (lambda _label, _done, _total: None)
    try:
        job.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"--output {job.output} cannot be a folder: {error.strerror}; name another one"
        ) from error
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with open_model(job.model) as file:
        tokenizer = Tokenizer.from_gguf(file)
        template = ChatTemplate.from_gguf(file, tokenizer)
        try:
            frame = read_frame(template, tokenizer)
            target = load_torch_target(file, device, dtype)
            setting = Setting(target, tokenizer, template, frame, say, progress)
            return _run(job, setting, rank, world)
        finally:
            template.close()
            if dist.is_initialized():
                dist.destroy_process_group()


def _run(job: Job, setting: Setting, rank: int, world: int) -> Acceptance | None:
    say, clock, shape = setting.say, time.monotonic(), shape_for(job, setting)
    start = _start_draft(job, shape)
    if not (job.held_out or job.conversations):
        _check_count(job.data.rows)  # before they are written
    kept = read_prompts(job.held_out) if job.held_out else []
    corpus = _conversations(job, setting, frozenset(p.text for p in kept), rank)
    seconds = time.monotonic() - clock
    amounts = f"{len(corpus):,} conversations, {corpus.answer_tokens:,} answer tokens"
    say(f"{amounts}, {seconds:.0f} s")
    if kept:
        held_out = answer_held_out(setting, kept, job.held_out_tokens)
    else:
        corpus, held_out = split_held_out(corpus, setting.target.device)
    ids = None if start is None or job.new_vocabulary else start[1]
    if shape.vocabulary and (ids is None or len(ids) != shape.vocabulary):
        ids = _vocabulary(corpus, shape, setting)
    ids = None if ids is None else ids.to(setting.target.device)
    draft = _fresh_draft(job, setting, shape, start, ids)
    covered = 1.0 if ids is None else corpus.coverage(ids.cpu().numpy())
    size = sum(p.numel() for p in draft.parameters()) / 1e6
    vocabulary = f"vocabulary {shape.outputs} ({covered:.2%} of the answers)"
    say(f"draft: {shape.layers} layers, taps {shape.taps}, {size:.1f} M weights, {vocabulary}")
    trainer = Trainer(
        setting.target,
        draft,
        ids,
        Batches(corpus, job.plan.rows, job.plan.seed * 64 + rank, setting.target.device),
        job.plan,
        held_out=held_out,
        report=lambda entry: say(_line(entry)),
    )
    if job.compiled:
        trainer.compile()
    trainer.run(job.output / "checkpoint.pt")
    totals = _summed((len(corpus), corpus.answer_tokens), setting.target.device)
    if rank:
        return None
    measured = trainer.evaluate()
    data = {
        "plan": asdict(job.data),
        "conversations": totals[0],
        "answer_tokens": totals[1],
        "vocabulary_coverage": covered,
        "seconds": round(seconds, 1),
    }
    prior = measured.prior if measured else None
    export(job, draft, ids, _record(job, trainer, data, measured, world), prior)
    return measured


def _record(
    job: Job, trainer: Trainer, data: dict[str, Any], measured: Acceptance | None, world: int
) -> dict[str, Any]:
    """What the run did, for training.json."""
    return {
        "shape": asdict(trainer.draft.shape),
        "plan": asdict(job.plan),
        "data": data,
        "steps": trainer.step_number,
        "seconds": round(trainer.seconds, 1),
        "processes": world,
        "curve": trainer.curve,
        "held_out": asdict(measured) if measured else None,
    }


def export(
    job: Job,
    draft: DraftModel,
    ids: Tensor | None,
    record: dict[str, Any],
    prior: tuple[Sequence[float], Sequence[float]] | None = None,
) -> None:
    """Write the folder and the file a draft can be loaded from, and what the run did.

    `prior`: acceptance by slot and means of claims, for the file's reader to start from.
    """
    arrays = arrays_of(draft, ids)
    write_folder(job.output, draft.shape, arrays)
    with open_model(job.model) as file:
        base = base_metadata(file.metadata)
    write_draft_gguf(
        job.output / "draft.gguf",
        draft.shape,
        arrays,
        matrices=job.quantisation,
        name=f"{job.model.name.removesuffix('.gguf')} DFlash",
        extra=base | (prior_metadata(*prior) if prior else {}),
    )
    (job.output / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def join_processes(device: str) -> tuple[torch.device, int, int]:
    """The device of this process, its number, and how many there are (torchrun starts several).

    Raises: DeviceError for a device this machine lacks.
    """
    has_gpu = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    if device not in ("cpu", "cuda"):
        raise DeviceError(f"device {device!r}: accepted are auto, cpu, cuda")
    if device == "cuda" and not has_gpu:
        raise DeviceError("device cuda: torch finds no GPU here; --device cpu trains slowly")
    rank, world = 0, 1
    if dist.is_available() and dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device()), rank, world
    return torch.device("cpu"), rank, world


def shape_for(job: Job, setting: Setting) -> DraftShape:
    """The draft's shape: heads and widths of the target unless the job says otherwise."""
    c = setting.target.config
    return DraftShape(
        n_embd=c.n_embd,
        n_ff=job.width or c.n_ff or _used_width(c),
        layers=job.layers,
        heads=c.heads,
        kv_heads=job.kv_heads or c.kv_heads,
        head_size=c.head_size,
        n_vocab=c.n_vocab,
        target_layers=c.n_layers,
        taps=job.taps or default_taps(c.n_layers, min(5, c.n_layers)),
        block=job.block,
        from_anchor=job.from_anchor,
        causal=job.causal,
        window=job.window,
        rope_base=c.rope_base,
        context_length=c.context_length,
        mask_token=mask_token(setting.tokenizer),
        vocabulary=job.vocabulary if job.vocabulary < c.n_vocab else 0,
        markov_rank=job.markov_rank,
        own_head=job.own_head,
        active=0 if job.active == job.vocabulary else job.active,
    )


def _used_width(config: ModelConfig) -> int:
    """The feed-forward width that a token meets in a model with experts."""
    moe = config.moe
    return moe.shared + moe.used * moe.width if moe else 0


def mask_token(tokenizer: Tokenizer) -> int:
    """A control token that no answer contains; the mask's embedding is learnt, so any id that exists will do."""
    control = sorted(set(tokenizer.control.values()) - tokenizer.stop_ids)
    return control[-1] if control else tokenizer.eos_id


def answer_held_out(setting: Setting, prompts: Sequence[Prompt], tokens: int) -> HeldOut:
    """Greedy answers of at most `tokens` tokens to prompts kept for measuring."""
    encoded = [setting.template.encode([{"role": "user", "content": p.text}]) for p in prompts]
    first = [Piece(tuple(ids), ANSWER) for ids in encoded]
    longest = max(map(len, encoded))
    plan = DataPlan(
        len(prompts), longest + tokens, len(prompts), answer_limit=tokens, warm_share=0.0
    )
    script = Script(first, [], Piece(setting.frame.answer, ANSWER))
    ids, answers = converse(setting.target, script, sorted(setting.frame.stop_ids), plan, 0)
    device = setting.target.device
    return HeldOut(ids.to(device), answers.to(device), tuple(p.domain for p in prompts))


def _check_count(conversations: int) -> None:
    if conversations < SHARE:
        raise RequestError(
            f"{conversations} conversations are too few to set some aside: at least {SHARE} are needed"
        )


def split_held_out(corpus: Corpus, device: torch.device) -> tuple[Corpus, HeldOut]:
    """Set some conversations aside. Raises RequestError when there are too few."""
    _check_count(len(corpus))
    count = min(HELD_OUT_ROWS, len(corpus) // SHARE)
    tokens = torch.from_numpy(corpus.tokens[:count].astype(np.int64)).to(device)
    answers = torch.from_numpy(corpus.answers[:count]).to(device)
    rest = Corpus(corpus.tokens[count:], corpus.answers[count:])
    return rest, HeldOut(tokens, answers, ("conversations",) * count)


def _conversations(job: Job, setting: Setting, excluded: frozenset[str], rank: int) -> Corpus:
    """The conversations of this process: read from the job's file or an earlier start of this run, else written now."""
    if job.conversations is not None:
        return Corpus.load(job.conversations)
    path = job.output / f"conversations-{rank}.npz"
    if path.exists():
        return Corpus.load(path)
    given = [Turn(p.text, True, p.domain) for p in read_prompts(job.prompts)] if job.prompts else []
    corpus = write_conversations(
        setting.target,
        setting.tokenizer,
        setting.frame,
        job.data,
        job.plan.seed * 64 + rank,
        prompts=given,
        excluded=excluded,
        progress=setting.progress,
        compiled=job.compiled,
    )
    corpus.save(path)
    return corpus


def _start_draft(job: Job, shape: DraftShape) -> tuple[DraftModel, Tensor | None] | None:
    """The draft to go on from and its vocabulary: a folder or a GGUF file of the shape, or of one that can grow."""
    if job.start_draft is None:
        if job.new_vocabulary:
            raise OptionError(
                "--new-vocabulary: expected with --start-draft, whose vocabulary it replaces"
            )
        return None
    if job.start_draft.suffix == ".gguf":
        with open_gguf(job.start_draft) as file:
            stored, arrays = read_draft_gguf(file)
    else:
        stored, arrays = read_folder(job.start_draft)
    check_growth(stored, shape)
    return draft_of(stored, arrays)


def _fresh_draft(
    job: Job,
    setting: Setting,
    shape: DraftShape,
    start: tuple[DraftModel, Tensor | None] | None,
    ids: Tensor | None,
) -> DraftModel:
    """The draft to train, with the outputs `ids`: made of an earlier one, else of the target's layers."""
    target = setting.target
    torch.manual_seed(job.plan.seed)
    if start is not None:
        return grow(*start, shape, ids, target.head).to(target.device)
    draft = DraftModel(shape).to(target.device)
    start_from_target(draft, target, _sources(job, shape))
    if draft.lm_head is not None:
        with torch.no_grad():
            draft.lm_head.copy_(output_head(target, ids)[0].float())
    return draft


def _vocabulary(corpus: Corpus, shape: DraftShape, setting: Setting) -> Tensor:
    """The target ids of the draft's vocabulary; every process takes the first one's."""
    always = sorted(setting.tokenizer.stop_ids)
    ids = corpus.ranked(shape.vocabulary, shape.n_vocab, always)
    active = shape.active or shape.vocabulary
    ids = np.concatenate((np.sort(ids[:active]), ids[active:]))
    chosen = torch.from_numpy(ids.astype(np.int64)).to(setting.target.device)
    if dist.is_initialized():
        dist.broadcast(chosen, 0)
    return chosen


def _summed(counts: tuple[int, ...], device: torch.device) -> list[int]:
    """The sums over all processes."""
    values = torch.tensor(counts, device=device)
    if dist.is_initialized():
        dist.all_reduce(values)
    return [int(value) for value in values]


def _sources(job: Job, shape: DraftShape) -> tuple[int, ...]:
    """The target's layers that the draft's start from: by default evenly between its ends."""
    if job.start_layers:
        if len(job.start_layers) != shape.layers:
            raise RequestError(
                f"{len(job.start_layers)} layers to start from for a draft of {shape.layers}"
            )
        return job.start_layers
    step = shape.target_layers / (shape.layers + 1)
    return tuple(round((index + 1) * step) for index in range(shape.layers))


def _line(entry: dict[str, Any]) -> str:
    text = f"step {entry['step']:,} ({entry['seconds']:.0f} s)"
    if "loss" in entry:
        text += f": loss {entry['loss']:.3f}, tau in training {entry['train_tau']:.2f}"
    if "tau" in entry:
        text += "; held out " + " ".join(f"{w}:{v:.2f}" for w, v in entry["tau"].items())
    return text
