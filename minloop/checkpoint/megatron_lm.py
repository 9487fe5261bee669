"""What Megatron-LM looks for in a checkpoint beside tensors, and what one of its own holds in minloop's terms.

Megatron-LM reads counters and its checks from "args", the namespace of its command line, and random streams from one
object per tensor and pipeline rank. Both are written beside minloop's own.
"""

import dataclasses
import random
import types
from argparse import Namespace  # Megatron-LM stores its settings as one; nothing is parsed here
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.dist_checkpointing.mapping import ShardedObject

from minloop.checkpoint import content, megatron_bridge
from minloop.checkpoint.reading import SavedCheckpoint
from minloop.state import TrainState

SAME_NAMES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "normalization",
    "add_bias_linear",
    "qk_layernorm",
    "multi_latent_attention",
    "mtp_num_layers",
    "position_embedding_type",
)
"""Fields of `content.architecture` that Megatron-LM's command line has under the same names, meaning the same."""


def arguments(state: TrainState) -> Namespace:
    """What this run would be on Megatron-LM's command line, as far as Megatron-LM asks a checkpoint for it.

    Fields of the config have their own names there, but for those spelled out here.
    """
    config, model = state.config, content.unwrapped_models(state)[0]
    plain = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    plain = {
        name: value for name, value in plain.items() if value is None or isinstance(value, bool | int | float | str)
    }
    of_model = {name: getattr(model, name) for name in content.MODEL_FIELDS if hasattr(model, name)}
    tied = bool(of_model.pop("share_embeddings_and_output_weights", False))
    length = of_model.pop("max_sequence_length", None)
    renamed = {
        "num_experts": config.num_moe_experts,
        "group_query_attention": config.num_query_groups != config.num_attention_heads,
        "swiglu": config.gated_linear_unit and config.activation_func is F.silu,
        "squared_relu": config.activation_func is squared_relu,
        "apply_layernorm_1p": config.layernorm_zero_centered_gamma,
        "norm_epsilon": config.layernorm_epsilon,
        "moe_layer_freq": config.moe_layer_freq,
        "untie_embeddings_and_output_weights": not tied,
        "padded_vocab_size": of_model.pop("vocab_size", None),
        "max_position_embeddings": length,
        "seq_length": length,
        "add_position_embedding": True,
    }
    progress = {
        "iteration": state.iteration,
        "consumed_train_samples": state.consumed_samples,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "world_size": torch.distributed.get_world_size(),
        "data_parallel_size": state.groups.dp.size(),
        "use_distributed_optimizer": content.optimizer_kind(state) == "distributed",
    }
    form = {
        "ckpt_format": "torch_dist",
        "ckpt_fully_parallel_save": False,
        "no_save_optim": False,
        "no_save_rng": False,
        "data_parallel_random_init": False,
    }
    return Namespace(**(plain | of_model | renamed | progress | form))


def common_content(state: TrainState) -> dict[str, Any]:
    """What Megatron-LM asks for and minloop does not: to be saved beside minloop's own content."""
    return {"args": arguments(state), "megatron_lm_rng_state": rng_state(state)}


def rng_state(state: TrainState) -> ShardedObject:
    """This rank's random streams in Megatron-LM's form, saved by the first data parallel rank for all of them."""
    of_host = {"random_rng_state": random.getstate(), "np_rng_state": numpy.random.get_state()}
    groups = state.groups
    shape, place = (groups.pp.size(), groups.tp.size()), (groups.pp.rank(), groups.tp.rank())
    streams = [of_host | content.rng_streams()]
    return ShardedObject("rng_state", streams, shape, place, replica_id=groups.dp_cp.rank())


def own_streams(loaded: list[dict[str, Any]], state: TrainState) -> dict[str, Any]:
    """This rank's, of the random streams loaded: one for all data parallel ranks, or one for each."""
    return loaded[state.groups.dp.rank() if len(loaded) > 1 else 0]


def record(opened: SavedCheckpoint, state: TrainState) -> dict[str, Any]:
    """What minloop would have stored of itself (see `content.record`), from a checkpoint of Megatron-LM or -Bridge.

    Their data position is the number of samples consumed, in whatever data the loader has.
    """
    args = opened.common.get("args") or megatron_bridge.arguments(opened.path)
    if not isinstance(args, Namespace | types.SimpleNamespace):
        return {}
    theirs: dict[str, Any] = vars(args)
    architecture = {name: theirs.get(name) for name in SAME_NAMES}
    architecture |= {"num_moe_experts": theirs.get("num_experts"), "vocab_size": theirs.get("padded_vocab_size")}
    if "untie_embeddings_and_output_weights" in theirs:
        architecture["share_embeddings_and_output_weights"] = not theirs["untie_embeddings_and_output_weights"]
    mixed, sharded = theirs.get("bf16") or theirs.get("fp16"), theirs.get("use_distributed_optimizer")
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    same_layout = all(theirs.get(size, 1) == getattr(state.config, size) for size in sizes)
    consumed = theirs.get("consumed_train_samples") or 0
    return {
        # what they leave open, None, they derive from other fields
        "architecture": {name: value for name, value in architecture.items() if value is not None},
        "layout": content.layout(state) if same_layout and not theirs.get("no_save_rng") else None,
        "optimizer_kind": "distributed" if sharded else "float16" if mixed else "fp32",
        "consumed_samples": consumed,
        "loaders": {"train": {"consumed_samples": consumed}},
        "of_megatron_lm": True,
    }
