"""The named tensors of a draft, in safetensors or GGUF, behind one table under the checkpoint's own names."""

import json
import mmap
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from sparkinfer.errors import GGUFError, MissingFileError, UnsupportedError
from sparkinfer.gguf import GGUFFile
from sparkinfer.models.table import Table
from sparkinfer.quant.encode import quantize
from sparkinfer.quant.formats import QUANT_FORMATS

U8 = NDArray[np.uint8]
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_HEADER_WORD = 8  # a safetensors file begins with the length of its JSON header, a 64-bit integer
_ENCODED_VALUES = 1 << 15  # at a time: temporaries stay near the cache
_FLOATS = ("F32", "F16", "BF16")
_INTEGERS: Mapping[str, type[np.signedinteger[Any]]] = {"I32": np.int32, "I64": np.int64}


@dataclass(frozen=True)
class Entry:
    """`n_bytes` from `start` of what the file calls `source`; `shape[0]` is contiguous.

    `stored` (not ""): the type that the file has; its bytes are read and encoded as `type_name`.
    """

    source: str
    shape: tuple[int, ...]
    type_name: str
    n_bytes: int
    start: int = 0
    stored: str = ""

    @property
    def n_values(self) -> int:
        return prod(self.shape)

    @property
    def n_rows(self) -> int:
        """How many rows of `shape[0]` values the tensor has."""
        return prod(self.shape[1:])


