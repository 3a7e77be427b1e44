"""Draft heads: their networks, checkpoints, catalogue and training."""

from heads.catalogue import catalogue
from heads.loading import load_head, load_heads

__all__ = ["catalogue", "load_head", "load_heads"]
