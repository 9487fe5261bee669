"""The linear layer that stands for an attention or an MLP in heterogeneous models, right with sequence parallelism."""

from typing import Any

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered
from torch import Tensor


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
        output = gather_from_tensor_model_parallel_region(part, group=self.tp_group)
        if self.config.sequence_parallel:
            output = scatter_to_sequence_parallel_region(output, group=self.tp_group)
        return output, None
