"""Hugging Face's weights in, a step of training, and out again:  torchrun --nproc-per-node 2 examples/hf_weights.py

Makes a small Llama with transformers, loads it at TP2, trains it, writes it for transformers to load. Both compute the
same logits, before and after (on a GPU with NVIDIA_TF32_OVERRIDE=0: Transformer Engine otherwise rounds what it
multiplies in fp32 to TF32). For weights from elsewhere, give their directory wherever "made" stands here.
"""

import shutil

import torch
import transformers

import minloop


def main(directory="checkpoints/hf", **layout):
    sizes: dict = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = transformers.LlamaConfig(vocab_size=255, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    fields, options = minloop.hf_config_fields(llama.to_dict(), make_vocab_size_divisible_by=2)
    config = minloop.build_config(**fields, **(layout or {"tensor_model_parallel_size": 2}))
    groups = minloop.init_distributed(config, seed=1234)
    tokens, made, trained = torch.arange(64).reshape(1, 64), f"{directory}/made", f"{directory}/trained"
    if minloop.is_first_rank(groups):
        shutil.rmtree(directory, ignore_errors=True)
        transformers.LlamaForCausalLM(llama).save_pretrained(made)
    torch.distributed.barrier()

    ddp_config = minloop.build_ddp_config(config)
    chunks = minloop.wrap_ddp(minloop.build_gpt_model(config, groups, **options), ddp_config, groups)
    optimizer = minloop.build_optimizer(chunks, minloop.build_optimizer_config(config, ddp_config, lr=1e-3), groups)
    state = minloop.TrainState(chunks, optimizer, None, config, groups)
    minloop.load_hf_weights(state, made)
    ours = {made: minloop.forward_logits(state, tokens)}
    data_config = minloop.build_dataset_config(sequence_length=64, vocab_size=llama.vocab_size)
    loader = minloop.build_mock_loader(data_config, groups, micro_batch_size=4)
    minloop.train_step(state, loader, num_microbatches=1)
    minloop.save_hf_weights(trained, state, llama.to_dict())
    ours[trained] = minloop.forward_logits(state, tokens)

    differences = {}
    for weights, logits in ours.items() if minloop.is_first_rank(groups) else ():
        theirs = transformers.LlamaForCausalLM.from_pretrained(weights)(tokens).logits
        differences[weights] = (logits[..., : llama.vocab_size].cpu() - theirs).abs().max().item()
        print(f"{weights}: logits differ by at most {differences[weights]:.1e}")
    minloop.shutdown_distributed()
    return differences


if __name__ == "__main__":
    main()
