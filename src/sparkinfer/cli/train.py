"""`sparkinfer train`: train a draft for a model, from nothing but the model."""

from pathlib import Path
from typing import Annotated

import typer

from sparkinfer.cli.console import progress, status
from sparkinfer.cli.flags import ProcessFlags, verb
from sparkinfer.errors import DeviceError, OptionError
from sparkinfer.options import Options

_UNBOUNDED = 10**9  # steps of a run that ends by the clock


@verb(ProcessFlags())
def command(
    *,
    model: Annotated[
        str,
        typer.Option(
            "-m",
            "--model",
            help="The target: a file, a folder of safetensors, a known name or hf:user/repo.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="A folder; a run that stopped goes on from it.")
    ],
    minutes: Annotated[
        float, typer.Option("--minutes", min=0, help="End after this time; 0 counts steps alone.")
    ] = 0.0,
    steps: Annotated[
        int,
        typer.Option("--steps", min=0, help="Updates, at most; 0: 2000, or what --minutes allow."),
    ] = 0,
    layers: Annotated[int, typer.Option("--layers", help="Layers of the draft.")] = 3,
    kv_heads: Annotated[
        int, typer.Option("--kv-heads", help="Heads of keys and values; 0: as the target.")
    ] = 0,
    taps: Annotated[
        str, typer.Option("--taps", help="Layers of the target to read, like 1,8,14,20,27.")
    ] = "",
    start_layers: Annotated[
        str,
        typer.Option(
            "--start-layers", help="Layers of the target the draft's start from, like 8,16,24."
        ),
    ] = "",
    start_draft: Annotated[
        Path | None,
        typer.Option(
            "--start-draft", help="A draft to go on from, folder or GGUF, of this shape or smaller."
        ),
    ] = None,
    new_vocabulary: Annotated[
        bool,
        typer.Option("--new-vocabulary", help="Choose the tokens of --start-draft's anew."),
    ] = False,
    block: Annotated[int, typer.Option("--block", help="Rows of a block.")] = 8,
    from_anchor: Annotated[
        bool, typer.Option("--from-anchor", help="The anchor's row proposes a token too.")
    ] = False,
    causal: Annotated[
        bool, typer.Option("--causal/--no-causal", help="Rows see earlier rows of a block only.")
    ] = True,
    window: Annotated[int, typer.Option("--window", help="Context a block sees; 0: all.")] = 0,
    vocabulary: Annotated[
        int, typer.Option("--vocabulary", help="Tokens the draft can propose; 0: all.")
    ] = 0,
    active: Annotated[
        int,
        typer.Option(
            "--active",
            help="Of --vocabulary: tokens always proposed; others once they occur. 0: all.",
        ),
    ] = 0,
    markov: Annotated[int, typer.Option("--markov", help="Rank of a Markov head; 0: none.")] = 0,
    own_head: Annotated[
        bool, typer.Option("--own-head", help="Learn an LM head, instead of using the target's.")
    ] = False,
    conversations: Annotated[
        int, typer.Option("--conversations", min=1, help="Conversations the model writes.")
    ] = 2048,
    length: Annotated[int, typer.Option("--length", min=8, help="Tokens of a conversation.")] = 512,
    generate_batch: Annotated[
        int, typer.Option("--generate-batch", min=1, help="Conversations written at a time.")
    ] = 64,
    answer_limit: Annotated[
        int, typer.Option("--answer-limit", min=1, help="Tokens of an answer, at most.")
    ] = 256,
    patterns: Annotated[
        float,
        typer.Option("--patterns", help="Share of whole questions among the user turns."),
    ] = 0.3,
    data: Annotated[
        Path | None, typer.Option("--data", help="Conversations of an earlier run (.npz).")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", help="What to ask, one a line or JSONL; default: the model asks."
        ),
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option("--held-out", help="Prompts to measure with, never trained on.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", help="Conversations a step.")] = 8,
    anchors: Annotated[int, typer.Option("--anchors", help="Blocks a conversation and step.")] = 32,
    lr: Annotated[float, typer.Option("--lr", help="Peak learning rate.")] = 1e-3,
    optimiser: Annotated[str, typer.Option("--optimiser", help="adamw | muon.")] = "adamw",
    weighting: Annotated[str, typer.Option("--weighting", help="dpace | exponential.")] = "dpace",
    smoothing: Annotated[
        float,
        typer.Option(
            "--smoothing", help="D-PACE: 0 weighs by the expected accepted length itself, 1 evenly."
        ),
    ] = 0.5,
    reach: Annotated[
        float,
        typer.Option(
            "--reach", min=0, help="D-PACE: slots after this many matter little; 0: all do."
        ),
    ] = 0.0,
    distill: Annotated[
        float, typer.Option("--distill", help="Share of the loss on the target's distribution.")
    ] = 0.0,
    grid_from: Annotated[
        float,
        typer.Option(
            "--grid-from", help="From this share of the run on, train through Q4_1; 1: never."
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of data and training.")] = 0,
    evaluate_every: Annotated[
        int,
        typer.Option("--evaluate-every", min=0, help="Steps between measurements; 0: at the end."),
    ] = 0,
    save_every: Annotated[
        int, typer.Option("--save-every", min=0, help="Steps between checkpoints; 0: at the end.")
    ] = 500,
    device: Annotated[str, typer.Option("--device", help="auto | cpu | cuda.")] = "auto",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the training step; pays in long runs.")
    ] = False,
    quantisation: Annotated[
        str, typer.Option("--quantisation", help="Format of the matrices in draft.gguf.")
    ] = "Q8_0",
    options: Options,
) -> None:
    """Train a DFlash draft: the model writes conversations, the draft learns to propose its tokens.

    Several GPUs: torchrun --nproc-per-node N -m sparkinfer train ...
    """
    try:
        from sparkinfer.training.pipeline import Job, run_job
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise DeviceError(
            f"training needs {error.name}, which is not installed; pip install 'sparkinfer[train]'"
        ) from None
    from sparkinfer.pull import locate
    from sparkinfer.training.config import DataPlan, TrainPlan

    with progress(options) as report:
        job = Job(
            model=locate(model, options.path("model_dir"), report),
            output=output,
            data=DataPlan(
                conversations,
                length,
                min(generate_batch, conversations),
                answer_limit=answer_limit,
                patterns=patterns,
            ),
            plan=TrainPlan(
                steps=steps or (_UNBOUNDED if minutes else 2000),
                minutes=minutes,
                rows=rows,
                anchors=anchors,
                lr=lr,
                optimiser=optimiser,
                weighting=weighting,
                smoothing=smoothing,
                reach=reach,
                distill=distill,
                grid_from=grid_from,
                seed=seed,
                evaluate_every=evaluate_every,
                save_every=save_every,
            ),
            layers=layers,
            kv_heads=kv_heads,
            taps=_numbers("--taps", taps),
            start_draft=start_draft,
            new_vocabulary=new_vocabulary,
            start_layers=_numbers("--start-layers", start_layers),
            block=block,
            from_anchor=from_anchor,
            causal=causal,
            window=window,
            vocabulary=vocabulary,
            active=active,
            markov_rank=markov,
            own_head=own_head,
            conversations=data,
            prompts=prompts,
            held_out=held_out,
            device=device,
            compiled=compiled,
            quantisation=quantisation,
        )
        measured = run_job(job, status, report)
    if measured is not None:
        print(measured.describe())
        status(f"wrote {output}/model.safetensors and {output}/draft.gguf")


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise OptionError(f"{flag} {text}: expected numbers with commas between them") from None
