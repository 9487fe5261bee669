"""Reinforcement learning, GRPO-like, with a synthetic reward:  torchrun --nproc-per-node 2 examples/policy_gradient.py

A tiny policy is to write tokens below 16 of 64: a group of samples per prompt, each sample's reward against its group's
mean and spread, and the clipped ratio of PPO (arXiv:2402.03300, without a reference policy). The host owns sampling,
reward and loss; minloop gives log-probabilities on every rank and a step in parts.
"""

import torch

import minloop

VOCAB_SIZE, PROMPT, LENGTH = 64, 4, 16


def build(**layout):
    config = minloop.build_config(
        num_layers=2, hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, **layout
    )
    groups = minloop.init_distributed(config, seed=1234)
    chunks = minloop.build_gpt_model(config, groups, vocab_size=VOCAB_SIZE, max_sequence_length=LENGTH)
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer = minloop.build_optimizer(chunks, minloop.build_optimizer_config(config, ddp_config, lr=2e-3), groups)
    return minloop.TrainState(chunks, optimizer, None, config, groups)


def sample(state, prompts, generator):
    """[n, PROMPT] → [n, LENGTH]: all ranks of a replica draw the same tokens from the same logits."""
    tokens = prompts
    while tokens.shape[1] < LENGTH:
        padded = torch.nn.functional.pad(tokens, (0, LENGTH - tokens.shape[1]))
        logits = minloop.forward_logits(state, padded)[:, tokens.shape[1] - 1].cpu()
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
    return tokens


def policy_step(data, model):
    """The host's loss: per token the clipped ratio to the policy that sampled, times the advantage."""
    batch = minloop.place_batch(next(data), model)
    output, _ = minloop.gpt_forward_step(iter([batch]), model)

    def loss(output):  # [b, s]: minus the log-probability of each label
        ratio = torch.exp(-output - batch["old_logprobs"])
        advantages, mask = batch["advantages"], batch["loss_mask"]
        total = -(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask).sum()
        return total, mask.sum(), {"policy loss": torch.stack([total.detach(), mask.sum()])}

    return output, loss


def rollout(state, generator, num_prompts, group_size):
    """A batch with advantages and the log-probabilities of the policy that sampled it, and the mean reward."""
    prompts = torch.randint(VOCAB_SIZE, (num_prompts, PROMPT), generator=generator).repeat_interleave(group_size, dim=0)
    tokens = sample(state, prompts, generator)
    rewards = (tokens[:, PROMPT:] < 16).float().mean(dim=1).view(num_prompts, group_size)
    spread = rewards.std(dim=1, keepdim=True) + 1e-4
    advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / spread).view(-1, 1)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    batch = {
        "tokens": inputs,
        "labels": labels,
        "position_ids": torch.arange(LENGTH - 1).expand_as(inputs),
        "loss_mask": (torch.arange(LENGTH - 1) >= PROMPT - 1).float().expand(inputs.shape).contiguous(),
        "advantages": advantages.expand(inputs.shape).contiguous(),
    }
    (batch["old_logprobs"],) = minloop.token_logprobs(state, [batch])
    return batch, rewards.mean().item()


def update(state, batch):
    """One optimizer step, in two microbatches."""
    minloop.begin_step(state)
    for rows in torch.arange(len(batch["tokens"])).split(len(batch["tokens"]) // 2):
        part = {name: value[rows.to(value.device)] for name, value in batch.items()}
        minloop.forward_backward(state, [part], num_microbatches=1, forward_step=policy_step)
    return minloop.finish_step(state)


def main(steps=30, num_prompts=4, group_size=8, updates_per_rollout=2, **layout):
    state = build(**(layout or {"tensor_model_parallel_size": 2}))
    generator = torch.Generator().manual_seed(1 + state.groups.dp.rank())  # each replica has prompts of its own
    rewards = []
    for step in range(steps):
        batch, reward = rollout(state, generator, num_prompts, group_size)
        rewards.append(reward)
        *_, metrics = [update(state, batch) for _ in range(updates_per_rollout)]
        if minloop.is_first_rank(state.groups):
            print(f"{step + 1:3d}  reward {reward:.3f}  gradient norm {float(metrics.grad_norm or 0):.3f}")
    minloop.shutdown_distributed()
    return rewards


if __name__ == "__main__":
    main()
