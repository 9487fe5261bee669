"""What an optimizer holds of a model that is frozen in part: tensors in which layers are stacked, without some of them.

mcore's checkpoints stack equal layers under one name, and both mcore and PyTorch want such a tensor to be whole where
it is saved. A load asks for the layers that are trained there, and learns which of them are not in the checkpoint.
"""

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import Metadata

from minloop.checkpoint.full_names import OPTIMIZER_STATE


def allow_holes(content: dict[Any, Any]) -> None:
    """Describe tensors of stacked layers, in place, without a grid of which mcore would look for every place."""
    dict_list_map_inplace(_without_grid, content)


def _without_grid(leaf: Any) -> Any:
    if isinstance(leaf, ShardedTensorFactory):
        build = leaf.build_fn
        return replace(leaf, build_fn=lambda *given: dict_list_map_outplace(_without_grid, build(*given)))
    if not isinstance(leaf, ShardedTensor) or not leaf.prepend_axis_num or leaf.data is None:
        return leaf
    data = leaf.data[(None,) * leaf.prepend_axis_num]
    return replace(leaf, data=data, local_shape=tuple(data.shape), axis_fragmentations=None, prepend_axis_num=0)


@contextlib.contextmanager
def holes_in_optimizers_allowed() -> Generator[None]:
    """While inside, PyTorch plans a save of an optimizer's tensors that lack parts; weights must be whole as ever."""
    own: Any = default_planner._validate_global_plan  # pyright: ignore[reportPrivateUsage]

    def validate(plans: Sequence[Any], metadata: Metadata) -> bool:
        entries = metadata.state_dict_metadata
        held = {name: entry for name, entry in entries.items() if name.startswith(OPTIMIZER_STATE)}
        rest = {name: entry for name, entry in entries.items() if name not in held}
        # of a single plan it does not ask whether all is there
        own_of = replace(metadata, state_dict_metadata=held)
        return own(plans, replace(metadata, state_dict_metadata=rest)) and own(plans[:1], own_of)

    default_planner._validate_global_plan = validate  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        default_planner._validate_global_plan = own  # pyright: ignore[reportPrivateUsage]
