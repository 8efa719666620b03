"""What a target takes of its backend's memory, reckoned before it is loaded; what cannot fit is refused in one line."""

from dataclasses import asdict, dataclass
from typing import Any

from sparkinfer.backend.base import Backend, CacheFormat
from sparkinfer.errors import MemoryLimitError
from sparkinfer.gguf import GGUFFile
from sparkinfer.models.config import MAX_WIDTH, ModelConfig
from sparkinfer.state import StateShape
from sparkinfer.state.kv_cache import KvShape
from sparkinfer.state.sequence import MARKS

DEFAULT_CONTEXT = 8192  # most tokens a sequence gets when nobody asks
LOGIT_ROWS = 64  # most rows of a run that gives logits for all of them
_REPACKED = 1.1  # packed weights over the file's, and what packing takes meanwhile
_GRAPHS = 1 << 28  # compiled kernels and recorded graphs of a device
_FLOAT = 4


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes: packed weights, keys and values of one sequence with the table of rotations, recurrent states with their
    copies, buffers between layers, and a device's kernels and graphs.
    """

    weights: int
    cache: int
    state: int
    buffers: int
    graphs: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.state + self.buffers + self.graphs

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}

    def describe(self) -> str:
        parts = asdict(self)
        return ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)


def gib(size: int) -> str:
    return f"{size / 2**30:.1f}" if size >= 2**28 else f"{size / 2**30:.2f}"


def usual_context(config: ModelConfig) -> int:
    """Tokens of a sequence when nobody asks."""
    return min(config.context_length, DEFAULT_CONTEXT)


def cache_shape(config: ModelConfig, cache_format: CacheFormat) -> KvShape:
    """Keys and values of the layers that have them."""
    layers = config.recurrent.count(False)
    return KvShape(layers, config.kv_heads, config.head_size, cache_format)


def plan_memory(
    file: GGUFFile,
    config: ModelConfig,
    shape: StateShape,
    context: int,
    exact: bool,
    backend: Backend,
    *,
    more: int = 0,
) -> MemoryPlan:
    """What a target with one sequence of `context` tokens takes on `backend`; `exact`: weights become float32.

    `more`: bytes of weights that are kept in a second form.
    """
    tensors = file.tensors.values()
    weights = sum(info.n_values * _FLOAT if exact else info.n_bytes for info in tensors)
    recurrent = shape.recurrent
    state = 0
    if recurrent is not None:
        copies = 1 + MARKS + backend.asynchronous  # one for a run ahead
        state = recurrent.state_bytes * copies + recurrent.record_bytes
    logits = min(LOGIT_ROWS, backend.chunk) * config.n_vocab
    turned = 0
    if shape.kv.format == "q8_0" and not backend.on_host:  # prompts read a layer as float16
        turned = 2 * context * config.kv_heads * config.head_size * 2
    return MemoryPlan(
        weights=int(weights * _REPACKED) + more,
        cache=shape.kv.n_bytes(context) + turned + context * config.rotated * _FLOAT,
        state=state,
        buffers=_FLOAT * (backend.chunk * _row_values(config) + logits),
        graphs=0 if backend.on_host else _GRAPHS,
    )


def _row_values(config: ModelConfig) -> int:
    """Values of four bytes that a row needs between layers: inputs and outputs of products, int8 blocks (0.3 of their
    floats; the CPU keeps two forms of some inputs), the float16 form of a wide product's input.
    """
    embed, width = config.n_embd, config.heads * config.head_size
    kv = config.kv_heads * config.head_size
    count = 4.0 * embed + 6.0 * width + 2 * kv
    widest = max(embed, width, config.n_ff)
    if config.gdn is not None:
        gdn = config.gdn
        count += 2 * gdn.channels + 8.5 * gdn.value_width + (2 * 64 + 3) * gdn.value_heads
        widest = max(widest, gdn.value_width)
    if config.moe is None:
        count += 1.3 * config.n_ff
    else:
        moe = config.moe
        slots = moe.used * (1.8 * moe.width + embed + 4)
        count += slots + 1.3 * moe.shared + embed + 2 * moe.experts
    return int(count + 0.5 * widest)


def check_memory(
    plan: MemoryPlan, name: str, context: int, backend: Backend, *, halves: bool = False
) -> None:
    """Raise MemoryLimitError where the plan is larger than what is free, with the largest context that fits.

    `halves`: the cache could be one of 8 bits.
    """
    free = backend.memory()
    if plan.total <= free:
        return
    fits = int(context * (1 - (plan.total - free) / plan.cache)) // MAX_WIDTH * MAX_WIDTH
    advice = f"-c {fits} fits" if fits > 0 else "no context fits: take a smaller file"
    if halves and plan.total - plan.cache * 7 // 16 <= free:
        advice += ", or --kv-cache q8_0, which takes about half the cache"
    where = "of memory" if backend.on_host else "on the GPU"
    raise MemoryLimitError(
        f"{name} with a context of {context} needs {gib(plan.total)} GiB {where} ({plan.describe()}),"
        f" {gib(free)} are free; {advice}"
    )
