"""Lets every test folder import the shared helpers that lie beside this file, and chooses cases for the GPU's tests.

Without a GPU the kernels written for it run under Triton's interpreter, which takes seconds a case: there only the
first cases of each test run; `pytest -m ""` and a GPU (`make check-gpu`) run them all. `--cases N` sets how many.
"""

import os
from collections import Counter

import pytest

INTERPRETED_CASES = 2  # of each test


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


HAS_GPU = _has_gpu()
if not HAS_GPU:  # Triton reads it once, when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", type=int, help="only the first N cases of each test of the GPU's kernels"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most = config.getoption("--cases") or (None if HAS_GPU else INTERPRETED_CASES)
    seen: Counter[str] = Counter()
    for item in items:
        if most is None or not item.path.name.startswith("test_triton_"):
            continue
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        if seen[test] > most:
            item.add_marker(pytest.mark.long)
    if config.pluginmanager.hasplugin("xdist"):
        _keep_models_together(items)


def _keep_models_together(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup` one process runs all tests of a model: loading it compiles kernels."""
    for item in items:
        values = getattr(item, "callspec", None)
        name = values.params.get("name") if values else None
        if isinstance(name, str):
            item.add_marker(pytest.mark.xdist_group(f"{name} {values.params.get('activations')}"))
