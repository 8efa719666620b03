"""The same configuration from GGUF metadata: llama.cpp's `dflash`, and the dialects of lucebox."""

from typing import Any

from sparkinfer.dflash.config import DraftConfig, causality
from sparkinfer.dflash.prior import ACCEPTANCE, CLAIMS, Prior, checked_prior
from sparkinfer.dflash.rotation import rotation_of
from sparkinfer.errors import GGUFError, ShapeError, UnsupportedError
from sparkinfer.gguf import GGUFFile

UPSTREAM = "dflash"
DIALECTS = ("qwen35-dflash-draft", "dflash-draft", "gemma4-dflash-draft")
_DEFAULT_BLOCK = 16
_TOKENS = "tokenizer.ggml.tokens"


def is_draft(file: GGUFFile) -> bool:
    """Whether the file calls itself a draft."""
    return file.architecture in (UPSTREAM, *DIALECTS)


def read_gguf_config(file: GGUFFile, n_vocab: int) -> DraftConfig:
    """The configuration of a draft in GGUF form; `n_vocab`, the target's, where the file has no vocabulary.

    Upstream counts tapped layers from 1 (inputs of the next layer), the dialects from 0.
    Raises GGUFError for a missing or mistyped key, ShapeError, UnsupportedError for a feature this build lacks.
    """
    arch = file.architecture
    if not is_draft(file):
        known = ", ".join((UPSTREAM, *DIALECTS))
        raise UnsupportedError(f"{file.path} has architecture '{arch}'; drafts are: {known}")
    upstream = arch == UPSTREAM
    own = f"{arch}." if upstream else f"{arch}.dflash."  # where the keys of block diffusion are

    def integer(key: str, default: int | None = None) -> int:
        value = file.require(key, int) if default is None else file.get(key, int, default)
        if value <= 0:
            raise ShapeError(f"{key} is {value}, expected a positive number")
        return value

    heads, n_embd = integer(f"{arch}.attention.head_count"), integer(f"{arch}.embedding_length")
    head_size = integer(f"{arch}.attention.key_length", n_embd // heads)
    if file.get(f"{arch}.attention.value_length", int, head_size) != head_size:
        raise UnsupportedError(
            f"{arch}.attention.value_length differs from key_length {head_size}; both must be equal"
        )
    n_layers = integer(f"{arch}.block_count")
    sliding, window = _sliding(file, arch, n_layers)
    taps = _integers(file, f"{own}target_layers" if upstream else f"{own}target_layer_ids")
    mask_key = "tokenizer.ggml.mask_token_id" if upstream else f"{own}mask_token_id"
    listed = file.get(_TOKENS, list)
    total = file.get(f"{own}n_target_layers", int)
    return DraftConfig(
        name=file.get("general.name", str, file.path.stem),
        layout=f"gguf {arch}",
        n_layers=n_layers,
        n_embd=n_embd,
        n_ff=integer(f"{arch}.feed_forward_length"),
        n_vocab=file.get(f"{arch}.vocab_size", int, len(listed) if listed else n_vocab),
        heads=heads,
        kv_heads=integer(f"{arch}.attention.head_count_kv", heads),
        head_size=head_size,
        eps=file.require(f"{arch}.attention.layer_norm_rms_epsilon", float),
        rotation=rotation_of(
            file.path,
            _scaling(file, arch),
            file.get(f"{arch}.rope.freq_base", float, 10000.0),
            integer(f"{arch}.context_length", 32768),
        ),
        windows=tuple(window * flag for flag in sliding),
        causal=causality(file.get(f"{arch}.attention.causal", bool), sliding),
        block=integer(f"{own}block_size", _DEFAULT_BLOCK),
        mask_id=file.require(mask_key, int),
        taps=tuple(tap - 1 for tap in taps) if upstream else taps,
        target_layers=total,
        from_anchor=file.get(f"{own}sample_from_anchor", bool, False),
        variable_block=file.get(f"{own}variable_block", bool, False),
        output_multiplier=file.get(f"{own}output_multiplier", float, 1.0),
        softcap=file.get(f"{own}final_logit_softcapping", float, 0.0),
        embedding_scale=file.get(f"{own}input_embedding_scale", float, 1.0),
        active=file.get(f"{own}draft_active_size", int, 0),
        conv_taps=file.get(f"{own}conv_kernel_size", int, 0),
        conv_group=file.get(f"{own}conv_group_size", int, 0),
        selector_rank=file.get(f"{own}selector_rank", int, 0),
        selector_top=file.get(f"{own}selector_top_k", int, 0),
        prior=_prior(file, f"{own}{ACCEPTANCE}", f"{own}{CLAIMS}"),
    )


def _prior(file: GGUFFile, acceptance: str, claims: str) -> Prior | None:
    rates, means = file.get(acceptance, list), file.get(claims, list, [])
    if rates is None:
        return None
    if not all(type(number) is float for number in (*rates, *means)):
        raise GGUFError(f"{file.path}: {acceptance} and {claims} are no lists of floats")
    return checked_prior(rates, means)


def _integers(file: GGUFFile, key: str) -> tuple[int, ...]:
    values: list[Any] = file.require(key, list)
    if not all(type(value) is int for value in values):
        raise GGUFError(f"{file.path}: {key} is no list of whole numbers")
    return tuple(values)


def _sliding(file: GGUFFile, arch: str, n_layers: int) -> tuple[list[bool], int]:
    """Which layers have a window, and the window; without a pattern a window holds for all layers."""
    window = file.get(f"{arch}.attention.sliding_window", int, 0)
    pattern = file.get(f"{arch}.attention.sliding_window_pattern", list)
    if pattern is None:
        return [window > 0] * n_layers, window
    if len(pattern) < n_layers:
        raise ShapeError(
            f"{arch}.attention.sliding_window_pattern has {len(pattern)} entries for {n_layers} layers"
        )
    sliding = [bool(flag) for flag in pattern[:n_layers]]
    if any(sliding) and window < 1:
        raise ShapeError(f"{arch}.attention.sliding_window is {window}, expected a positive number")
    return sliding, window


def _scaling(file: GGUFFile, arch: str) -> dict[str, Any]:
    """Rope scaling in the words of `rope_parameters`."""
    kind = file.get(f"{arch}.rope.scaling.type", str, "none")
    if kind == "none":
        return {}
    values = {
        "factor": file.get(f"{arch}.rope.scaling.factor", float),
        "attention_factor": file.get(f"{arch}.rope.scaling.attn_factor", float),
        "original_max_position_embeddings": file.get(
            f"{arch}.rope.scaling.original_context_length", int
        ),
        "beta_fast": file.get(f"{arch}.rope.scaling.yarn_beta_fast", float),
        "beta_slow": file.get(f"{arch}.rope.scaling.yarn_beta_slow", float),
    }
    return {"rope_type": kind} | {key: value for key, value in values.items() if value is not None}
