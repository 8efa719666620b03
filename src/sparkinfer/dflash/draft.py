"""load_draft: from a folder or a GGUF file to a draft for one target, everything checked before it is loaded."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend.base import Backend, Buffer, Weight
from sparkinfer.dflash.block_draft import BlockDraft
from sparkinfer.dflash.checkpoint import Checkpoint, open_gguf_draft, open_safetensors
from sparkinfer.dflash.config import DraftConfig, read_json_config
from sparkinfer.dflash.config_gguf import read_gguf_config
from sparkinfer.dflash.context import ContextRows, cache_rows_of
from sparkinfer.dflash.fit import (
    CODEBOOKS,
    EMBEDDING,
    HEAD,
    IDS,
    MARKOV,
    MASK,
    OFFSETS,
    SELECTION,
    check_fit,
    draft_vocabulary,
)
from sparkinfer.dflash.layers import CONVOLUTIONS, build_layer
from sparkinfer.dflash.network import Choosing, DraftNetwork, VectorProduct
from sparkinfer.dflash.occurring import (
    Change,
    Exchanged,
    Occurring,
    Repacked,
    Rows,
    first_shown,
)
from sparkinfer.dflash.proposals import MarkovHead, Output, Selector
from sparkinfer.errors import MemoryLimitError, MissingFileError, RequestError, ShapeError
from sparkinfer.gguf import open_gguf
from sparkinfer.kernels.linear.weights import PackedWeight
from sparkinfer.models.config import MAX_WIDTH, ModelConfig
from sparkinfer.models.decoder import Target
from sparkinfer.models.table import Table
from sparkinfer.models.weights import Progress, Weights
from sparkinfer.state.kv_cache import KvShape

__all__ = ["BlockDraft", "load_draft"]
_MOST_BEFORE = 64 * 2**20  # numbers of a Markov head's first table that a device holds as float32


def load_draft(
    path: str | os.PathLike[str],
    target: Target,
    *,
    context: int | None = None,
    floats: Literal["q8_0", "stored"] = "q8_0",
    window: int | None = None,
    causal: bool | None = None,
    markov: bool = True,
    shorten: bool = False,
    progress: Progress | None = None,
) -> BlockDraft:
    """Open, check and pack a draft for `target`, on its backend. `context`: most tokens (default: the target's).

    `path` is a folder with config.json and model.safetensors (or shards and their index), or a GGUF file. Matrices of
    floats become Q8_0 unless `floats` is "stored" or the target computes in float32: less to read, and a proposal need
    not be exact. `window` narrows what every layer sees (at long contexts that is most of a draft's time) and
    `causal` decides for all layers whether a row of a block sees later ones, where a file says otherwise or nothing.
    Without `markov` a Markov head is left out. `shorten`: blocks have the rows of the depth in use even if the draft
    was trained on whole blocks: cheaper, and other proposals, for then no slot sees the rows behind the last one.
    Raises MissingFileError, GGUFError for a damaged file, ShapeError listing all that does not fit, UnsupportedError,
    MemoryLimitError, RequestError for the context or the window.
    """
    size = target.context if context is None else context
    if not 1 <= size <= target.context:
        raise RequestError(f"draft context {size} is outside 1 .. {target.context}, the target's")
    config, checkpoint = _open(Path(path), target.config)
    config = _overridden(config, window, causal, shorten)
    if not markov:
        config = replace(config, prior=None)  # it is about another draft
    check_fit(config, checkpoint, target.config)
    exact = target.plan["activations"] == "f32"
    if floats == "q8_0" and not exact:
        checkpoint.encode("Q8_0", keep={EMBEDDING, MARKOV[0], *CODEBOOKS, *_base_kernels(config)})
    shape = KvShape(config.n_layers, config.kv_heads, config.head_size, "f32" if exact else "f16")
    window = config.window if all(config.windows) else 0
    cache = shape.n_bytes(cache_rows_of(size, window))
    tables = (
        cache + 8 * size * config.head_size + (_before_bytes(checkpoint, target) if markov else 0)
    )
    _check_memory(checkpoint, target, tables, size, exact)
    weights = Weights(checkpoint, target.backend, exact, progress)
    ids = _ids(checkpoint, target.config.n_vocab)
    shown = first_shown(config.active, 0 if ids is None else len(ids))
    network = _build(weights, config, checkpoint, target, ids, shown, size)
    head = _markov(weights, checkpoint, ids, shown) if markov else None
    choosing = _choosing(target.backend, ids, shown, head)
    occurring = _occurring(config, checkpoint, target, ids, shown, network, head, choosing)
    output = Output(
        n_vocab=target.config.n_vocab,
        ids=_shown_ids(ids, shown) if occurring is None else occurring.shown_ids,
        multiplier=config.output_multiplier,
        softcap=config.softcap,
        markov=head,
    )
    embedding = _embedding(checkpoint, target)
    mask = weights.floats(MASK).reshape(-1) if MASK in checkpoint.tensors else None
    rows = ContextRows(shape, size, window, target.backend)
    draft = BlockDraft(
        config,
        target.backend,
        network,
        rows,
        output,
        embedding,
        embedding.row(config.mask_id) if mask is None and network.embedding is None else mask,
        _plan(config, checkpoint, weights, network, rows),
        _selector(config, checkpoint),
        None if target.backend.on_host else target.features(len(config.taps)),
        target.next_tokens,
        occurring,
        choosing,
    )
    draft.warm_up(progress)
    return draft


def check_draft(path: Path, target: ModelConfig) -> None:
    """Open a draft and check it against a model, loading neither. Raises as `load_draft`."""
    config, checkpoint = _open(path, target)
    check_fit(config, checkpoint, target)


def _open(path: Path, target: ModelConfig) -> tuple[DraftConfig, Checkpoint]:
    if path.is_dir():
        config = read_json_config(path)
        checkpoint = open_safetensors(path)
    elif path.is_file():
        file = open_gguf(path)
        config, checkpoint = read_gguf_config(file, target.n_vocab), open_gguf_draft(file)
    else:
        raise MissingFileError(
            f"there is no draft at {path}; accepted: a folder with config.json, or a GGUF file"
        )
    _split_fused(config, checkpoint)
    return config, checkpoint


def _overridden(
    config: DraftConfig, window: int | None, causal: bool | None, shorten: bool
) -> DraftConfig:
    if window is not None:
        if window < 1:
            raise RequestError(f"draft window {window}: expected a positive number of tokens")
        config = replace(config, windows=tuple(min(w or window, window) for w in config.windows))
    if causal is not None:
        config = replace(config, causal=(causal,) * config.n_layers)
    if shorten and not config.shortens:
        config = replace(config, variable_block=True, shortened=True)
    return config


def _split_fused(config: DraftConfig, checkpoint: Checkpoint) -> None:
    """Some exporters stack q, k and v."""
    heads, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    for layer in range(config.n_layers):
        prefix = f"layers.{layer}.self_attn."
        fused = checkpoint.tensors.get(f"{prefix}qkv_proj.weight")
        if fused is not None and fused.shape[1:] == (heads + 2 * kv,):
            parts = {f"{prefix}{n}_proj.weight": r for n, r in (("q", heads), ("k", kv), ("v", kv))}
            checkpoint.split_rows(f"{prefix}qkv_proj.weight", parts)


def _ids(checkpoint: Checkpoint, n_vocab: int) -> NDArray[np.int64] | None:
    """The target's id of each id of a draft with a vocabulary of its own. Raises ShapeError for bad ids."""
    if IDS in checkpoint.tensors:
        ids = checkpoint.integers(IDS)
    elif OFFSETS in checkpoint.tensors:
        offsets = checkpoint.integers(OFFSETS)
        ids = offsets + np.arange(len(offsets))
    else:
        return None
    if ids.min() < 0 or ids.max() >= n_vocab or len(np.unique(ids)) != len(ids):
        raise ShapeError(
            f"the draft's vocabulary maps to ids {ids.min()} .. {ids.max()}; expected different ids in"
            f" 0 .. {n_vocab - 1}"
        )
    return ids


def _build(
    weights: Weights,
    config: DraftConfig,
    checkpoint: Checkpoint,
    target: Target,
    ids: NDArray[np.int64] | None,
    shown: NDArray[np.int64],
    context: int,
) -> DraftNetwork:
    def part(index: int) -> Any:
        return (
            weights.matrix("fc.weight") if index == 0 else build_layer(weights, config, index - 1)
        )

    fc, *layers = weights.map(part, 1 + config.n_layers)
    head = target.network.head
    if ids is not None and (config.active or HEAD not in checkpoint.tensors):
        head = _head_rows(checkpoint, target, ids, weights.exact).pack(target.backend, shown)
    elif HEAD in checkpoint.tensors:
        head = weights.matrix(HEAD)
    table = config.rotation.table(context + MAX_WIDTH, config.head_size)
    return DraftNetwork(
        fc=fc,
        hidden_norm=weights.vector("hidden_norm.weight"),
        layers=tuple(layers),
        norm=weights.vector("norm.weight"),
        head=head,
        rope_table=weights.rows(table),
        selection=weights.matrix(SELECTION) if config.selector_rank else None,
        embedding=_packed_embedding(weights, checkpoint, target),
    )


def _head_rows(checkpoint: Checkpoint, target: Target, ids: NDArray[np.int64], exact: bool) -> Rows:
    """The LM head's rows for these ids: the draft's own, else some of the target's in its own format."""
    if HEAD in checkpoint.tensors:
        return Rows(checkpoint.table(HEAD), exact=exact)
    file = target.file
    name = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    table = Table(file.tensors[name].type_name, file.blocks(name))
    return Rows(table, ids, target.network.head.format_name == "F32")


def _markov_rows(
    checkpoint: Checkpoint, ids: NDArray[np.int64] | None, backend: Backend, exact: bool
) -> tuple[Rows, int]:
    """W2's rows for each output, and how many outputs there are. A file may have all of the target's.

    A device gets them as floats: the product stands between two choices, where decoding would take longer than reading.
    """
    after = checkpoint.table(MARKOV[1])
    whole = ids is not None and len(after.rows) != len(ids)
    rows = Rows(after, ids if whole else None, exact, half=not backend.on_host)
    return rows, len(after.rows) if ids is None else len(ids)


def _markov(
    weights: Weights,
    checkpoint: Checkpoint,
    ids: NDArray[np.int64] | None,
    shown: NDArray[np.int64],
) -> MarkovHead | None:
    if MARKOV[0] not in checkpoint.tensors:
        return None
    rows, outputs = _markov_rows(checkpoint, ids, weights.backend, weights.exact)
    weight = rows.pack(weights.backend, np.arange(outputs) if ids is None else shown)
    return MarkovHead(checkpoint.table(MARKOV[0]), VectorProduct(weights.backend, weight))


def _shown_ids(ids: NDArray[np.int64] | None, shown: NDArray[np.int64]) -> NDArray[np.int64] | None:
    return None if ids is None else ids[shown]


def _occurring(
    config: DraftConfig,
    checkpoint: Checkpoint,
    target: Target,
    ids: NDArray[np.int64] | None,
    shown: NDArray[np.int64],
    network: DraftNetwork,
    markov: MarkovHead | None,
    choosing: Choosing | None,
) -> Occurring | None:
    """What changes the rows of a vocabulary in part; None where all have one."""
    if ids is None or not config.active or len(shown) == len(ids):
        return None
    backend, exact = target.backend, network.head.format_name == "F32"
    changing = [(network.head, _head_rows(checkpoint, target, ids, exact))]
    if markov is not None:
        assert isinstance(markov.product, VectorProduct)
        weight = markov.product.weight
        exact = weight.format_name == "F32"
        changing.append((weight, _markov_rows(checkpoint, ids, backend, exact)[0]))
    change: Change
    if backend.on_host:
        packed = [(weight, rows) for weight, rows in changing if isinstance(weight, PackedWeight)]
        change = Repacked(packed, shown)
    else:
        every = np.arange(len(ids))
        pairs: list[tuple[Any, Any]] = [
            (weight, rows.pack(backend, every)) for weight, rows in changing
        ]
        if choosing is not None and choosing.known is not None:
            pairs.append((choosing.known, _numbers(backend, ids)))
        change = Exchanged(backend, len(shown) - config.active, pairs)
    before = None if markov is None else markov.before
    return Occurring(ids, config.active, shown, change, before)


def _choosing(
    backend: Backend,
    ids: NDArray[np.int64] | None,
    shown: NDArray[np.int64],
    markov: MarkovHead | None,
) -> Choosing | None:
    """What a device chooses tokens with; None on the host, and for a Markov head that is too large for it."""
    if backend.on_host:
        return None
    known = None if ids is None else _numbers(backend, ids[shown])
    if markov is None:
        return Choosing(known)
    if len(markov.before.rows) * markov.before.width > _MOST_BEFORE:
        return None
    assert isinstance(markov.product, VectorProduct)
    values = markov.before.take(slice(None))
    before = backend.buffer(*values.shape)
    backend.upload(before, values)
    return Choosing(known, before, markov.product.weight)


def _before_bytes(checkpoint: Checkpoint, target: Target) -> int:
    """What `_choosing` takes on a device for a Markov head's first table."""
    if target.backend.on_host or MARKOV[0] not in checkpoint.tensors:
        return 0
    numbers = int(np.prod(checkpoint.tensors[MARKOV[0]].shape))
    return 4 * numbers if numbers <= _MOST_BEFORE else 0


def _numbers(backend: Backend, values: NDArray[np.int64]) -> Buffer:
    buffer = backend.buffer(1, len(values), np.int64)
    backend.upload(buffer, values[None])
    return buffer


def _selector(config: DraftConfig, checkpoint: Checkpoint) -> Selector | None:
    if not config.selector_rank:
        return None
    before, after = (checkpoint.table(name) for name in CODEBOOKS)
    return Selector(before, after, config.selector_top)


def _base_kernels(config: DraftConfig) -> list[str]:
    layers = range(config.n_layers)
    return [f"layers.{n}.{name}.base_kernel" for n in layers for name in CONVOLUTIONS]


def _packed_embedding(weights: Weights, checkpoint: Checkpoint, target: Target) -> Weight | None:
    """What a device expands its rows from; None where the host writes them."""
    if weights.backend.on_host:
        return None
    if EMBEDDING in checkpoint.tensors:
        return weights.matrix(EMBEDDING)
    return target.network.embedding


def _embedding(checkpoint: Checkpoint, target: Target) -> Table:
    """The draft's own table where it has one, else the target's."""
    if EMBEDDING in checkpoint.tensors:
        return checkpoint.table(EMBEDDING)
    return target.embedding


def _check_memory(
    checkpoint: Checkpoint, target: Target, cache: int, context: int, exact: bool
) -> None:
    """Refuse before loading what cannot fit beside the target's sequence, whose memory is taken later. `cache`: bytes
    of keys, values, rotations and tables that are no weights.
    """
    weights = sum(
        4 * int(np.prod(info.shape)) if exact else info.n_bytes
        for info in checkpoint.tensors.values()
    )
    needed = int(weights * 1.1) + cache
    available = target.backend.memory() - target.state_shape.n_bytes(target.context)
    if needed > available:
        raise MemoryLimitError(
            f"the draft {checkpoint.path.name} needs about {needed / 2**30:.1f} GiB (weights {weights / 2**30:.1f},"
            f" context {context}: {cache / 2**30:.1f}), {max(0, available) / 2**30:.1f} GiB are available beside the"
            " target; try a smaller -c"
        )


def rows_of_blocks(config: DraftConfig) -> str:
    """What a block's number of rows goes by, for records."""
    if config.shortened:
        return "depth, as asked (trained on whole blocks)"
    return "depth" if config.shortens else "block"


def _plan(
    config: DraftConfig,
    checkpoint: Checkpoint,
    weights: Weights,
    network: DraftNetwork,
    rows: ContextRows,
) -> dict[str, Any]:
    own_head, reduced = HEAD in checkpoint.tensors, draft_vocabulary(checkpoint)
    return {
        "draft": config.name,
        "layout": config.layout,
        "layers": config.n_layers,
        "taps": list(config.taps),
        "block": config.block,
        "max_depth": config.max_depth,
        "rows": rows_of_blocks(config),
        "from_anchor": config.from_anchor,
        "mask_id": config.mask_id,
        "windows": list(config.windows),
        "causal": list(config.causal),
        "rope": config.rotation.kind,
        "head": "own" if own_head else "rows of the target's" if reduced else "the target's",
        "head_ids": network.head.outputs,
        "vocabulary": network.head.outputs if reduced is None else reduced,
        "markov": MARKOV[0] in checkpoint.tensors,
        "convolutions": config.conv_taps,
        "candidates": config.selector_top if config.selector_rank else 0,
        "weight_bytes": {kind: weights.formats[kind] for kind in sorted(weights.formats)},
        "head_bytes": network.head.n_bytes,
        "context": rows.context,
        "cache_rows": rows.size,
        "cache_bytes": rows.n_bytes,
    }
