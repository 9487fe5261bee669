"""Checkpoints: one call saves a training state, one call loads it into any layout."""

from minloop.checkpoint.directory import latest_checkpoint
from minloop.checkpoint.load import load_checkpoint
from minloop.checkpoint.save import save_checkpoint

__all__ = ["latest_checkpoint", "load_checkpoint", "save_checkpoint"]
