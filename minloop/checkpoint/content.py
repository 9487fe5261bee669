"""What a checkpoint holds: mcore's sharded state of model and optimizer; beside it counters, random streams, records.

Key names are Megatron-LM's (model or model0, model1, …; optimizer; opt_param_scheduler; rng_state; iteration); what it
has no name for lies under "minloop".
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import convert_cuda_rng_state, is_graph_safe_cuda_rng_tracker
from megatron.core.transformer import MegatronModule

from minloop.architecture import unwrapped
from minloop.checkpoint.extra_state import tell_copies_apart
from minloop.checkpoint.flat_ranges import FULLY_RESHARDABLE
from minloop.checkpoint.holes import allow_holes
from minloop.checkpoint.optimizer_state import BY_BUCKETS, mended_optimizers
from minloop.checkpoint.optimizer_steps import agree_on_nothing
from minloop.messages import without_log_lines
from minloop.state import TrainState

ARCHITECTURE_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "multi_latent_attention",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "mtp_num_layers",
    "layernorm_zero_centered_gamma",
    "qk_l2_norm",
    "softmax_type",
    "rotary_interleaved",
    "moe_router_topk",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)
MODEL_FIELDS = (
    "vocab_size",
    "max_sequence_length",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "share_embeddings_and_output_weights",
)
"""What decides the shapes and meaning of the weights: fields of the config, and attributes of the model."""

COUNTERS = ("consumed_samples", "skipped_iterations", "global_batch_size")
"""What is stored of a training state's numbers beside its iteration; one that a checkpoint lacks counts as 0."""


def architecture(state: TrainState) -> dict[str, Any]:
    """The values that two models must share for one's weights to fit the other."""
    model = unwrapped_models(state)[0]
    fields = {name: getattr(state.config, name, None) for name in ARCHITECTURE_FIELDS}
    fields |= {name: getattr(model, name) for name in MODEL_FIELDS if hasattr(model, name)}
    function = state.config.activation_func
    return fields | {"activation_func": getattr(function, "__name__", str(function))}


def layout(state: TrainState) -> dict[str, int]:
    """The sizes of this layout's groups."""
    groups = state.groups
    return {name: getattr(groups, name).size() for name in ("tp", "cp", "ep", "expt_tp", "pp", "dp")}


def optimizer_kind(state: TrainState) -> str:
    """mcore's form of the optimizer's state: "fp32", "float16" (DDP, fp32 master weights) or "distributed" (ZeRO-1)."""
    if state.chunks[0].ddp_config.use_distributed_optimizer:
        return "distributed"
    return "float16" if state.config.bf16 or state.config.fp16 else "fp32"


def record(state: TrainState, loaders: Mapping[str, Any]) -> dict[str, Any]:
    """What minloop stores of itself: plain numbers and strings, equal on every rank.

    Args:
        loaders: by name, which know their positions.
    """
    return {
        "architecture": architecture(state),
        "layout": layout(state),
        "optimizer_kind": optimizer_kind(state),
        **{name: getattr(state, name) for name in COUNTERS},
        "loaders": {name: loader.state_dict() for name, loader in loaders.items()},
    }


def save_metadata(state: TrainState) -> dict[str, Any]:
    """mcore's switches for the form of a checkpoint; stored with it, since loading needs the same.

    `fully_reshardable` is the one form of the distributed optimizer's state that another layout can read.
    """
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if optimizer_kind(state) == "distributed":
        metadata["distrib_optim_sharding_type"] = FULLY_RESHARDABLE
    return metadata


def model_state(state: TrainState, metadata: dict[str, Any]) -> dict[str, Any]:
    """mcore's sharded state dict of the chunks, under the names Megatron-LM gives them."""
    metadata = metadata | {"dp_cp_group": state.groups.dp_cp}
    states = [model.sharded_state_dict(metadata=metadata) for model in unwrapped_models(state)]
    content = dict(zip(model_keys(state), states, strict=True))
    tell_copies_apart(content, state.groups)
    return content


def unwrapped_models(state: TrainState) -> list[MegatronModule]:
    """The models inside the chunks' wrappers, whose names are those in checkpoints."""
    return [cast(MegatronModule, unwrapped(chunk)) for chunk in state.chunks]


def model_keys(state: TrainState) -> list[str]:
    """Megatron-LM's key of each chunk."""
    count = len(state.chunks)
    return ["model"] if count == 1 else [f"model{index}" for index in range(count)]


def optimizer_state(
    state: TrainState, model: dict[str, Any], metadata: dict[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    """mcore's sharded state dict of the optimizer, by the parameters in `model`."""
    metadata = metadata | {"dp_cp_group": state.groups.dp_cp}
    with (
        mended_optimizers(state, by_buckets=metadata.get("distrib_optim_sharding_type") == BY_BUCKETS) as steps,
        # of an optimizer that has none on this stage
        without_log_lines("megatron.core.dist_checkpointing.optimizer", "Sharded parameters mapping is empty"),
    ):
        content = state.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    agree_on_nothing(state, content, optimizer_kind(state), steps)
    if not is_loading:
        allow_holes(content)
    return content


def rng_streams() -> dict[str, Any]:
    """The random streams as they stand: torch's CPU and GPU generators and mcore's tracker."""
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    return {
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": {name: convert_cuda_rng_state(value) for name, value in tracker.get_states().items()},
    }


def rng_state(state: TrainState) -> ShardedObject:
    """This rank's random streams. Each rank stores its own; "rng_state" is Megatron-LM's (see megatron_lm.py)."""
    groups = state.groups
    shape = (groups.pp.size(), groups.tp.size(), groups.dp_cp.size())
    place = (groups.pp.rank(), groups.tp.rank(), groups.dp_cp.rank())
    return ShardedObject("minloop.rng_state", rng_streams(), shape, place)


def are_of_this_device(streams: dict[str, Any]) -> bool:
    """Whether stored random streams fit the generators here: a GPU's are of another form than a CPU's."""
    return streams["cuda_rng_state"].numel() == torch.cuda.get_rng_state().numel()


def restore_rng_state(streams: dict[str, Any]) -> None:
    """Set this rank's random streams to stored ones."""
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    graph_safe = is_graph_safe_cuda_rng_tracker(tracker)
    torch.set_rng_state(streams["torch_rng_state"])
    torch.cuda.set_rng_state(streams["cuda_rng_state"])
    held, states = tracker.get_states(), dict[str, Any]()
    for name, value in streams["rng_tracker_states"].items():
        if graph_safe and isinstance(generator := held.get(name), torch.Generator):
            generator.set_state(value)  # a captured graph goes on drawing from the generator that it knows
            states[name] = generator
        else:
            states[name] = convert_cuda_rng_state(value, to_graphable=graph_safe)
    tracker.set_states(states)
