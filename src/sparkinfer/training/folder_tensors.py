"""Tensors of a model folder under GGUF's names, changed as a converter to GGUF changes them.

What differs is listed in llama.cpp's converter: queries and keys of the llama kind turn adjacent pairs instead of
halves; qwen35 stores norms less 1, the logarithm of a decay, a convolution with a dimension too many, and its value
heads grouped by key head (value head g r + j of the folder is j key_heads + g of a GGUF file, r value heads to a key
head); experts may be one matrix each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from sparkinfer.dflash.checkpoint import Checkpoint
from sparkinfer.errors import GGUFError, ShapeError, UnsupportedError
from sparkinfer.quant.formats import QUANT_FORMATS, dequantize
from sparkinfer.training.folder_config import FolderConfig

F32 = npt.NDArray[np.float32]
Change = Callable[[F32], F32]
_FLOATS = ("F32", "F16", "BF16")
_IGNORED = ("visual.", "mtp.")  # parts beside the text model
_INNER = "language_model."  # where a vision part stands beside it


@dataclass(frozen=True)
class FolderTensor:
    """A tensor of float32 made of `sources`, stacked where they are several. `shape[0]` is contiguous."""

    shape: tuple[int, ...]
    sources: tuple[str, ...]
    change: Change

    type_name = "F32"

    @property
    def n_bytes(self) -> int:
        return 4 * prod(self.shape)


def read_values(checkpoint: Checkpoint, name: str) -> F32:
    """A tensor's values, float32, slowest dimension first."""
    entry = checkpoint.tensors[name]
    blocks = checkpoint.data(name).reshape(-1, QUANT_FORMATS[entry.type_name].block_bytes)
    values = np.asarray(dequantize(entry.type_name, blocks), np.float32)
    return values.reshape(entry.shape[::-1])


def make(checkpoint: Checkpoint, tensor: FolderTensor) -> F32:
    """A tensor's values as a GGUF file has them, float32, slowest dimension first."""
    parts = [read_values(checkpoint, source) for source in tensor.sources]
    values = tensor.change(parts[0] if len(parts) == 1 else np.stack(parts))
    return np.ascontiguousarray(values, np.float32)


def tensors_of(config: FolderConfig, checkpoint: Checkpoint) -> dict[str, FolderTensor]:
    """All tensors of the text model.

    Raises: GGUFError for a missing one, UnsupportedError for one that has no place or another type, ShapeError.
    """
    table = _Table(config, checkpoint)
    hybrid = config.recurrent is not None
    norm = _more_by_one if hybrid else _same
    table.add("token_embd.weight", "embed_tokens.weight")
    table.add("output_norm.weight", "norm.weight", norm)
    head = "lm_head.weight"
    tied = config.tied if config.tied is not None else head not in table.names
    table.pass_by(head) if tied else table.add("output.weight", head)
    for index in range(config.integer("num_hidden_layers")):
        own, theirs = f"blk.{index}.", f"layers.{index}."
        table.add(own + "attn_norm.weight", theirs + "input_layernorm.weight", norm)
        after = "post_attention_norm" if hybrid else "ffn_norm"
        table.add(f"{own}{after}.weight", theirs + "post_attention_layernorm.weight", norm)
        if config.recurrent and config.recurrent[index]:
            _delta_net(table, own, theirs + "linear_attn.")
        else:
            _attention(table, own, theirs + "self_attn.", norm)
        if config.architecture == "qwen35moe":
            _experts(table, own, theirs + "mlp.")
        else:
            _feed_forward(table, own, theirs + "mlp.")
    table.check_rest()
    return table.tensors


class _Table:
    """Tensors as they are added, and which of the folder's are left."""

    def __init__(self, config: FolderConfig, checkpoint: Checkpoint) -> None:
        self.config, self.checkpoint = config, checkpoint
        self.tensors: dict[str, FolderTensor] = {}
        self.names = {name.removeprefix(_INNER): name for name in checkpoint.tensors}
        self.left = {name for name in self.names if not name.startswith(_IGNORED)}

    def add(
        self, name: str, source: str | Sequence[str], change: Change | None = None, drop: int = -1
    ) -> None:
        """`name` is made of `source` (several: stacked); `drop`: a dimension of length 1 that goes."""
        sources = (source,) if isinstance(source, str) else tuple(source)
        shapes = {self._shape(each) for each in sources}
        if len(shapes) != 1:
            raise ShapeError(f"{sources[0]} and its like have shapes {sorted(shapes)}")
        shape = shapes.pop() if len(sources) == 1 else (len(sources), *shapes.pop())
        own = change or _same
        if drop >= 0:
            own = lambda values: (change or _same)(values.squeeze(drop))  # noqa: E731
        try:  # on values that take no memory
            shape = own(np.broadcast_to(np.float32(0), shape)).shape
        except (ValueError, IndexError) as error:
            raise ShapeError(f"{sources[0]} has shape {shape}: {error}") from None
        self.left.difference_update(sources)
        stored = tuple(self.names[each] for each in sources)
        self.tensors[name] = FolderTensor(shape[::-1], stored, own)

    def pass_by(self, source: str) -> None:
        """The folder may have this tensor; it is not read."""
        self.left.discard(source)

    def check_rest(self) -> None:
        if rest := sorted(name for name in self.left if not name.endswith("rotary_emb.inv_freq")):
            raise UnsupportedError(
                f"{self.checkpoint.path} has {rest[0]} (and {len(rest) - 1} more), which a {self.config.architecture} "
                "target has no place for in training"
            )

    def _shape(self, source: str) -> tuple[int, ...]:
        """Slowest dimension first."""
        if source not in self.names:
            raise GGUFError(f"{self.checkpoint.path} has no tensor {source}")
        entry = self.checkpoint.tensors[self.names[source]]
        if entry.type_name not in _FLOATS:
            raise UnsupportedError(
                f"{source} in {self.checkpoint.path} has type {entry.type_name}; accepted: {', '.join(_FLOATS)}"
            )
        return entry.shape[::-1]


