"""load_target: from a GGUF file to a Target, with everything that is automatic resolved into one plan."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend.base import Backend, CacheFormat
from sparkinfer.backend.choose import choose_backend
from sparkinfer.errors import RequestError, ShapeError, UnsupportedError
from sparkinfer.gguf import GGUFFile, open_gguf
from sparkinfer.kernels.rope.reference import angles, factors
from sparkinfer.models.build import Architecture, recurrent_shape
from sparkinfer.models.config import MAX_WIDTH, ModelConfig, read_config
from sparkinfer.models.decoder import Network, Target
from sparkinfer.models.memory import cache_shape, check_memory, plan_memory, usual_context
from sparkinfer.models.screening import extra_bytes, pack_head, refusal
from sparkinfer.models.weights import Progress, Shape, Weights, check_tensors
from sparkinfer.options import resolve
from sparkinfer.registry import Registry
from sparkinfer.state import StateShape
from sparkinfer.state.kv_cache import BLOCK

ARCHITECTURES = Registry(
    "architecture",
    {
        "llama": "sparkinfer.models.llama:ARCHITECTURE",
        "qwen3": "sparkinfer.models.qwen3:ARCHITECTURE",
        "qwen35": "sparkinfer.models.qwen35:ARCHITECTURE",
        "qwen35moe": "sparkinfer.models.qwen35:ARCHITECTURE",
    },
)
_CACHE_NAMES = {"f32": "float32", "f16": "float16", "q8_0": "q8_0"}
_ROPE_DIVISORS = "rope_freqs.weight"
_EMBEDDING, _NORM, _HEAD = "token_embd.weight", "output_norm.weight", "output.weight"


def load_target(
    source: str | os.PathLike[str] | GGUFFile,
    *,
    context: int | None = None,
    threads: int | None = None,
    activations: Literal["int8", "f32"] | None = None,
    kv_cache: Literal["auto", "f32", "f16", "q8_0"] | None = None,
    head_screen: bool | None = None,
    isa: str | None = None,
    device: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    backend: Backend | None = None,
) -> Target:
    """Open, check and repack a model. Arguments left out take the process options' values.

    `backend`: where to load it, instead of what `device` says. `activations="f32"` expands the weights and computes in
    float32 (keys and values too, unless `kv_cache` says otherwise): exact, large and slow. `kv_cache="q8_0"` keeps keys
    and values as codes of 8 bits: about half the memory, and answers of its own.
    Raises MissingFileError, GGUFError, UnsupportedError, ShapeError, MemoryLimitError, OptionError.
    """
    options = resolve(
        {
            "threads": threads,
            "context": context,
            "activations": activations,
            "kv_cache": kv_cache,
            "head_screen": head_screen,
            "isa": isa,
            "device": device,
            "cache_dir": cache_dir,
        }
    )
    file = source if isinstance(source, GGUFFile) else open_gguf(source)
    architecture = ARCHITECTURES.get(file.architecture)
    config = read_config(file)
    expected = expected_tensors(config)
    check_tensors(file, expected, optional=(_HEAD,))
    _refuse_unused(file, expected, config)
    exact = options.text("activations") == "f32"
    shape = _state_shape(config, _cache_format(config, options.text("kv_cache"), exact))
    size = _context(config, options.integer("context"))
    reason = "given"
    if backend is None:
        n_threads = options.integer("threads")
        assert n_threads is not None
        backend, reason = choose_backend(
            options.text("device"),
            isa=options.text("isa"),
            threads=n_threads,
            cache_dir=options.path("cache_dir"),
        )
    weights = Weights(file, backend, exact, progress)
    try:
        _check_cache(backend, shape.kv.format)
        head = _HEAD if _HEAD in file.tensors else _EMBEDDING
        wanted = options.boolean("head_screen")
        unscreened = refusal(file, head, backend, exact=exact, wanted=wanted)
        more = 0 if unscreened else extra_bytes(file, head)
        memory = plan_memory(file, config, shape, size, exact, backend, more=more)
        halves = shape.kv.format == "f16" and config.head_size % BLOCK == 0
        halves = halves and "q8_0" in backend.cache_formats
        check_memory(memory, file.path.name, size, backend, halves=halves)
        network = _build(weights, config, architecture, size, screened=unscreened is None)
    except BaseException:
        backend.close()
        raise
    plan = _plan(config, backend, weights, options.text("activations"), size, shape)
    plan["backend_reason"] = reason
    if unscreened is None and network.coarse is None:
        unscreened = "its weights have no bounds"
    plan["head_screen"] = f"off: {unscreened}" if unscreened else "on"
    per_token = _bytes_per_token(weights, config)
    if network.coarse is not None:
        per_token += network.coarse.n_bytes - network.head.n_bytes
    target = Target(file, config, backend, network, shape, size, plan, per_token)
    target.warm_up(_first_widths(backend), progress)
    plan["memory_bytes"] = memory.to_dict()
    if not backend.on_host:  # before a sequence adds its cache and state
        plan["memory_bytes"]["taken"] = backend.taken()
    return target


def _first_widths(backend: Backend) -> list[int]:
    """Runs to prepare at load. On a GPU every width of a window, and prompts short and long: nothing compiles later."""
    if backend.on_host:
        return [1, backend.chunk]
    wide = (2 * MAX_WIDTH, 8 * MAX_WIDTH, backend.chunk)
    return [*range(1, MAX_WIDTH + 1), *(rows for rows in wide if MAX_WIDTH < rows <= backend.chunk)]


def _refuse_unused(file: GGUFFile, expected: Mapping[str, Shape], config: ModelConfig) -> None:
    """Weights that nothing reads (biases, fused projections) would change the output without a word.

    Blocks after the last layer (multi-token prediction) are no part of the model's own output.
    """
    known = {*expected, _ROPE_DIVISORS}
    unused = [name for name in file.tensors if name not in known and _layer(name) < config.n_layers]
    if unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        raise UnsupportedError(
            f"{file.path} has weights this build does not use: {', '.join(unused[:5])}{more};"
            f" it supports '{config.architecture}' models without them"
        )


def _layer(name: str) -> int:
    """The N of `blk.N.`, -1 for other tensors."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and len(parts) > 1 and parts[1].isdecimal() else -1


