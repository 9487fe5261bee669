"""Megatron-Bridge's files beside mcore's: train_state.pt with counters, run_config.yaml with configs.

As documented (`megatron.bridge.training.utils.checkpoint_utils`); it needs neither to be installed. Its loading prefers
latest_train_state.pt, beside the checkpoints, to the tracker that Megatron-LM reads.
"""

import io
from argparse import Namespace  # Megatron-LM stores its settings as one; nothing is parsed here
from pathlib import Path

import torch

from minloop.checkpoint.reading import load_plain, named_errors
from minloop.checkpoint.run_config import RUN_CONFIG, configs_of, read_nodes
from minloop.state import TrainState

TRAIN_STATE = "train_state.pt"
LATEST_TRAIN_STATE = f"latest_{TRAIN_STATE}"


def files_beside(state: TrainState) -> dict[str, bytes]:
    """The content of each file, by name; the counters are those of Megatron-Bridge's `TrainState.state_dict()`."""
    counters = {
        "step": torch.tensor(state.iteration),
        "consumed_train_samples": torch.tensor(state.consumed_samples),
        "skipped_train_samples": torch.tensor(0),
        "consumed_valid_samples": torch.tensor(0),
        "floating_point_operations_so_far": torch.tensor(0.0, dtype=torch.float64),
        "do_train": torch.tensor(True),
        "do_valid": torch.tensor(False),
        "do_test": torch.tensor(False),
    }
    buffer = io.BytesIO()
    torch.save(counters, buffer)
    return {RUN_CONFIG: configs_of(state).encode(), TRAIN_STATE: buffer.getvalue()}


def arguments(checkpoint: Path) -> Namespace | None:
    """What Megatron-LM would have saved as "args" in a checkpoint of Megatron-Bridge's, which has none; else None.

    Raises:
        CheckpointError: train_state.pt is damaged or more than plain data.
        ValueError: run_config.yaml is no YAML mapping.
    """
    file = checkpoint / TRAIN_STATE
    if not file.is_file() or not (checkpoint / RUN_CONFIG).is_file():
        return None
    with named_errors(file), file.open("rb") as stream:
        consumed = int(load_plain(stream, file)["consumed_train_samples"])
    sections = {name: node for name, node in read_nodes(checkpoint / RUN_CONFIG).items() if isinstance(node, dict)}
    model, saving = sections.get("model", {}), sections.get("checkpoint", {})
    renamed = {
        "num_experts": model.get("num_moe_experts"),
        "padded_vocab_size": None,  # of its vocab_size, padding may or may not be a part
        "consumed_train_samples": consumed,
        "use_distributed_optimizer": sections.get("ddp", {}).get("use_distributed_optimizer", False),
        "no_save_rng": not saving.get("save_rng", True),
    }
    if "share_embeddings_and_output_weights" in model:
        renamed["untie_embeddings_and_output_weights"] = not model["share_embeddings_and_output_weights"]
    return Namespace(**model | renamed)
