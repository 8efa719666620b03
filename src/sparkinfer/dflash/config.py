"""What a draft's files say about its shape: `config.json` of a z-lab folder, and what both file forms share.

Every field is looked up in `dflash_config` first, then at the top level: exporters moved them between the two.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkinfer.dflash.prior import Prior
from sparkinfer.dflash.rotation import Rotation, rotation_of
from sparkinfer.errors import GGUFError, MissingFileError, ShapeError, UnsupportedError

MAX_BLOCK = 16  # rows of the widest block: those of the widest verify window
_DEFAULT_BLOCK = 16  # where no file says one (the reference's default)
_DSPARK = "DSpark"
_FAMILIES = ("DFlash", _DSPARK)  # exporters vary the rest of the name
_ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel")
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class DraftConfig:
    """Shape of a draft. `windows[i]` is layer i's sliding window (0: full), `causal[i]` whether its block is causal."""

    name: str
    layout: str  # which kind of file it came from, for records
    n_layers: int
    n_embd: int
    n_ff: int
    n_vocab: int
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    rotation: Rotation
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    block: int
    mask_id: int
    taps: tuple[
        int, ...
    ]  # layers of the target, counted from 0, after which its residual stream is read
    target_layers: int | None = None  # None: the file does not say
    from_anchor: bool = False  # slot 0 predicts the token after the anchor: B inputs give B tokens
    variable_block: bool = False  # trained with shorter blocks too, or asked for
    shortened: bool = False  # asked for, not trained
    output_multiplier: float = 1.0
    softcap: float = 0.0  # 0: none
    embedding_scale: float = 1.0
    conv_taps: int = 0  # second generation: rows of the convolutions around every sublayer, 0: none
    conv_group: int = 0  # channels that share a row's weight
    selector_rank: int = 0  # second generation: the selector of candidates, 0: none
    selector_top: int = 0  # candidates of a slot
    active: int = 0  # tokens of a vocabulary of its own that it can always propose, 0: all
    prior: Prior | None = None  # what the file tells about acceptance

    @property
    def max_depth(self) -> int:
        """Most slots a block fills: with the anchor they fit a verify window."""
        return min(self.block, MAX_BLOCK - 1) if self.from_anchor else self.block - 1

    @property
    def shortens(self) -> bool:
        """A shorter block gives the same slots: no row sees a later one, or the draft was trained that way."""
        return self.variable_block or all(self.causal)

    @property
    def window(self) -> int:
        """The one sliding window of the draft, 0 without sliding layers."""
        return max(self.windows)


def default_taps(target_layers: int, count: int) -> tuple[int, ...]:
    """The layers a draft reads when its file lists none (dflash 0.1.0): evenly from the second to the fourth last."""
    if count == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (count - 1)) for i in range(count))


