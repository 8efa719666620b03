"""Lets every test folder import the shared helpers that lie beside this file.

Without a GPU the kernels written for it run under Triton's interpreter, which takes seconds a case: there only the
first cases of each test run; `pytest -m ""` and a GPU (`make check-gpu`) run them all.
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        if HAS_GPU or not item.path.name.startswith("test_triton_"):
            continue
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        if seen[test] > INTERPRETED_CASES:
            item.add_marker(pytest.mark.long)
