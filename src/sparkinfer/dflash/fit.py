"""Whether a draft's configuration, its tensors and its target belong together: every mismatch at once."""

from sparkinfer.dflash.checkpoint import Checkpoint
from sparkinfer.dflash.config import MAX_BLOCK, DraftConfig
from sparkinfer.dflash.layers import CONVOLUTIONS
from sparkinfer.errors import ShapeError, UnsupportedError
from sparkinfer.models.config import ModelConfig
from sparkinfer.models.weights import Shape, tensor_problems

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
MASK = "mask_embedding"
OFFSETS, IDS = "d2t", "draft_ids"
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
SELECTION = "candidate_selector.hidden_projection.weight"
# Read by other programs only: they change no proposal.
_IGNORED = ("t2d", "confidence_head.proj.weight", "confidence_head.proj.bias")


def check_fit(config: DraftConfig, checkpoint: Checkpoint, target: ModelConfig) -> None:
    """Raise ShapeError listing what contradicts, UnsupportedError listing what this build does not compute."""
    wrong = [
        *_against_target(config, checkpoint, target),
        *_in_itself(config, draft_vocabulary(checkpoint)),
        *tensor_problems(checkpoint, expected(config, checkpoint, target)),
    ]
    if wrong:
        raise ShapeError(f"the draft {checkpoint.path} does not fit: {'; '.join(wrong)}")
    lacking = [*_not_computed(config), *_unused(config, checkpoint, target)]
    if config.selector_rank and draft_vocabulary(checkpoint) is not None:
        lacking.append("a selector of candidates over a reduced vocabulary is not supported")
    if lacking:
        raise UnsupportedError(f"the draft {checkpoint.path}: {'; '.join(lacking)}")
    names = [*expected(config, checkpoint, target)]
    checkpoint.require_decodable(name for name in names if name not in (OFFSETS, IDS))


