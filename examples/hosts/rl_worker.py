"""The worker of an RL engine:  torchrun --nproc-per-node 2 examples/hosts/rl_worker.py

An actor and its frozen reference in layouts of their own, with the methods by which verl's controller drives a Megatron
worker: init_model, update_actor, compute_log_prob, compute_ref_log_prob, checkpoints, and the weights' way to the
rollout engine. There the same stands on about 3,200 lines around megatron-core. The controller's batches are dicts of
CPU tensors [n, s], those of one data parallel rank; it calls every rank alike.
"""

import sys
from pathlib import Path
from typing import Any

import torch

import minloop

sys.path.insert(0, str(Path(__file__).parent.parent))
import policy_gradient


class MegatronWorker:
    def __init__(self, actor_layout, reference_layout=None, micro_batch_size=8, lr=2e-3):
        self.actor_layout, self.reference_layout = actor_layout, reference_layout or {}
        self.micro_batch_size, self.lr = micro_batch_size, lr

    def init_model(self):
        """Build the actor, and the reference with its weights; the actor is off the device until it is needed."""
        config = self._config(self.actor_layout)
        groups = minloop.init_distributed(config, seed=1234)
        self.actor = self._state(config, groups)
        config = self._config(self.reference_layout)
        groups = minloop.build_groups(config)
        minloop.seed_ranks(1234, groups, config)
        self.reference = self._state(config, groups)
        minloop.load_full_parameters(self.reference, minloop.named_full_parameters(self.actor))
        minloop.offload(self.reference, ["gradients", "optimizer"])  # it never trains
        minloop.offload(self.actor)

    def update_actor(self, batch):
        """Take one optimizer step of PPO on the batch; returns the metrics, alike on every rank."""
        minloop.onload(self.actor)
        minloop.begin_step(self.actor)
        parts = self._microbatches(batch)
        minloop.forward_backward(
            self.actor, parts, num_microbatches=len(parts), forward_step=policy_gradient.policy_step
        )
        metrics = minloop.finish_step(self.actor)
        minloop.offload(self.actor)
        return {
            "actor/pg_loss": metrics.loss.item(),
            "actor/grad_norm": float(metrics.grad_norm or 0),
            "actor/lr": metrics.learning_rate,
        }

    def compute_log_prob(self, batch):
        """[n, s] log-probabilities of the labels, of the actor as it is, on every rank."""
        minloop.onload(self.actor, ["weights"])
        found = torch.cat(minloop.token_logprobs(self.actor, self._microbatches(batch)))
        minloop.offload(self.actor, ["weights"])
        return found.cpu()

    def compute_ref_log_prob(self, batch):
        """[n, s], of the reference."""
        return torch.cat(minloop.token_logprobs(self.reference, self._microbatches(batch))).cpu()

    def weights(self, ranks=None):
        """Yield (name, full tensor), one at a time, on the ranks where a rollout engine is; every rank iterates."""
        minloop.onload(self.actor, ["weights"])
        yield from minloop.named_full_parameters(self.actor, ranks=ranks, dtype=torch.bfloat16)
        minloop.offload(self.actor, ["weights"])

    def save_checkpoint(self, directory):
        minloop.onload(self.actor)
        saved = minloop.save_checkpoint(directory, self.actor)
        minloop.offload(self.actor)
        return saved

    def load_checkpoint(self, directory):
        minloop.onload(self.actor)
        minloop.load_checkpoint(directory, self.actor)
        minloop.offload(self.actor)

    def shutdown(self):
        minloop.shutdown_distributed()

    def _config(self, layout):
        return minloop.build_config(
            num_layers=2, hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, **layout
        )

    def _state(self, config, groups):
        sizes: Any = {"vocab_size": policy_gradient.VOCAB_SIZE, "max_sequence_length": policy_gradient.LENGTH}
        chunks = minloop.build_gpt_model(config, groups, **sizes)
        ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
        chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
        optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=self.lr)
        return minloop.TrainState(
            chunks, minloop.build_optimizer(chunks, optimizer_config, groups), None, config, groups
        )

    def _microbatches(self, batch):
        rows = torch.arange(len(batch["tokens"])).split(self.micro_batch_size)
        return [{name: value[part] for name, value in batch.items()} for part in rows]


def main(directory="checkpoints/rl_worker", **layout):
    worker = MegatronWorker(layout or {"tensor_model_parallel_size": 2})
    worker.init_model()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(policy_gradient.VOCAB_SIZE, (16, policy_gradient.LENGTH), generator=generator)
    batch = {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": torch.arange(policy_gradient.LENGTH - 1).expand(16, -1).contiguous(),
        "loss_mask": torch.ones(16, policy_gradient.LENGTH - 1),
        "advantages": torch.randn(16, 1, generator=generator).expand(-1, policy_gradient.LENGTH - 1).contiguous(),
    }
    batch["old_logprobs"] = worker.compute_log_prob(batch)
    apart = [(worker.compute_ref_log_prob(batch) - batch["old_logprobs"]).abs().max().item()]
    saved = worker.save_checkpoint(directory)
    metrics = worker.update_actor(batch)
    apart.append((worker.compute_ref_log_prob(batch) - worker.compute_log_prob(batch)).abs().max().item())
    sent = sum(weight.numel() for _, weight in worker.weights(ranks=[0]))
    worker.load_checkpoint(saved)
    apart.append((worker.compute_ref_log_prob(batch) - worker.compute_log_prob(batch)).abs().max().item())
    worker.shutdown()
    return metrics, apart, sent


if __name__ == "__main__":
    print(main())
