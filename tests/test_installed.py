"""What is mended in Transformer Engine's layers, on stand-ins that behave as they do, and on GPUs with them."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from ranks import RankError, run_ranks
from small import WIDE, shared_state, small_config, text_loader, train

import minloop
from minloop.layers import TorchColumnParallelLinearGathered
from minloop.layers.gathered_linear import gather_by_hidden_dimension
from minloop.layers.installed import add_up_repeated_layers, fuse_rope_where_it_fits, mark_sinks


def test_sinks_are_marked_as_those_of_other_heads() -> None:
    attention: Any = torch.nn.Module()
    attention.softmax_offset = offset = torch.nn.Parameter(torch.zeros(2))
    mark_sinks(torch.nn.Sequential(attention, torch.nn.Linear(2, 2)))
    set_defaults_if_not_set_tensor_model_parallel_attributes(offset)
    mark_sinks(attention)  # marked already, as of the layers in plain torch
    assert (vars(offset)["tensor_model_parallel"], vars(offset)["partition_dim"]) == (True, 0)


@pytest.mark.parametrize(("kind", "fused"), [("rope", True), ("yarn", False), ("mrope", False)])
def test_rotations_that_no_kernel_knows_are_not_fused(kind: str, fused: bool) -> None:
    attention: Any = SelfAttention.__new__(SelfAttention)
    torch.nn.Module.__init__(attention)
    config: Any = SimpleNamespace(apply_rope_fusion=True, fused_single_qkv_rope=True)
    attention.config = copy.copy(config)
    chunk: Any = torch.nn.Sequential(attention)
    chunk.position_embedding_type = kind
    fuse_rope_where_it_fits(chunk, config)
    for own in (config, attention.config):  # a heterogeneous layer has one of its own
        assert own.apply_rope_fusion is own.fused_single_qkv_rope is fused


class Cached(torch.nn.Module):
    """Adds to `main_grad` as Transformer Engine's linear layers under mcore's wrappers do, save in a first one."""

    def __init__(self) -> None:
        super().__init__()
        self.is_first_microbatch, self.disable_parameter_transpose_cache = True, False
        self.main_grad = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = 0.0 if self.is_first_microbatch and not self.disable_parameter_transpose_cache else 1.0
        self.is_first_microbatch = False
        product = x * 1.0
        product.register_hook(lambda grad: self.main_grad.mul_(kept).add_(grad * x.detach()) and None)
        return product


@pytest.mark.parametrize("repeated", [True, False])
def test_repeated_layers_add_up_their_gradients(repeated: bool) -> None:
    block: Any = MultiTokenPredictionBlock.__new__(MultiTokenPredictionBlock)
    torch.nn.Module.__init__(block)
    block.mtp_use_repeated_layer, block.layer = repeated, (layer := Cached())
    add_up_repeated_layers(torch.nn.Sequential(block))
    first = layer(torch.tensor(2.0, requires_grad=True))
    layer(first).backward()  # the gradient of the second call comes first
    assert layer.disable_parameter_transpose_cache is repeated
    assert layer.main_grad == (4.0 if repeated else 2.0)


def linear_replacements(mended: bool) -> list[torch.Tensor]:
    """Outputs and gradients of linear layers in the place of an attention, this repository's and mcore's."""
    config = small_config(tensor_model_parallel_size=2, sequence_parallel=True, gradient_accumulation_fusion=False)
    minloop.init_distributed(config, seed=1)
    results: list[torch.Tensor] = []
    layers: list[Any] = [TorchColumnParallelLinearGathered(config), ColumnParallelLinearGathered(config)]
    with torch.no_grad():
        layers[1].weight.copy_(layers[0].weight)
    layers[1]._tp_group = layers[1].tp_group
    if mended:
        gather_by_hidden_dimension(layers[1])
    x = torch.randn(4, 2, config.hidden_size, generator=torch.Generator().manual_seed(3)).to(layers[0].weight.device)
    for layer in layers:
        own = x.clone().requires_grad_()
        output, bias = layer(own, attention_mask=None)
        assert bias is None
        assert output.shape == x.shape
        output.square().sum().backward()
        assert own.grad is not None
        results += [output.detach(), own.grad, layer.weight.grad]
    minloop.shutdown_distributed()
    return results


def test_linear_replacements_are_gathered_by_the_hidden_dimension() -> None:
    for *expected, output, own, weight in run_ranks(2, linear_replacements, True):
        assert all(torch.equal(a, b) for a, b in zip(expected, (output, own, weight), strict=True))
    with pytest.raises(RankError, match=r"output\.shape == x\.shape"):
        run_ranks(2, linear_replacements, False)


EXPERTS: dict[str, Any] = {
    **{"num_moe_experts": 4, "moe_ffn_hidden_size": 64, "moe_token_dispatcher_type": "alltoall"},
    **{"add_bias_linear": False, "activation_func": F.silu, "gated_linear_unit": True},
}
ON_GPUS: dict[str, dict[str, Any]] = {
    "sinks": {"softmax_type": "learnable"},
    "two ranks share a group": {"num_query_groups": 1, "gpt": {"position_embedding_type": "rope"}},
    "quantile balancing": EXPERTS | {"moe_router_load_balancing_type": "quantile_balancing"},
    "latent experts": EXPERTS | {"moe_latent_size": 64},
    "routers in fp64": EXPERTS | {"moe_router_dtype": "fp64"},
}


def losses_and_norms(directory: str, options: dict[str, Any], first: bool) -> list[tuple[float, float]]:
    state = shared_state(directory, first, **(WIDE | options))
    history = train(state, text_loader(state), 4)
    minloop.shutdown_distributed()
    return history


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPUS)
def test_two_ranks_train_what_one_trains(case: str, tmp_path: Path) -> None:
    pytest.importorskip("transformer_engine", reason="its layers are meant")
    options = ON_GPUS[case]
    (expected,) = run_ranks(1, losses_and_norms, str(tmp_path), options, True)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    for history in run_ranks(2, losses_and_norms, str(tmp_path), options | layout, False):
        assert history == [pytest.approx(step, rel=1e-3) for step in expected]
