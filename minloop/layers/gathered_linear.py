"""The linear layer that stands for an attention or an MLP in heterogeneous models, right with sequence parallelism."""

from typing import Any

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered
from torch import Tensor


def gathered(part: Tensor, config: ModelParallelConfig, group: Any) -> Tensor:
    """[s, b, h / ranks] → [s, b, h]; with sequence parallelism of all tokens → of this rank's part of them."""
    output = gather_from_tensor_model_parallel_region(part, group=group)
    return scatter_to_sequence_parallel_region(output, group=group) if config.sequence_parallel else output


def gather_by_hidden_dimension(layer: Any) -> None:
    """Mend mcore's `TELayerNormColumnParallelLinearGathered`, which pads its output in the same wrong dimension."""
    product: Any = type(layer).__mro__[1].forward

    def forward(x: Tensor, **_unused: Any) -> tuple[Tensor, None]:
        return gathered(product(layer, x)[0], layer.config, layer._tp_group), None

    layer.forward = forward


class TorchColumnParallelLinearGathered(ColumnParallelLinearGathered):
    """mcore's `ColumnParallelLinearGathered`, which with sequence parallelism pads its output in a wrong dimension."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """[s, b, h] → [s, b, h]; s is this rank's part of the sequence with sequence parallelism."""
        part: Tensor = ColumnParallelLinear.forward(self, input_, weight)[0]
        return gathered(part, self.config, self.tp_group), None
