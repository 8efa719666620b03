"""GGUF files: a strict, bounded, memory-mapped reader and a small writer."""

from .reader import GGUFFile, TensorInfo, open_gguf
from .source import ModelFile
from .writer import Typed, write_gguf

__all__ = ["GGUFFile", "ModelFile", "TensorInfo", "Typed", "open_gguf", "write_gguf"]
