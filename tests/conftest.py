"""Lets every test folder import the shared helpers that lie beside this file."""

import os


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


if not _has_gpu():  # Triton reads it once, when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
