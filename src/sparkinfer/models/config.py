"""What a model's file says about its shape, under GGUF's keys."""

from dataclasses import dataclass

from sparkinfer.errors import ShapeError, UnsupportedError
from sparkinfer.gguf import ModelFile

MAX_WIDTH = 16  # rows of the widest verify window


@dataclass(frozen=True)
class GdnConfig:
    """Gated-DeltaNet layers: `taps` of the convolution, key and value heads of `head_size`."""

    taps: int
    key_heads: int
    value_heads: int
    head_size: int

    @property
    def key_width(self) -> int:
        return self.key_heads * self.head_size

    @property
    def value_width(self) -> int:
        return self.value_heads * self.head_size

    @property
    def channels(self) -> int:
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts of width `width`, `used` per token, and a shared expert of width `shared`."""

    experts: int
    used: int
    width: int
    shared: int


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a target. `recurrent[i]` tells whether layer i is a Gated-DeltaNet layer."""

    architecture: str
    name: str
    n_layers: int
    n_vocab: int
    n_embd: int
    n_ff: int
    heads: int
    kv_heads: int
    head_size: int
    rotated: int
    rope_base: float
    eps: float
    context_length: int
    recurrent: tuple[bool, ...]
    gdn: GdnConfig | None = None
    moe: MoeConfig | None = None


def read_config(file: ModelFile) -> ModelConfig:
    """Read the metadata of any supported architecture.

    Raises GGUFError for a missing or mistyped key, ShapeError for values that contradict each other.
    """
    arch = file.architecture

    def integer(key: str, default: int | None = None) -> int:
        full = f"{arch}.{key}"
        value = file.require(full, int) if default is None else file.get(full, int, default)
        if value <= 0:
            raise ShapeError(f"{full} is {value}, expected a positive number")
        return value

    heads = integer("attention.head_count")
    n_embd = integer("embedding_length")
    head_size = integer("attention.key_length", n_embd // heads)
    if file.get(f"{arch}.attention.value_length", int, head_size) != head_size:
        raise UnsupportedError(
            f"{arch}.attention.value_length differs from key_length {head_size}; both must be equal"
        )
    n_layers = integer("block_count") - file.get(f"{arch}.nextn_predict_layers", int, 0)
    if not 0 < n_layers <= len(file.tensors):
        raise ShapeError(f"{arch} has {n_layers} layers and {len(file.tensors)} tensors")
    hybrid = f"{arch}.ssm.state_size" in file.metadata
    moe = f"{arch}.expert_count" in file.metadata and file.get(f"{arch}.expert_count", int, 0) > 0
    config = ModelConfig(
        architecture=arch,
        name=file.get("general.name", str, file.path.stem),
        n_layers=n_layers,
        n_vocab=file.tensors["token_embd.weight"].shape[1]
        if "token_embd.weight" in file.tensors
        else 0,
        n_embd=n_embd,
        n_ff=0 if moe else integer("feed_forward_length"),
        heads=heads,
        kv_heads=integer("attention.head_count_kv", heads),
        head_size=head_size,
        rotated=integer("rope.dimension_count", head_size),
        rope_base=file.get(f"{arch}.rope.freq_base", float, 10000.0),
        eps=file.require(f"{arch}.attention.layer_norm_rms_epsilon", float),
        context_length=integer("context_length"),
        recurrent=_recurrent_layers(file, arch, n_layers) if hybrid else (False,) * n_layers,
        gdn=_gdn(integer) if hybrid else None,
        moe=_moe(integer) if moe else None,
    )
    _check(config, file)
    return config


def _recurrent_layers(file: ModelFile, arch: str, n_layers: int) -> tuple[bool, ...]:
    listed = file.get(f"{arch}.attention.recurrent_layers", list)
    if listed is not None:
        if len(listed) < n_layers:
            raise ShapeError(
                f"{arch}.attention.recurrent_layers has {len(listed)} entries for {n_layers} layers"
            )
        return tuple(bool(flag) for flag in listed[:n_layers])
    interval = file.get(f"{arch}.full_attention_interval", int, 4)
    if interval <= 0:
        raise ShapeError(
            f"{arch}.full_attention_interval is {interval}, expected a positive number"
        )
    return tuple((layer + 1) % interval != 0 for layer in range(n_layers))


def _gdn(integer) -> GdnConfig:  # type: ignore[no-untyped-def]
    config = GdnConfig(
        taps=integer("ssm.conv_kernel"),
        key_heads=integer("ssm.group_count"),
        value_heads=integer("ssm.time_step_rank"),
        head_size=integer("ssm.state_size"),
    )
    inner = integer("ssm.inner_size")
    if inner != config.value_width:
        raise ShapeError(
            f"ssm.inner_size is {inner}, expected time_step_rank x state_size = {config.value_width}"
        )
    if config.value_heads % config.key_heads:
        raise ShapeError(
            f"{config.value_heads} value heads are no multiple of {config.key_heads} key heads"
        )
    return config


def _moe(integer) -> MoeConfig:  # type: ignore[no-untyped-def]
    moe = MoeConfig(
        experts=integer("expert_count"),
        used=integer("expert_used_count"),
        width=integer("expert_feed_forward_length"),
        shared=integer("expert_shared_feed_forward_length"),
    )
    if moe.used > moe.experts:
        raise ShapeError(
            f"expert_used_count is {moe.used}, but the model has {moe.experts} experts"
        )
    return moe


def _check(config: ModelConfig, file: ModelFile) -> None:
    if config.heads % config.kv_heads:
        raise ShapeError(f"{config.heads} heads are no multiple of {config.kv_heads} kv heads")
    if config.rotated > config.head_size or config.rotated % 2:
        raise ShapeError(
            f"rope.dimension_count is {config.rotated}, expected an even number up to {config.head_size}"
        )
    if config.rope_base <= 0:
        raise ShapeError(f"rope.freq_base is {config.rope_base}, expected a positive number")
    if config.eps < 0:
        raise ShapeError(f"attention.layer_norm_rms_epsilon is {config.eps}, expected 0 or more")
    scaling = file.get(f"{config.architecture}.rope.scaling.type", str, "none")
    if scaling != "none":
        raise UnsupportedError(f"rope scaling '{scaling}' is not supported; accepted: none")
    moe = config.moe
    for what, width, unit in (
        ("embedding_length", config.n_embd, 16),
        ("key_length", config.head_size, 16),
        ("feed_forward_length", config.n_ff, 32),
        ("expert_feed_forward_length", moe.width if moe else 0, 32),
        ("expert_shared_feed_forward_length", moe.shared if moe else 0, 32),
    ):
        if width % unit:
            raise UnsupportedError(f"{what} is {width}, expected a multiple of {unit}")
