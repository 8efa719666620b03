"""Targets: one file per architecture over shared layers, loaded by GGUF names."""

from sparkinfer.models.config import MAX_WIDTH, ModelConfig
from sparkinfer.models.decoder import Target
from sparkinfer.models.load import ARCHITECTURES, load_target

__all__ = ["ARCHITECTURES", "MAX_WIDTH", "ModelConfig", "Target", "load_target"]
