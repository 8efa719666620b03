"""`sparkinfer inspect`: what a GGUF file holds, also one that this build cannot run."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkinfer.cli.console import screen
from sparkinfer.cli.flags import ProcessFlags, verb
from sparkinfer.options import Options

if TYPE_CHECKING:
    from sparkinfer.gguf.reader import GGUFFile, TensorInfo

_LONGEST = 72


@verb(ProcessFlags())
def command(
    *,
    model: Annotated[
        str, typer.Argument(help="A GGUF file, a known name or hf:user/repo[:quant].")
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    options: Options,
) -> None:
    """Show a model file's metadata, tensor types and sizes, and whether it can be run here."""
    from sparkinfer.cli.console import progress
    from sparkinfer.gguf.reader import open_gguf
    from sparkinfer.pull import locate

    with progress(options) as report:
        path = locate(model, options.path("model_dir"), report)
    with open_gguf(path) as file:
        facts = describe(file, path, every_tensor=tensors)
    if as_json:
        import json

        print(json.dumps(facts, indent=2, default=str))
    else:
        _print(facts)


def describe(file: "GGUFFile", path: Path, *, every_tensor: bool) -> dict[str, Any]:
    """Return everything `inspect` shows, as plain values; sizes in bytes."""
    infos = list(file.tensors.values())
    facts = {
        "file": str(path),
        "gguf_version": file.version,
        "alignment": file.alignment,
        "shards": len(file.shards),
        "architecture": file.get("general.architecture", str, ""),
        "runnable": _why_not(file) or "yes",
        "parameters": sum(math.prod(info.shape) for info in infos),
        "tensor_bytes": sum(info.n_bytes for info in infos),
        "types": _by_type(infos),
        "metadata": {key: _shown(value) for key, value in file.metadata.items()},
    }
    if every_tensor:
        facts["tensors"] = [
            {"name": i.name, "shape": list(i.shape), "type": i.type_name, "bytes": i.n_bytes}
            for i in infos
        ]
    return facts


def _by_type(infos: list["TensorInfo"]) -> list[dict[str, Any]]:
    """Return tensors, parameters, bytes and bits per weight of each type, largest first."""
    from sparkinfer.quant.formats import QUANT_FORMATS

    rows: dict[str, dict[str, Any]] = {}
    for info in infos:
        known = info.type_name in QUANT_FORMATS
        empty = {
            "type": info.type_name,
            "tensors": 0,
            "parameters": 0,
            "bytes": 0,
            "decoder": known,
        }
        row = rows.setdefault(info.type_name, empty)
        row["tensors"] += 1
        row["parameters"] += math.prod(info.shape)
        row["bytes"] += info.n_bytes
    for row in rows.values():
        row["bits_per_weight"] = round(8 * row["bytes"] / max(1, row["parameters"]), 3)
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def _why_not(file: "GGUFFile") -> str:
    """Return why the file cannot be run, "" where nothing speaks against it without loading it."""
    from sparkinfer.dflash.config_gguf import is_draft
    from sparkinfer.errors import SparkError
    from sparkinfer.models import ARCHITECTURES

    if is_draft(file):
        return "no: a draft; -md takes it, with the model it was trained for"
    try:
        ARCHITECTURES.target(file.architecture)
        file.require_decodable(list(file.tensors))
    except SparkError as error:
        return f"no: {error}"
    return ""


def _shown(value: Any) -> Any:
    """Return a metadata value; a long array as its length and first items."""
    if isinstance(value, str | int | float | bool | None):
        return value
    items = [
        item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in value[:4]
    ]
    plain = [item.item() if hasattr(item, "item") else item for item in items]
    return plain if len(value) <= 4 else {"length": len(value), "first": plain}


def _print(facts: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = screen()
    head = Table.grid(padding=(0, 2))
    for key in ("file", "architecture", "runnable", "gguf_version", "alignment", "shards"):
        head.add_row(key, Text(str(facts[key])))
    head.add_row("parameters", f"{facts['parameters']:,}")
    head.add_row("tensor data", f"{facts['tensor_bytes'] / 1e6:,.1f} MB")
    types = Table(
        "type", "tensors", "parameters", "MB", "bits/weight", "", box=None, pad_edge=False
    )
    for row in facts["types"]:
        note = "" if row["decoder"] else "no decoder in this build"
        size, bits = f"{row['bytes'] / 1e6:,.1f}", f"{row['bits_per_weight']:.2f}"
        types.add_row(row["type"], str(row["tensors"]), f"{row['parameters']:,}", size, bits, note)
    metadata = Table.grid(padding=(0, 2))
    for key, value in facts["metadata"].items():
        metadata.add_row(key, Text(_one_line(value)))
    for part in (head, "", types, "", metadata):
        console.print(part)
    if "tensors" in facts:
        console.print("", _tensor_table(facts["tensors"]))


def _one_line(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['length']:,} items: {', '.join(map(repr, value['first']))}, ..."
    text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"


def _tensor_table(tensors: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("tensor", "shape", "type", "bytes", box=None, pad_edge=False)
    for tensor in tensors:
        shape = " x ".join(map(str, tensor["shape"]))
        table.add_row(tensor["name"], shape, tensor["type"], f"{tensor['bytes']:,}")
    return table
