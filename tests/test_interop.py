"""Checkpoints between minloop and Megatron-LM, each loading and going on from the other's.

Megatron-LM is `megatron.training` of megatron-core's wheel, in a process of its own and by its own arguments, parsing
and functions. Of its script pretrain_gpt.py, which no wheel has, the model and the loss are spelled out below.
"""

import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from small import (
    DEVICE,
    GLOBAL_BATCH_SIZE,
    MICRO_BATCH_SIZE,
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    Text,
    failure_of,
    rounding,
    small_state,
    text_loader,
    train,
)
from torch.utils.data import default_collate

import minloop
from minloop.checkpoint import content
from minloop.checkpoint import megatron_lm as megatron_lm_side
from minloop.checkpoint.megatron_bridge import arguments

DROP = 0.0 if DEVICE == "cuda" else 0.1  # on GPUs the two attend, and drop, by kernels of their own
MODEL = f"""--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4
    --hidden-dropout {DROP} --attention-dropout {DROP} --untie-embeddings-and-output-weights"""
RUN = f"""--vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer --mock-data
    --seq-length {SEQUENCE_LENGTH} --max-position-embeddings {SEQUENCE_LENGTH}
    --micro-batch-size {MICRO_BATCH_SIZE} --global-batch-size {GLOBAL_BATCH_SIZE} --train-iters 8 --eval-iters 0
    --lr 5e-3 --min-lr 0.0 --lr-decay-style cosine --lr-warmup-iters 3 --calculate-per-token-loss
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --distributed-backend {"nccl" if DEVICE == "cuda" else "gloo"} --rerun-mode disabled"""
DROPOUT: dict[str, Any] = {"hidden_dropout": DROP, "attention_dropout": DROP}
SCHEDULE = {"train_iters": 8, "lr_warmup_iters": 3}


def megatron_lm(words: str, steps: int, save: str = "", steps_after: int = 0) -> list[tuple[float, float]]:
    """Train with Megatron-LM from what ``--load`` names, save after `steps`; returns (loss, gradient norm) of each."""
    minloop.cpu_backend()
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config
    from megatron.training import arguments, checkpointing, get_args, initialize, training

    mock.patch.object(dataset_utils, "compile_helpers").start()  # runs make, which a wheel has no Makefile for
    queue = multiprocessing.get_context("fork").Manager().Queue()  # that of a process which imports nothing anew
    mock.patch.object(filesystem_async, "get_write_results_queue", return_value=queue).start()
    sys.argv = ["pretrain_gpt.py", *RUN.split(), *words.split()]
    arguments.parse_and_validate_args()
    initialize.initialize_megatron(allow_no_cuda=True)
    args: Any = get_args()
    setup: Any = training.setup_model_and_optimizer
    model, optimizer, scheduler = setup(ModelType.encoder_or_decoder, build_gpt)
    config: Any = get_model_config(model[0])
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    train_step: Any = training.train_step
    data = batches(args.consumed_train_samples)
    history: list[tuple[float, float]] = []
    for _ in range(steps + steps_after):
        losses, _, _, _, _, norm, *_ = train_step(
            forward_step, data, model, optimizer, scheduler, config, get_forward_backward_func(), args.iteration
        )
        history.append((losses["lm loss"].item(), float(norm)))
        args.iteration += 1
        args.consumed_train_samples += GLOBAL_BATCH_SIZE
        if save and len(history) == steps:
            args.save = save
            checkpointing.save_checkpoint(args.iteration, model, optimizer, scheduler, 0)
    torch.distributed.destroy_process_group()
    return history


def build_gpt(pre_process: bool = True, post_process: bool = True, vp_stage: Any = None, **options: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args: Any = get_args()
    return GPTModel(
        core_transformer_config_from_args(args),
        get_gpt_layer_local_spec(),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=options.get("pg_collection"),
        vp_stage=vp_stage,
    )


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    batch = {name: value.cuda() for name, value in next(data).items()}
    mask = batch["loss_mask"].view(-1)

    def loss_func(losses: torch.Tensor) -> Any:
        loss, tokens = (losses.view(-1).float() * mask).sum(), mask.sum()
        return loss, tokens.int(), {"lm loss": torch.stack([loss.detach(), tokens])}

    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), loss_func


def batches(position: int) -> Iterator[dict[str, torch.Tensor]]:
    """The micro batches of `text_loader` from a sample on, for one data parallel rank."""
    text = Text()
    while True:
        yield default_collate([text[position + index] for index in range(MICRO_BATCH_SIZE)])
        position += MICRO_BATCH_SIZE


def ours(load: str, steps: int, save: str = "", steps_after: int = 0, **options: Any) -> list[tuple[float, float]]:
    options = DROPOUT | {"transformer_impl": "local"} | options
    state = small_state(seed=77 if load else 1, scheduler=SCHEDULE, **options)
    loader = text_loader(state)
    if load:
        minloop.load_checkpoint(load, state, loader)
    history = train(state, loader, steps)
    if save:
        minloop.save_checkpoint(save, state, loader)
    history += train(state, loader, steps_after)
    minloop.shutdown_distributed()
    return history


