"""Does a layout train your model right?  NVIDIA_TF32_OVERRIDE=0 torchrun --nproc-per-node 2 examples/compare_layouts.py

Builds one model in two layouts, from the same weights and the same global batch, and compares the output of every layer
and the gradient of every weight. Put your own provider and config in `build` and `main`. Without the variable
Transformer Engine rounds what it multiplies on a GPU to TF32, and layouts differ by more than `tolerance`.
"""

import math
import os

import minloop


def build(config, vocab_size=256, sequence_length=64):
    groups = minloop.init_distributed(config, seed=1)
    provider = minloop.gpt_provider(
        vocab_size=vocab_size, max_sequence_length=sequence_length, position_embedding_type="rope"
    )
    chunks = minloop.build_model(provider, config, groups)
    ddp_config = minloop.build_ddp_config(config)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer = minloop.build_optimizer(chunks, minloop.build_optimizer_config(config, ddp_config, lr=1e-3), groups)
    return minloop.TrainState(chunks, optimizer, None, config, groups)


def mock_data(state, vocab_size=256, sequence_length=64):
    data_config = minloop.build_dataset_config(sequence_length=sequence_length, vocab_size=vocab_size)
    return minloop.build_mock_loader(data_config, state.groups, micro_batch_size=2)


def main(tolerance=1e-5, build=build, data=mock_data, **layout):
    # without dropout: every layout would draw other masks
    config = minloop.build_config(
        num_layers=4, hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0
    )
    layout = layout or {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    other = minloop.replace_layout(config, **layout)
    differences = minloop.compare_layouts(build, config, other, data, global_batch_size=8, micro_batch_size=2)
    first = minloop.first_difference(differences, tolerance)
    if os.environ.get("RANK", "0") == "0":
        if differences[0].what == "samples":
            print(f"nothing to compare: {differences[0].hint}")
        else:
            worst = max(differences, key=lambda found: (math.isnan(found.relative), found.relative))
            print(f"{len(differences)} outputs, losses and gradients compared")
            print(f"the largest relative difference is {worst.relative:.1e}: {worst.what}")
            print("the layouts train the same model" if first is None else f"the first that differs is {first}")
    return first


if __name__ == "__main__":
    main()