class Fields:
    """Looks values up in `dflash_config`, then at the top level; null counts as absent.

    Raises GGUFError for a value of the wrong kind or a missing one.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        nested = values.get("dflash_config") or {}
        if not isinstance(nested, Mapping):
            raise GGUFError(f"{path}: dflash_config is no object")
        self._layers = (nested, values)

    def find(self, *names: str) -> Any:
        """The first of these names that has a value, else None."""
        for name in names:
            for layer in self._layers:
                if layer.get(name) is not None:
                    return layer[name]
        return None

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self._present(names, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._bad(names, value, "a whole number")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        value = self._present(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._bad(names, value, "a number")
        return float(value)

    def flag(self, *names: str, default: bool | None = None) -> bool | None:
        value = self.find(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._bad(names, value, "true or false")
        return value

    def integers(self, *names: str) -> tuple[int, ...] | None:
        value = self.find(*names)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._bad(names, value, "a list of whole numbers")
        return tuple(value)

    def _present(self, names: Sequence[str], default: Any) -> Any:
        value = self.find(*names)
        if value is None:
            value = default
        if value is None:
            raise GGUFError(f"{self.path}: {' or '.join(names)} is missing")
        return value

    def _bad(self, names: Sequence[str], value: Any, wanted: str) -> GGUFError:
        return GGUFError(f"{self.path}: {' or '.join(names)} is {value!r}, expected {wanted}")


def read_json_config(folder: Path) -> DraftConfig:
    """The configuration of a z-lab folder.

    Raises MissingFileError, GGUFError for a malformed file, UnsupportedError for a feature this build lacks.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise MissingFileError(
            f"{folder} has no config.json; a draft is a folder with config.json and safetensors, or a GGUF file"
        )
    try:
        values = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise GGUFError(f"{path} is no readable JSON: {error}") from None
    if not isinstance(values, dict):
        raise GGUFError(f"{path} is no JSON object")
    fields = Fields(path, values)
    _refuse(fields)
    heads = fields.integer("num_attention_heads")
    n_embd = fields.integer("hidden_size")
    n_layers = fields.integer("num_hidden_layers")
    if n_layers < 1 or heads < 1:
        raise ShapeError(f"{path} has {n_layers} layers of {heads} heads, expected at least one")
    target_layers = fields.find("num_target_layers")
    taps = fields.integers("target_layer_ids")
    if taps is None:
        taps = default_taps(fields.integer("num_target_layers"), n_layers)
    windows, causal = _attention(fields, n_layers)
    softcap = fields.find("final_logit_softcapping")
    return DraftConfig(
        name=folder.resolve().name,
        layout="safetensors",
        n_layers=n_layers,
        n_embd=n_embd,
        n_ff=fields.integer("intermediate_size"),
        n_vocab=fields.integer("vocab_size"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", default=heads),
        head_size=fields.integer("head_dim", default=n_embd // heads),
        eps=fields.number("rms_norm_eps", default=1e-6),
        rotation=rotation_of(
            path,
            fields.find("rope_parameters", "rope_scaling") or {},
            fields.number("rope_theta", default=10000.0),
            fields.integer("max_position_embeddings", default=32768),
        ),
        windows=windows,
        causal=causal,
        block=fields.integer("block_size", default=_DEFAULT_BLOCK),
        mask_id=fields.integer("mask_token_id"),
        taps=taps,
        target_layers=None if target_layers is None else fields.integer("num_target_layers"),
        from_anchor=bool(fields.flag("sample_from_anchor", default=_predicts_next(fields))),
        variable_block=bool(fields.flag("variable_block", default=False)),
        output_multiplier=fields.number("output_multiplier", default=1.0),
        softcap=0.0 if softcap is None else fields.number("final_logit_softcapping"),
        embedding_scale=fields.number("input_embedding_scale", default=1.0),
        active=fields.integer("draft_active_size", default=0),
        conv_taps=fields.integer("conv_kernel_size", default=0),
        conv_group=fields.integer("conv_group_size", default=0),
        selector_rank=fields.integer("selector_rank", default=0),
        selector_top=fields.integer("selector_top_k", default=0),
    )


def _predicts_next(fields: Fields) -> bool:
    """Where no file says: drafts of the DSpark family predict each row's successor (arXiv 2607.05147)."""
    return _DSPARK in str(fields.find("architectures"))


def _refuse(fields: Fields) -> None:
    """Features that change the result and that this build does not compute."""
    names = fields.find("architectures")
    if names is not None and not any(kind in str(names) for kind in _FAMILIES):
        raise UnsupportedError(
            f"{fields.path}: architectures is {names}; drafts are: {', '.join(_ARCHITECTURES)}"
        )
    act = fields.find("hidden_act")
    if act not in (None, "silu"):
        raise UnsupportedError(f"{fields.path}: hidden_act is {act!r}; supported: silu")
    for name in ("attention_bias", "attention_sink_bias"):
        if fields.find(name):
            raise UnsupportedError(
                f"{fields.path}: {name} is {fields.find(name)!r}; supported: a draft without it"
            )
    scale = fields.find("attention_value_scale")
    if scale not in (None, 1, 1.0):
        raise UnsupportedError(f"{fields.path}: attention_value_scale is {scale!r}; supported: 1")


def _attention(fields: Fields, n_layers: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Window and causality of every layer."""
    types = fields.find("layer_types")
    enabled = fields.flag("use_swa", "use_sliding_window")
    if types is None:
        skipped = fields.integer("max_window_layers", default=0) if enabled else n_layers
        types = [_SLIDING if i >= skipped else _FULL for i in range(n_layers)]
    if not isinstance(types, list) or len(types) != n_layers:
        raise ShapeError(f"{fields.path}: layer_types is {types!r}, expected {n_layers} entries")
    unknown = sorted({str(kind) for kind in types} - {_SLIDING, _FULL})
    if unknown:
        raise UnsupportedError(
            f"{fields.path}: layer_types has {', '.join(unknown)}; supported: {_FULL}, {_SLIDING}"
        )
    sliding = [kind == _SLIDING for kind in types]
    # A window that is switched off leaves sliding layers without bound, as in the reference, but causal.
    window = (
        fields.integer("swa_window_size", "sliding_window")
        if any(sliding) and enabled is not False
        else 0
    )
    if any(sliding) and enabled is not False and window < 1:
        raise ShapeError(f"{fields.path}: sliding_window is {window}, expected a positive number")
    return tuple(window * s for s in sliding), causality(
        fields.flag("causal", "is_causal"), sliding
    )


def causality(said: bool | None, sliding: Sequence[bool]) -> tuple[bool, ...]:
    """What the file says holds for all layers; where it says nothing, sliding layers are causal and full ones not."""
    return tuple(sliding) if said is None else (said,) * len(sliding)
