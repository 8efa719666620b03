"""JSON to frozen dataclasses and back, strictly: a field too many, one too few or a wrong type is one clear line."""

import dataclasses
import hashlib
import json
import math
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sparkinfer.errors import SparkError

T = TypeVar("T")
LATER = {
    "later": True
}  # `metadata` of a field that older records lack: it is written where it is not its default
Scalar = str | int | float | bool | None


class RecordError(SparkError):
    """An evaluation record or a scope is malformed or contradicts itself."""

    exit_code = 65


def encode(value: Any) -> Any:
    """Plain JSON values of a dataclass, a mapping, a sequence or a scalar."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if not _is_left_out(field, value)]
        return {field.name: encode(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {key: encode(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [encode(entry) for entry in value]
    return value


def decode(kind: type[T], value: Any, where: str = "", *, defaults: bool = False) -> T:
    """Make a `kind` of plain JSON values. `where` names the place in errors.

    `defaults`: a field that has a default may be missing (files that people write); a record has every field but those
    that are `LATER`.
    Raises: RecordError.
    """
    decoded: T = _decode(kind, value, where, defaults)
    return decoded


def canonical(value: Any) -> bytes:
    """The one byte form of a value: keys sorted, no spaces, UTF-8, floats in their shortest exact form.

    Raises: RecordError for a number that JSON has no form for.
    """
    try:
        text = json.dumps(
            encode(value),
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
            allow_nan=False,
        )
    except ValueError as error:
        raise RecordError(f"a record holds finite numbers only: {error}") from error
    return text.encode()


def digest(value: Any) -> str:
    """SHA-256 of the canonical form, in hexadecimal."""
    return hashlib.sha256(canonical(value)).hexdigest()


def parse_json(text: str | bytes, what: str) -> Any:
    """Parse JSON that has no NaN, no infinity and no key twice. Raises: RecordError."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{what} is not the JSON expected: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode(kind: Any, value: Any, where: str, defaults: bool) -> Any:
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where, defaults)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        if value not in arguments or type(value) not in {type(entry) for entry in arguments}:
            raise _wrong(where, value, f"one of {', '.join(map(str, arguments))}")
        return value
    if origin in (Union, types.UnionType):
        return _union(arguments, value, where, defaults)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(where, value, "a list")
        inner = arguments[0]  # tuple[X, ...] is the only form in use
        return tuple(
            _decode(inner, entry, f"{where}[{number}]", defaults)
            for number, entry in enumerate(value)
        )
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(arguments[1], value, where, defaults)
    return _scalar(kind, value, where)


def _dataclass(kind: Any, value: Any, where: str, defaults: bool) -> Any:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _wrong(where, value, f"an object ({kind.__name__})")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    prefix = f"{where}." if where else ""
    for name in value:
        if name not in fields:
            known = ", ".join(fields)
            raise RecordError(f"{prefix}{_key(name)} is unknown; {kind.__name__} has {known}")
    missing = [
        name
        for name, field in fields.items()
        if name not in value and not (_is_later(field) or (defaults and _has_default(field)))
    ]
    if missing:
        raise RecordError(f"{prefix}{missing[0]} is missing ({kind.__name__})")
    hints = _hints(kind)
    return kind(
        **{
            name: _decode(hints[name], entry, f"{prefix}{name}", defaults)
            for name, entry in value.items()
        }
    )


def _is_later(field: "dataclasses.Field[Any]") -> bool:
    return bool(field.metadata.get("later"))


def _is_left_out(field: "dataclasses.Field[Any]", value: Any) -> bool:
    return _is_later(field) and getattr(value, field.name) == field.default


def _has_default(field: "dataclasses.Field[Any]") -> bool:
    nothing = dataclasses.MISSING
    return field.default is not nothing or field.default_factory is not nothing


def _mapping(inner: Any, value: Any, where: str, defaults: bool) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _wrong(where, value, "an object")
    return {
        key: _decode(inner, entry, f"{where}.{_key(key)}", defaults) for key, entry in value.items()
    }


def _union(arguments: tuple[Any, ...], value: Any, where: str, defaults: bool) -> Any:
    """One of several scalars, or something that may be null."""
    if value is None and type(None) in arguments:
        return None
    kinds = [kind for kind in arguments if kind is not type(None)]
    if len(kinds) == 1:
        return _decode(kinds[0], value, where, defaults)
    if type(value) in kinds:
        return _scalar(type(value), value, where)
    names = " or ".join(_NAMES.get(kind, str(kind)) for kind in kinds)
    raise _wrong(where, value, names)


_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) is int:  # JSON writers differ in 1 and 1.0
        try:
            return float(value)
        except OverflowError as error:
            raise _wrong(where, value, "a finite number") from error
    if type(value) is not kind:
        raise _wrong(where, value, _NAMES.get(kind, str(kind)))
    if kind is float and not math.isfinite(value):
        raise _wrong(where, value, "a finite number")
    return value


def _key(name: str) -> str:
    """A key of unknown origin as part of one line."""
    return name if name.isidentifier() and len(name) <= 40 else f"{name[:40]!r}"


def _wrong(where: str, value: Any, expected: str) -> RecordError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return RecordError(f"{where or 'the record'} is {shown}; expected {expected}")