class Checkpoint:
    """A table of tensors (`models.weights.TensorSource`). `read` and `drop` take the file's own names."""

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, Entry],
        read: Callable[[str], U8],
        drop: Callable[[str], None],
    ) -> None:
        self.path = path
        self._entries = dict(entries)
        self._read, self._drop = read, drop

    @property
    def tensors(self) -> Mapping[str, Entry]:
        return MappingProxyType(self._entries)

    def data(self, name: str) -> U8:
        """The bytes of a tensor, uint8 [n_bytes]: a view of the mapped file, or new ones where it is encoded."""
        entry = self._entries[name]
        raw = self._read(entry.source)
        if not entry.stored:
            return raw[entry.start : entry.start + entry.n_bytes]
        stored = QUANT_FORMATS[entry.stored]
        row_bytes = entry.shape[0] // stored.block_size * stored.block_bytes
        rows = raw[entry.start : entry.start + entry.n_rows * row_bytes].reshape(entry.n_rows, -1)
        out = np.empty((entry.n_rows, entry.n_bytes // entry.n_rows), np.uint8)
        step = max(1, _ENCODED_VALUES // entry.shape[0])
        for first in range(0, entry.n_rows, step):
            part = slice(first, first + step)
            values = Table(entry.stored, rows[part]).take(slice(None))
            out[part] = quantize(entry.type_name, values).reshape(len(values), -1)
        return out.reshape(-1)

    def table(self, name: str) -> Table:
        """A matrix whose rows are read one at a time."""
        entry = self._entries[name]
        return Table(entry.type_name, self.data(name).reshape(entry.n_rows, -1))

    def encode(self, kind: str, keep: Container[str] = ()) -> None:
        """Offer every matrix of floats but `keep` as `kind` from now on, where its rows are whole blocks."""
        target = QUANT_FORMATS[kind]
        for name, entry in self._entries.items():
            whole = entry.n_rows > 1 and entry.shape[0] % target.block_size == 0
            if entry.type_name in _FLOATS and whole and name not in keep:
                n_bytes = entry.n_values // target.block_size * target.block_bytes
                self._entries[name] = replace(
                    entry, type_name=kind, n_bytes=n_bytes, stored=entry.type_name
                )

    def release(self, name: str) -> None:
        """Let the system take back the memory of a tensor's pages."""
        self._drop(self._entries[name].source)

    def integers(self, name: str) -> NDArray[np.int64]:
        """A tensor of whole numbers. Raises UnsupportedError for another type."""
        entry = self._entries[name]
        kind = _INTEGERS.get(entry.type_name)
        if kind is None:
            raise UnsupportedError(
                f"{name} in {self.path} has type {entry.type_name}; accepted: {', '.join(_INTEGERS)}"
            )
        values: NDArray[np.int64] = self.data(name).view(kind).astype(np.int64)
        return values

    def require_decodable(self, names: Iterable[str] | None = None) -> None:
        """Raise UnsupportedError when one of the tensors, by default any, has no decoder."""
        for name in self._entries if names is None else names:
            kind = self._entries[name].type_name
            if kind not in QUANT_FORMATS:
                raise UnsupportedError(
                    f"{name} in {self.path} has type {kind}; supported types: {', '.join(QUANT_FORMATS)}"
                )

    def split_rows(self, name: str, parts: Mapping[str, int]) -> None:
        """Replace a fused matrix by consecutive runs of its rows: new name -> rows. Nothing is copied."""
        entry = self._entries.pop(name)
        row_bytes = entry.n_bytes // entry.n_rows
        start = entry.start
        for part, rows in parts.items():
            size = rows * row_bytes
            shape = (entry.shape[0], rows)
            self._entries[part] = replace(entry, shape=shape, n_bytes=size, start=start)
            start += size


# ---- safetensors ----

_BARE = (
    "mask_embedding",
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
)
_ALIASES = {f"{name}.weight": name for name in _BARE}


def open_safetensors(folder: Path) -> Checkpoint:
    """The tensors of `model.safetensors`, or of the shards its index lists; a `model.` prefix is dropped.

    Raises MissingFileError, GGUFError for a damaged file.
    """
    entries: dict[str, Entry] = {}
    views: dict[str, U8] = {}
    for path in _shards(folder):
        for name, entry, view in _mapped(path):
            plain = _ALIASES.get(name.removeprefix("model."), name.removeprefix("model."))
            if plain in entries:
                raise GGUFError(f"tensor {plain} of {path} occurs twice in {folder}")
            entries[plain] = replace(entry, source=plain)
            views[plain] = view
    return Checkpoint(folder, entries, views.__getitem__, lambda name: _forget(views[name]))


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file() and not (folder / _SINGLE).is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise GGUFError(f"{index} has no readable weight_map: {error}") from None
        strange = [name for name in names if Path(str(name)).name != name]
        if strange:
            raise GGUFError(f"{index} names {strange[0]!r}, which is not a file of its folder")
        paths = [folder / name for name in names]
    else:
        paths = [folder / _SINGLE]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise MissingFileError(f"{folder} lacks {', '.join(missing)}")
    return paths


def _mapped(path: Path) -> list[tuple[str, Entry, U8]]:
    """Names, entries and bytes of one file. The library checks the header; the bytes are mapped, not copied."""
    try:
        with safe_open(path, framework="numpy") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise GGUFError(f"{path} is no readable safetensors file: {error}") from None
    with path.open("rb") as handle:
        data = np.frombuffer(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    length = int(data[:_HEADER_WORD].view("<u8")[0])
    base = _HEADER_WORD + length
    header: dict[str, Any] = json.loads(data[_HEADER_WORD:base].tobytes())
    found = []
    for name, kind in kinds.items():
        begin, end = header[name]["data_offsets"]
        shape = tuple(reversed(header[name]["shape"])) or (1,)
        entry = Entry(name, shape, kind, end - begin)
        found.append((name, entry, data[base + begin : base + end]))
    return found


def _forget(view: U8) -> None:
    """Give back the pages of a slice of a mapping."""
    base = view.base
    while isinstance(base, np.ndarray):
        view_base, base = base, base.base
    mapped = base.obj if isinstance(base, memoryview) else base
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        first = view.ctypes.data - view_base.ctypes.data
        begin = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (first + view.size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)


# ---- GGUF ----

_GGUF_NAMES = {
    "fc": "fc.weight",
    "dflash.fc": "fc.weight",
    "enc.output_norm": "hidden_norm.weight",
    "dflash.hidden_norm": "hidden_norm.weight",
    "output_norm": "norm.weight",
    "token_embd": "embed_tokens.weight",
    "output": "lm_head.weight",
    "d2t": "d2t",
    "t2d": "t2d",
    "draft_ids": "draft_ids",
    "mask_embedding": "mask_embedding",
    "markov_w1": "markov_head.markov_w1.weight",
    "markov_w2": "markov_head.markov_w2.weight",
    "conf_proj": "confidence_head.proj.weight",
    "selector_prev": "candidate_selector.predecessor_codebook",
    "selector_next": "candidate_selector.successor_codebook",
    "selector_hidden": "candidate_selector.hidden_projection.weight",
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj.weight",
    "attn_k": "self_attn.k_proj.weight",
    "attn_v": "self_attn.v_proj.weight",
    "attn_qkv": "self_attn.qkv_proj.weight",
    "attn_output": "self_attn.o_proj.weight",
    "attn_q_norm": "self_attn.q_norm.weight",
    "attn_k_norm": "self_attn.k_norm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "ffn_gate": "mlp.gate_proj.weight",
    "ffn_up": "mlp.up_proj.weight",
    "ffn_down": "mlp.down_proj.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection.weight",
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def open_gguf_draft(file: GGUFFile) -> Checkpoint:
    """The tensors of an open GGUF file under the checkpoint's names; unknown ones keep theirs."""
    entries: dict[str, Entry] = {}
    for name, info in file.tensors.items():
        known = _checkpoint_name(name)
        if known in entries:
            raise GGUFError(f"{file.path} has two tensors for {known}: {name} is one of them")
        entries[known] = Entry(name, info.shape, info.type_name, info.n_bytes)
    return Checkpoint(file.path, entries, file.data, file.release)


def _checkpoint_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    match = _LAYER.fullmatch(stem)
    if match and match[2] in _GGUF_LAYER_NAMES:
        return f"layers.{int(match[1])}.{_GGUF_LAYER_NAMES[match[2]]}"
    return _GGUF_NAMES.get(stem, name)