def _same(values: F32) -> F32:
    return values


def _more_by_one(values: F32) -> F32:
    return values + np.float32(1)


def _order(places: npt.NDArray[np.int64], axis: int = 0) -> Change:
    """Rows (axis 0) or columns (axis -1) in this order."""

    def change(values: F32) -> F32:
        if values.shape[axis] != len(places):
            raise ValueError(f"{values.shape[axis]} of them, expected {len(places)}")
        return values.take(places, axis)

    return change


def _attention(table: _Table, own: str, theirs: str, norm: Change) -> None:
    kind, size = table.config.architecture, table.config.head_size
    turned: Change | None = (lambda rows: _pairs(rows, size)) if kind == "llama" else None
    for name, change in (("q", turned), ("k", turned), ("v", None)):
        table.add(f"{own}attn_{name}.weight", f"{theirs}{name}_proj.weight", change)
    table.add(own + "attn_output.weight", theirs + "o_proj.weight")
    if kind != "llama":
        for name in ("q_norm", "k_norm"):
            table.add(f"{own}attn_{name}.weight", f"{theirs}{name}.weight", norm)


def _pairs(rows: F32, head_size: int) -> F32:
    """Rows of a rotation of halves, reordered for a rotation of adjacent pairs."""
    halves = rows.reshape(-1, 2, head_size // 2, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _feed_forward(table: _Table, own: str, theirs: str, ending: str = "") -> None:
    for name in ("gate", "up", "down"):
        table.add(f"{own}ffn_{name}{ending}.weight", f"{theirs}{name}_proj.weight")


def _experts(table: _Table, own: str, theirs: str) -> None:
    table.add(own + "ffn_gate_inp.weight", theirs + "gate.weight")
    table.add(own + "ffn_gate_inp_shexp.weight", theirs + "shared_expert_gate.weight", drop=0)
    _feed_forward(table, own, theirs + "shared_expert.", "_shexp")
    both = theirs + "experts.gate_up_proj"
    if both in table.names:  # one tensor of all experts, rows of gates before rows of ups
        table.add(own + "ffn_gate_exps.weight", both, lambda x: np.split(x, 2, 1)[0])
        table.add(own + "ffn_up_exps.weight", both, lambda x: np.split(x, 2, 1)[1])
        table.add(own + "ffn_down_exps.weight", theirs + "experts.down_proj")
        return
    numbers = range(table.config.integer("num_experts"))
    for name in ("gate", "up", "down"):
        sources = [f"{theirs}experts.{number}.{name}_proj.weight" for number in numbers]
        table.add(f"{own}ffn_{name}_exps.weight", sources)


def _delta_net(table: _Table, own: str, theirs: str) -> None:
    c = table.config
    keys, values = c.integer("linear_num_key_heads"), c.integer("linear_num_value_heads")
    size = c.integer("linear_key_head_dim")
    heads = np.arange(values).reshape(keys, -1).T.ravel()  # the folder's head for each of a file
    rows = (heads[:, None] * size + np.arange(size)).ravel()
    after = np.concatenate((np.arange(2 * keys * size), 2 * keys * size + rows))
    changes: Mapping[str, tuple[str, Change | None, int]] = {
        "attn_qkv.weight": ("in_proj_qkv.weight", _order(after), -1),
        "attn_gate.weight": ("in_proj_z.weight", _order(rows), -1),
        "ssm_alpha.weight": ("in_proj_a.weight", _order(heads), -1),
        "ssm_beta.weight": ("in_proj_b.weight", _order(heads), -1),
        "ssm_a": ("A_log", lambda x: -np.exp(_order(heads)(x)), -1),
        "ssm_dt.bias": ("dt_bias", _order(heads), -1),
        "ssm_conv1d.weight": ("conv1d.weight", _order(after), 1),
        "ssm_norm.weight": ("norm.weight", None, -1),
        "ssm_out.weight": ("out_proj.weight", _order(rows, -1), -1),
    }
    for name, (source, change, drop) in changes.items():
        table.add(own + name, theirs + source, change, drop)