def expected_tensors(config: ModelConfig) -> Mapping[str, Shape]:
    """Names of all tensors and their GGUF shapes. Raises UnsupportedError for an unknown architecture."""
    architecture = ARCHITECTURES.get(config.architecture)
    embedding = (config.n_embd, config.n_vocab)
    shapes: dict[str, Shape] = {
        _EMBEDDING: embedding,
        _NORM: (config.n_embd,),
        _HEAD: embedding,
    }
    for layer in range(config.n_layers):
        shapes |= architecture.expected(config, layer)
    return shapes


def _build(
    weights: Weights,
    config: ModelConfig,
    architecture: Architecture,
    context: int,
    *,
    screened: bool,
) -> Network:
    tied = _HEAD not in weights.file.tensors
    name = _EMBEDDING if tied else _HEAD

    def part(index: int) -> Any:
        """The head, which takes longest, and then the layers."""
        if index == 0:
            coarse = pack_head(weights, name, _NORM) if screened else None
            return weights.matrix(name), coarse
        return architecture.build(weights, config, index - 1)

    (head, coarse), *blocks = weights.map(part, 1 + config.n_layers)
    embedding = None
    if not weights.backend.on_host:
        embedding = head if tied else weights.matrix(_EMBEDDING)
    table = angles(context, config.rotated, config.rope_base, _divisors(weights, config))
    return Network(
        blocks=tuple(blocks),
        output_norm=weights.vector(_NORM),
        head=head,
        coarse=coarse,
        rope_table=weights.rows(factors(table, architecture.interleaved)),
        embedding=embedding,
    )


def _divisors(weights: Weights, config: ModelConfig) -> NDArray[np.float32] | None:
    if _ROPE_DIVISORS not in weights.file.tensors:
        return None
    divisors = weights.floats(_ROPE_DIVISORS).reshape(-1)
    if divisors.size != config.rotated // 2:
        raise ShapeError(
            f"{_ROPE_DIVISORS} has {divisors.size} values, expected {config.rotated // 2}"
        )
    return divisors


def _cache_format(config: ModelConfig, wanted: str, exact: bool) -> CacheFormat:
    """The format of keys and values. Raises UnsupportedError where the heads do not fit it."""
    if wanted == "auto":
        return "f32" if exact else "f16"
    if wanted == "q8_0" and config.head_size % BLOCK:
        raise UnsupportedError(
            f"--kv-cache q8_0 has one scale for {BLOCK} values of a head, and this model's heads have"
            f" {config.head_size}; f16 and f32 work"
        )
    return cast(CacheFormat, wanted)


def _check_cache(backend: Backend, wanted: CacheFormat) -> None:
    if wanted not in backend.cache_formats:
        raise UnsupportedError(
            f"--kv-cache {wanted} is not supported on the {backend.name} backend; it has"
            f" {' and '.join(backend.cache_formats)}"
        )


def _state_shape(config: ModelConfig, cache_format: CacheFormat) -> StateShape:
    kv = cache_shape(config, cache_format)
    return StateShape(kv, recurrent_shape(config) if any(config.recurrent) else None)


def _context(config: ModelConfig, wanted: int | None) -> int:
    if wanted is None:
        return usual_context(config)
    if wanted > config.context_length:
        raise RequestError(
            f"context {wanted} is larger than the {config.context_length} the model was made for"
        )
    return wanted


def _bytes_per_token(weights: Weights, config: ModelConfig) -> int:
    """Packed weight bytes one decoded token reads: of stacked experts only the used ones."""
    total = 0
    for weight in weights.matrices:
        used = config.moe.used if config.moe and weight.experts > 1 else weight.experts
        total += weight.n_bytes // weight.experts * used
    return total


def _plan(
    config: ModelConfig,
    backend: Backend,
    weights: Weights,
    activations: str,
    context: int,
    shape: StateShape,
) -> dict[str, Any]:
    return {
        "architecture": config.architecture,
        "model": config.name,
        **backend.plan,
        "activations": activations,
        "cache": _CACHE_NAMES[shape.kv.format],
        "context": context,
        "prefill_chunk": backend.chunk,
        "max_width": MAX_WIDTH,
        "weight_bytes": {kind: weights.formats[kind] for kind in sorted(weights.formats)},
        "state_bytes": shape.n_bytes(context),
    }
