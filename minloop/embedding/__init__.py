"""For a host that owns the loop: a step in parts, per-token results, weights streamed out and in, memory given back."""

from minloop.embedding.full_parameters import load_full_parameters, named_full_parameters
from minloop.embedding.log_probabilities import token_logprobs
from minloop.embedding.lora import lora, merge_lora
from minloop.embedding.offloading import offload, onload
from minloop.embedding.step_parts import begin_step, finish_step, forward_backward

__all__ = [
    "begin_step",
    "finish_step",
    "forward_backward",
    "load_full_parameters",
    "lora",
    "merge_lora",
    "named_full_parameters",
    "offload",
    "onload",
    "token_logprobs",
]
