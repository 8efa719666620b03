"""Tables of name -> "module:attribute": what is registered is imported when it is asked for."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from sparkinfer.errors import SparkError, UnsupportedError


class Registry(Mapping[str, str]):
    """A fixed table of lazily imported things of one kind.

    `registry[name]` is the target as text, `registry.load(name)` the object itself.
    """

    def __init__(
        self,
        kind: str,
        targets: Mapping[str, str],
        error: type[SparkError] = UnsupportedError,
    ) -> None:
        for name, target in targets.items():
            module, colon, attribute = target.partition(":")
            assert module and colon and attribute, f"{kind} {name}: {target!r}"
        self.kind = kind
        self._targets = dict(targets)
        self._error = error

    def __getitem__(self, name: str) -> str:
        """Return "module:attribute". Raises the registry's error, which lists the known names."""
        if name not in self._targets:
            known = ", ".join(sorted(self._targets)) or "none"
            raise self._error(f"unknown {self.kind} {name!r}; known: {known}")
        return self._targets[name]

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def load(self, name: str) -> Any:
        """Import the module on first use and return the attribute."""
        module, _, attribute = self[name].partition(":")
        return getattr(import_module(module), attribute)
