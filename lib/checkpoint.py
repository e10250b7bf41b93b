"""A short name for `lib.training.checkpoint`."""

from lib.training.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
