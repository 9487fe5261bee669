"""Hugging Face Transformers' LlamaForCausalLM: compiled, SDPA held to cuDNN, FSDP2 on several GPUs.

    PYTHONPATH=$PWD python -m torch.distributed.run --nproc-per-node 1 -m benchmarks.peers.hf_transformers C steps=12

Switch: `compile=model`, `layers`, `graphs` or `off`, as for plain_torch.
"""

import sys

from benchmarks.peers.processes import OVERLAP_FREELY, Result, check_switches, torchrun
from benchmarks.shapes import Run, read_run


def command(run: Run) -> tuple[list[str], dict[str, str | None]]:
    check_switches(run, "compile")
    return torchrun(run, "benchmarks.peers.hf_transformers"), OVERLAP_FREELY


def parse(log: str, run: Run) -> Result:
    return Result.read(log)


def main() -> None:
    import torch
    import transformers

    from benchmarks.peers import loop

    run = read_run(sys.argv[1:])
    shape, device = run.shape, loop.start(run)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        max_position_embeddings=shape.sequence_length,
        rms_norm_eps=shape.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(shape.rotary_base)},
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
        dtype=torch.float32,
    )
    with device:
        model = transformers.LlamaForCausalLM(config)
    model.train()

    class Logits(torch.nn.Module):
        """The model as the loop calls it."""

        def __init__(self) -> None:
            super().__init__()
            self.llama = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.llama(input_ids=tokens, use_cache=False).logits

    loop.prepare(run, model, model.model.layers)
    loop.train(run, device, Logits(), {"torch": torch.__version__, "transformers": transformers.__version__})


if __name__ == "__main__":
    main()
