"""Checkpoints: one call saves a training state, one call loads it into any layout."""

from minloop.checkpoint.background import PendingSave
from minloop.checkpoint.describe import CheckpointDescription, describe_checkpoint, export_weights
from minloop.checkpoint.directory import latest_checkpoint
from minloop.checkpoint.integrity import verify_checkpoint
from minloop.checkpoint.load import load_checkpoint
from minloop.checkpoint.partial import load_weights
from minloop.checkpoint.reading import CheckpointError
from minloop.checkpoint.run_config import read_run_config, write_run_config
from minloop.checkpoint.save import save_checkpoint, start_save
from minloop.checkpoint.shared import shared_directory

__all__ = [
    "CheckpointDescription",
    "CheckpointError",
    "PendingSave",
    "describe_checkpoint",
    "export_weights",
    "latest_checkpoint",
    "load_checkpoint",
    "load_weights",
    "read_run_config",
    "save_checkpoint",
    "shared_directory",
    "start_save",
    "verify_checkpoint",
    "write_run_config",
]