def expected(config: DraftConfig, checkpoint: Checkpoint, target: ModelConfig) -> dict[str, Shape]:
    """Tensors and shapes (contiguous dimension first), optional ones only where the file has them."""
    h, heads, kv = (
        config.n_embd,
        config.heads * config.head_size,
        config.kv_heads * config.head_size,
    )
    shapes: dict[str, Shape] = {
        "fc.weight": (len(config.taps) * h, h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for layer in range(config.n_layers):
        prefix = f"layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (h,),
            f"{prefix}self_attn.q_proj.weight": (h, heads),
            f"{prefix}self_attn.k_proj.weight": (h, kv),
            f"{prefix}self_attn.v_proj.weight": (h, kv),
            f"{prefix}self_attn.o_proj.weight": (heads, h),
            f"{prefix}self_attn.q_norm.weight": (config.head_size,),
            f"{prefix}self_attn.k_norm.weight": (config.head_size,),
            f"{prefix}post_attention_layernorm.weight": (h,),
            f"{prefix}mlp.gate_proj.weight": (h, config.n_ff),
            f"{prefix}mlp.up_proj.weight": (h, config.n_ff),
            f"{prefix}mlp.down_proj.weight": (config.n_ff, h),
        }
        if config.conv_taps > 0 and config.conv_group > 0:
            weights = 2 * config.conv_taps * h // config.conv_group
            for name in CONVOLUTIONS:
                shapes[f"{prefix}{name}.base_kernel"] = (h, config.conv_taps, 2)
                shapes[f"{prefix}{name}.kernel_projection.weight"] = (h, weights)
    if config.selector_rank > 0:
        shapes |= dict.fromkeys(CODEBOOKS, (config.selector_rank, target.n_vocab))
        shapes[SELECTION] = (h, config.selector_rank)
    return shapes | _optional(config, checkpoint, target)


def draft_vocabulary(checkpoint: Checkpoint) -> int | None:
    """Number of ids the draft can propose, None for all of the target's."""
    for name in (IDS, OFFSETS):
        if name in checkpoint.tensors:
            return checkpoint.tensors[name].shape[0]
    return None


def _optional(config: DraftConfig, checkpoint: Checkpoint, target: ModelConfig) -> dict[str, Shape]:
    h, tensors = config.n_embd, checkpoint.tensors
    reduced = draft_vocabulary(checkpoint)
    shapes: dict[str, Shape] = {
        EMBEDDING: (h, target.n_vocab),
        HEAD: (h, reduced or target.n_vocab),
        MASK: (h,),
        OFFSETS: (reduced or 0,),
        IDS: (reduced or 0,),
    }
    if any(name in tensors for name in MARKOV):
        rank = next(tensors[name].shape[0] for name in MARKOV if name in tensors)
        shapes[MARKOV[0]] = (rank, target.n_vocab)
        second = tensors[MARKOV[1]].shape if MARKOV[1] in tensors else ()
        whole = (rank, target.n_vocab)  # over all ids, also where the draft proposes only some
        shapes[MARKOV[1]] = whole if second == whole else (rank, reduced or target.n_vocab)
        return {name: shape for name, shape in shapes.items() if name in tensors or name in MARKOV}
    return {name: shape for name, shape in shapes.items() if name in tensors}


def _against_target(config: DraftConfig, checkpoint: Checkpoint, target: ModelConfig) -> list[str]:
    wrong = []
    if config.n_embd != target.n_embd:
        wrong.append(f"its hidden size is {config.n_embd}, the target's is {target.n_embd}")
    if config.n_vocab != target.n_vocab and draft_vocabulary(checkpoint) is None:
        wrong.append(f"its vocabulary has {config.n_vocab} ids, the target's {target.n_vocab}")
    if config.target_layers not in (None, target.n_layers):
        wrong.append(
            f"it was made for a target of {config.target_layers} layers, this one has {target.n_layers}"
        )
    outside = [tap for tap in config.taps if not 0 <= tap < target.n_layers]
    if outside:
        wrong.append(f"it reads layers {outside}, the target has 0 .. {target.n_layers - 1}")
    if not 0 <= config.mask_id < target.n_vocab and MASK not in checkpoint.tensors:
        wrong.append(
            f"its mask token {config.mask_id} is outside the vocabulary of {target.n_vocab}"
        )
    return wrong


def _in_itself(config: DraftConfig, reduced: int | None) -> list[str]:
    wrong = []
    if not 0 <= config.active <= (reduced or 0):
        wrong.append(
            f"{config.active} of its tokens can always be proposed, expected 0 to {reduced or 0}"
        )
    if config.heads % config.kv_heads:
        wrong.append(f"{config.heads} heads are no multiple of {config.kv_heads} kv heads")
    if not config.taps:
        wrong.append("it lists no layers of the target to read")
    if config.conv_group > 0 and config.n_embd % config.conv_group:
        wrong.append(f"its hidden size is no multiple of conv_group_size {config.conv_group}")
    if config.selector_rank and not 0 < config.selector_top <= config.n_vocab:
        wrong.append(f"selector_top_k is {config.selector_top}, expected 1 .. {config.n_vocab}")
    if config.block < 2:
        wrong.append(f"its block size is {config.block}, expected 2 .. {MAX_BLOCK}")
    return wrong


def _not_computed(config: DraftConfig) -> list[str]:
    lacking = []
    if config.conv_taps and (config.conv_group < 1 or config.conv_group % 16):
        lacking.append(f"conv_group_size is {config.conv_group}, expected a multiple of 16")
    if config.block > MAX_BLOCK:
        lacking.append(f"blocks of {config.block} are not supported; accepted: 2 .. {MAX_BLOCK}")
    for what, width, unit in (
        ("the hidden size", config.n_embd, 32),
        ("the head size", config.head_size, 16),
        ("the width of attention", config.heads * config.head_size, 32),
        ("the feed-forward width", config.n_ff, 32),
    ):
        if width % unit:
            lacking.append(f"{what} is {width}, expected a multiple of {unit}")
    return lacking


def _unused(config: DraftConfig, checkpoint: Checkpoint, target: ModelConfig) -> list[str]:
    """Weights that nothing reads would change the proposals without a word."""
    known = {*expected(config, checkpoint, target), *_IGNORED}
    unused = [name for name in checkpoint.tensors if name not in known]
    if not unused:
        return []
    more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
    return [f"it has weights this build does not use: {', '.join(unused[:5])}{more}"]