def assert_equal(history: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    """Within rounding; other dropout masks, another data position, learning rate or moment are 2e-3 and more away."""
    torch.testing.assert_close(torch.tensor(history), torch.tensor(expected), rtol=rounding(1e-5), atol=0)


def test_megatron_lm_goes_on_from_ours(tmp_path: Path) -> None:
    """It takes the model's shape from the checkpoint, too."""
    (straight,) = run_ranks(1, ours, "", 3, save=str(tmp_path), steps_after=2)
    words = f"--load {tmp_path} --use-checkpoint-args --exit-on-missing-checkpoint"
    (resumed,) = run_ranks(1, megatron_lm, words, 2)
    assert_equal(resumed, straight[3:])


def test_megatron_lm_goes_on_from_ours_in_another_layout(tmp_path: Path) -> None:
    no_dropout = dict.fromkeys(DROPOUT, 0.0)  # whose masks belong to a layout
    options: dict[str, Any] = {"tensor_model_parallel_size": 2} | no_dropout
    straight, _ = run_ranks(2, ours, "", 3, save=str(tmp_path), steps_after=2, **options)
    (resumed,) = run_ranks(1, megatron_lm, f"--load {tmp_path} --use-checkpoint-args", 2)
    assert_equal(resumed, straight[3:])


SAVED_BY_MEGATRON_LM: dict[str, tuple[str, dict[str, Any]]] = {
    "DDP": ("", {}),
    "DDP, into ZeRO-1": ("", {"ddp": {"use_distributed_optimizer": True}}),
    "ZeRO-1 by buckets": ("--use-distributed-optimizer", {"ddp": {"use_distributed_optimizer": True}}),
    "ZeRO-1": ("--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable", {}),
}


@pytest.mark.parametrize("case", SAVED_BY_MEGATRON_LM)
def test_ours_goes_on_from_megatron_lm(tmp_path: Path, case: str) -> None:
    words, options = SAVED_BY_MEGATRON_LM[case]
    (straight,) = run_ranks(1, megatron_lm, f"{MODEL} {words}", 3, save=str(tmp_path), steps_after=2)
    (resumed,) = run_ranks(1, ours, str(tmp_path), 2, **options)
    assert_equal(resumed, straight[3:])


def load_by_buckets(directory: str, options: dict[str, Any]) -> tuple[str, float]:
    state = small_state(seed=77, transformer_impl="local", **options)
    before = [parameter.detach().clone() for parameter in state.chunks[0].parameters()]
    said = failure_of(minloop.load_checkpoint, directory, state, text_loader(state))
    assert all(map(torch.equal, before, state.chunks[0].parameters()))
    minloop.load_checkpoint(directory, state, weights_only=True)
    loss, _ = train(state, text_loader(state), 1)[0]
    minloop.shutdown_distributed()
    return said, loss


def test_an_optimizer_by_buckets_is_refused_by_name_in_another_layout(tmp_path: Path) -> None:
    run_ranks(1, megatron_lm, f"{MODEL} --use-distributed-optimizer", 3, save=str(tmp_path))
    zero1 = {"ddp": {"use_distributed_optimizer": True}}
    for options in (zero1 | {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}):
        (said, loss), other = run_ranks(2, load_by_buckets, str(tmp_path), options)
        assert said.startswith("ValueError: ")
        assert "stored by buckets (distrib_optim_sharding_type='dp_reshardable'): only a distributed opt" in said
        assert "--dist-ckpt-optim-fully-reshardable, or load with weights_only=True" in said
        assert other == (said, loss)


def as_megatron_bridge_saves(directory: str) -> list[tuple[float, float]]:
    """By its documented structure: no content of minloop's nor arguments; counters and configs lie beside."""
    arguments = mock.patch.object(megatron_lm_side, "arguments", return_value=None)
    with arguments, mock.patch.object(content, "record", return_value={}):
        return ours("", 3, save=directory, steps_after=2)


@pytest.mark.parametrize("content", [{"step": 3}, [1]], ids=["no samples", "a list"])
def test_a_damaged_train_state_of_megatron_bridge_is_named(tmp_path: Path, content: Any) -> None:
    (tmp_path / "run_config.yaml").write_text("model: {num_layers: 2}\n")
    torch.save(content, tmp_path / "train_state.pt")
    with pytest.raises(minloop.CheckpointError, match=r"train_state\.pt is damaged"):
        arguments(tmp_path)


def test_ours_goes_on_from_a_tree_of_megatron_bridge(tmp_path: Path) -> None:
    (tmp_path / "latest_train_state.pt").write_bytes(b"of an earlier iteration")
    (straight,) = run_ranks(1, as_megatron_bridge_saves, str(tmp_path))
    (resumed,) = run_ranks(1, ours, str(tmp_path), 2)
    assert resumed == straight[3:]
    latest = torch.load(tmp_path / "latest_train_state.pt", weights_only=True)
    assert (latest["step"].item(), latest["consumed_train_samples"].item()) == (3, 3 * GLOBAL_BATCH_SIZE)
