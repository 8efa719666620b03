"""Tables of name -> "module" or "module:attribute", imported when it is asked for."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from sparkinfer.errors import SparkError, UnsupportedError


class Registry:
    """A fixed table of lazily imported things of one kind; iterates over the names."""

    def __init__(
        self,
        kind: str,
        targets: Mapping[str, str],
        error: type[SparkError] = UnsupportedError,
    ) -> None:
        self.kind = kind
        self._targets = dict(targets)
        self._error = error

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def target(self, name: str) -> str:
        """Return what `name` stands for, as text. Raises: the registry's error with all names."""
        if name not in self._targets:
            known = ", ".join(sorted(self._targets)) or "none"
            raise self._error(f"unknown {self.kind} {name!r}; known: {known}")
        return self._targets[name]

    def get(self, name: str) -> Any:
        """Import the module and return it, or its attribute. Raises: as `target`."""
        module, _, attribute = self.target(name).partition(":")
        imported = import_module(module)
        return getattr(imported, attribute) if attribute else imported
