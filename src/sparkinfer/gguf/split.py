"""Models split over several files: finding the shards and proving that they belong together."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import GGUFError, MissingFileError
from .cursor import fault, show
from .shard import Shard, open_shard

MAX_SHARDS = 1024

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_SAME_IN_ALL = ("general.architecture", "general.name", "general.uuid")


def open_all(path: Path) -> tuple[Shard, ...]:
    """Open `path` and, when it is one shard of a split model, all the others, first shard first."""
    opened = open_shard(path)
    count = _split_number(opened, "split.count") or 1
    if count == 1:
        return (opened,)
    if count > MAX_SHARDS:
        raise _bad(opened, "split.count", f"is {count:,}, accepted are 1 to {MAX_SHARDS:,}")
    paths = _paths(opened, count)
    missing = [show(other.name, 200) for other in paths if not other.exists()]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise MissingFileError(
            f"{show(path, 200)} is one of {count} shards, of which {_some(missing)} {verb} missing;"
            f" fetch all shards into {show(path.parent, 200)}"
        )
    shards = tuple(open_shard(other, index) for index, other in enumerate(paths))
    _check_numbers(shards)
    _check_same_model(shards)
    return shards


def _paths(opened: Shard, count: int) -> list[Path]:
    """Return the paths of all shards, from the name of one."""
    match = _NAME.fullmatch(opened.path.name)
    if match is None:
        why = f"says that this is one of {count} shards, but the name does not"
        raise _bad(opened, "split.count", why, "name it <name>-00001-of-00003.gguf again")
    if int(match["count"]) != count:
        why = f"is {count}, but the file name says {int(match['count'])}"
        raise _bad(opened, "split.count", why)
    stem = match["stem"]
    return [
        opened.path.with_name(f"{stem}-{index + 1:05d}-of-{count:05d}.gguf")
        for index in range(count)
    ]


def _check_numbers(shards: tuple[Shard, ...]) -> None:
    """Raise unless shard i of n says so; a copy of one under another name says otherwise."""
    seen: dict[int, Path] = {}
    for index, shard in enumerate(shards):
        count = _split_number(shard, "split.count")
        if count != len(shards):
            said = "is missing" if count is None else f"is {count}"
            why = f"{said}, but the other shards say {len(shards)}"
            raise _bad(shard, "split.count", why)
        number = _split_number(shard, "split.no")
        if number is None:
            raise _bad(shard, "split.no", "is missing", "fetch this shard again")
        if number in seen:
            why = f"is {number}, the same as in {show(seen[number].name, 200)}: a duplicated shard"
            raise _bad(shard, "split.no", why, "fetch this shard again")
        if number != index:
            why = f"is {number}, but the file name says shard {index + 1}, which has number {index}"
            raise _bad(shard, "split.no", why, "give the shard its own name again")
        seen[number] = shard.path


def _check_same_model(shards: tuple[Shard, ...]) -> None:
    """Raise unless the shards add up to one model: same totals, same names, no tensor twice."""
    first = shards[0]
    total = _split_number(first, "split.tensors.count")
    places: dict[str, Path] = {}
    for shard in shards:
        if _split_number(shard, "split.tensors.count") != total:
            why = f"is not {total} as in {show(first.path.name, 200)}: shards of different models"
            raise _bad(shard, "split.tensors.count", why)
        for key in _SAME_IN_ALL:
            ours, theirs = shard.metadata.get(key), first.metadata.get(key)
            if ours and theirs and ours.data != theirs.data:
                why = f"is {show(ours.data)}, but {show(theirs.data)} in the first shard"
                raise _bad(shard, key, f"{why}: shards of different models")
        for name in shard.tensors:
            if name in places:
                what = f"tensor {show(name)}"
                why = f"is also in {show(places[name].name, 200)}: shards of different models"
                raise fault(what, shard.path, None, why, "fetch all shards again")
            places[name] = shard.path
    if total is not None and total != len(places):
        why = f"is {total:,}, but the shards have {len(places):,} tensors"
        raise _bad(first, "split.tensors.count", why)


def _split_number(shard: Shard, key: str) -> int | None:
    value = shard.metadata.get(key)
    if value is None:
        return None
    if not value.type_name.startswith(("uint", "int")):
        raise _bad(shard, key, f"has type {value.type_name}, expected an integer")
    return int(value.data)


def _bad(shard: Shard, key: str, why: str, action: str = "fetch all shards again") -> GGUFError:
    value = shard.metadata.get(key)
    byte = value.byte if value is not None else None
    return fault(f"metadata value {show(key)}", shard.path, byte, why, action)


def _some(names: list[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
