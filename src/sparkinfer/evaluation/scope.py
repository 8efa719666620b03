"""Scopes: what an evaluation measures, as data. The table is the folder `scopes`; users' files have the same form."""

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sparkinfer.errors import MissingFileError, OptionError
from sparkinfer.evaluation.codec import RecordError, decode, parse_json
from sparkinfer.evaluation.record import Scope
from sparkinfer.evaluation.sequential import plan_looks

FOLDER = Path(__file__).parent / "scopes"
DEFAULT = "cpu-smollm2"
_FORMS = (".toml", ".json")
_LONGEST = 1 << 24  # bytes of a scope file


def scope_names() -> tuple[str, ...]:
    """Names of the scopes that come with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def find_scope(name: str) -> Scope:
    """The scope of that name, or of that file if it ends in .toml or .json.

    Raises: OptionError for an unknown name, MissingFileError, RecordError for a file that is no scope.
    """
    if name.lower().endswith(_FORMS):
        return load_scope(Path(name))
    if name not in scope_names():
        near = get_close_matches(name, scope_names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(scope_names())
        raise OptionError(f"scope {name!r} is unknown; {hint}known: {known}, or a .toml file")
    return load_scope(FOLDER / f"{name}.toml")


def load_scope(path: Path) -> Scope:
    """Read a scope from TOML or JSON; fields that have a default may be left out.

    Raises: MissingFileError, RecordError that names file and field.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST + 1)
    except OSError as error:
        raise MissingFileError(f"cannot read the scope {path}: {error.strerror}") from error
    if len(content) > _LONGEST:
        raise RecordError(f"{path} is longer than {_LONGEST} bytes; that is no scope")
    try:
        scope = decode(Scope, _parsed(path, content), defaults=True)
        _check_looks(scope)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
    return scope


def _parsed(path: Path, content: bytes) -> Any:
    if path.suffix.lower() == ".json":
        return parse_json(content, "the scope")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise RecordError(f"the scope is not the TOML expected: {error}") from error


def _check_looks(scope: Scope) -> None:
    """A look that can decide nothing is a mistake: so few blocks reach no level, however large the change is."""
    for look in plan_looks(scope.looks, scope.alpha):
        if look.alpha <= 0:
            raise RecordError(
                f"looks: {look.blocks} blocks are too few to decide anything at the level that is left for"
                " this look; take later looks or fewer"
            )
