"""Every test of the command line has its own process flags and folders."""

from pathlib import Path

import pytest

from sparkinfer import options


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(options, "_flags", {})
    monkeypatch.setenv("SPARKINFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SPARKINFER_MODEL_DIR", str(tmp_path / "models"))
