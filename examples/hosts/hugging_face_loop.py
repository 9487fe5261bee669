"""A loop in Hugging Face's style:  torchrun --nproc-per-node 2 examples/hosts/hugging_face_loop.py

Epochs over a DataLoader of `input_ids`, gradient accumulation by hand, the optimizer step when enough has gathered: the
loop stays as it was. What it loses is accelerate's MegatronLMPlugin and what it reads of megatron.training: about a
thousand lines around `loss.backward()`. A dataset of the `datasets` package with a column `input_ids` goes in as it is.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import minloop

sys.path.insert(0, str(Path(__file__).parent.parent))
import train


def collate(rows):
    """What a causal language model's collator does, and shifts the labels: [b, s + 1] ids → a minloop batch."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {
        "tokens": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "loss_mask": torch.ones(len(rows), ids.shape[1] - 1),
        "position_ids": torch.arange(ids.shape[1] - 1).expand(len(rows), -1),
    }


def tokenized_dataset(groups, samples=64):
    """Any dataset of input_ids will do; this one has the tokens that examples/train.py trains on."""
    data_config = minloop.build_dataset_config(sequence_length=64, vocab_size=256)
    loader = minloop.build_mock_loader(data_config, groups, micro_batch_size=1, vocab_size=256)
    batches = [next(loader) for _ in range(samples)]
    return [{"input_ids": [*batch["tokens"][0].tolist(), batch["labels"][0, -1].item()]} for batch in batches]


def main(epochs=1, gradient_accumulation_steps=4, max_steps=None, **layout):
    state = train.build(256, 64, seed=1234, **(layout or {"tensor_model_parallel_size": 2}))
    shard: Any = tokenized_dataset(state.groups)  # of this data parallel rank
    losses, gathered = [], []
    for batch in (batch for _ in range(epochs) for batch in DataLoader(shard, batch_size=4, collate_fn=collate)):
        if not gathered:
            tokens = batch["loss_mask"].sum().item() * gradient_accumulation_steps * state.groups.dp.size()
            minloop.begin_step(state, num_tokens=tokens)
        gathered.append(batch)
        minloop.forward_backward(state, [batch], num_microbatches=1)
        if len(gathered) == gradient_accumulation_steps:
            losses.append(minloop.finish_step(state).loss.item())
            gathered.clear()
        if len(losses) == max_steps:
            break
    if minloop.is_first_rank(state.groups):
        print("\n".join(f"{number} {loss:.6f}" for number, loss in enumerate(losses, start=1)))
    minloop.shutdown_distributed()
    return losses


if __name__ == "__main__":
    main()
