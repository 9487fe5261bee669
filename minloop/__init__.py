"""minloop: a thin training-loop library over NVIDIA megatron-core.

Functions to compose in plain Python:
configs → groups → model chunks → DDP → optimizer → `TrainState` → step → checkpoint.
"""

from minloop.cpu import cpu_backend, light_mcore_import

with light_mcore_import():
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    from minloop.checkpoint import (
        CheckpointDescription,
        CheckpointError,
        PendingSave,
        describe_checkpoint,
        export_weights,
        latest_checkpoint,
        load_checkpoint,
        load_weights,
        read_run_config,
        save_checkpoint,
        shared_directory,
        start_save,
        verify_checkpoint,
        write_run_config,
    )
    from minloop.checkpoint.hf import hf_config_fields, load_hf_weights, save_hf_weights
    from minloop.config import build_config, build_ddp_config, build_optimizer_config, replace_layout
    from minloop.data import (
        Batch,
        DatasetDescription,
        Loader,
        TokenizeReport,
        build_byte_tokenizer,
        build_dataset_config,
        build_gpt_datasets,
        build_loader,
        build_mock_loader,
        build_stream_loader,
        build_tokenizer,
        describe_dataset,
        mask_prompt,
        num_microbatches,
        pack_samples,
        padded_vocab_size,
        prefetch_to_device,
        ramped_batch_size,
        tokenize_to_indexed,
        write_indexed,
    )
    from minloop.data_parallel import gathered_parameters, wrap_ddp
    from minloop.distributed import init_distributed, is_first_rank, seed_ranks, shutdown_distributed
    from minloop.embedding import (
        begin_step,
        finish_step,
        forward_backward,
        load_full_parameters,
        lora,
        merge_lora,
        named_full_parameters,
        offload,
        onload,
        token_logprobs,
    )
    from minloop.evaluation import Evaluation, evaluate
    from minloop.faults import Fault, FaultError, FaultGuard
    from minloop.flops import flops_per_token, peak_tflops
    from minloop.fully_sharded import wrap_fsdp
    from minloop.garbage import manual_gc
    from minloop.groups import build_groups
    from minloop.hybrid import build_hybrid_model, hybrid_provider
    from minloop.inference import forward_logits
    from minloop.injection import inject_fault
    from minloop.launch import fault_environment
    from minloop.logs import Sink, console_sink, jsonl_sink, progress_bar, tensorboard_sink, wandb_sink
    from minloop.losses import token_loss
    from minloop.lr_schedule import build_scheduler
    from minloop.memory import MemoryEstimate, estimate_memory
    from minloop.metrics import Record, evaluation_record, log_line, record_line, step_record
    from minloop.model import ModelProvider, build_gpt_model, build_model, gpt_provider
    from minloop.moe import expert_load
    from minloop.optimizer import build_optimizer
    from minloop.packed import packed_forward_step
    from minloop.placement import place_batch
    from minloop.profiling import profiled_steps
    from minloop.sameness import (
        Difference,
        LayoutRecord,
        check_replicas,
        compare_layouts,
        compare_records,
        first_difference,
        full_gradients,
        full_weights,
        record_layout,
    )
    from minloop.signals import StopRequest, stop_signals
    from minloop.state import TrainState
    from minloop.step import StepMetrics, eval_step, gpt_forward_step, train_step
    from minloop.stragglers import StepTimes, forward_times
    from minloop.timing import StepTimer
    from minloop.tp_overlap import init_tp_overlap

__all__ = [
    "Batch",
    "CheckpointDescription",
    "CheckpointError",
    "DatasetDescription",
    "Difference",
    "DistributedDataParallelConfig",
    "Evaluation",
    "Fault",
    "FaultError",
    "FaultGuard",
    "GPTDatasetConfig",
    "LayoutRecord",
    "Loader",
    "MLATransformerConfig",
    "MemoryEstimate",
    "ModelProvider",
    "OptimizerConfig",
    "PendingSave",
    "ProcessGroupCollection",
    "Record",
    "Sink",
    "StepMetrics",
    "StepTimer",
    "StepTimes",
    "StopRequest",
    "TokenizeReport",
    "TrainState",
    "TransformerConfig",
    "begin_step",
    "build_byte_tokenizer",
    "build_config",
    "build_dataset_config",
    "build_ddp_config",
    "build_gpt_datasets",
    "build_gpt_model",
    "build_groups",
    "build_hybrid_model",
    "build_loader",
    "build_mock_loader",
    "build_model",
    "build_optimizer",
    "build_optimizer_config",
    "build_scheduler",
    "build_stream_loader",
    "build_tokenizer",
    "check_replicas",
    "compare_layouts",
    "compare_records",
    "console_sink",
    "cpu_backend",
    "describe_checkpoint",
    "describe_dataset",
    "estimate_memory",
    "eval_step",
    "evaluate",
    "evaluation_record",
    "expert_load",
    "export_weights",
    "fault_environment",
    "finish_step",
    "first_difference",
    "flops_per_token",
    "forward_backward",
    "forward_logits",
    "forward_times",
    "full_gradients",
    "full_weights",
    "gathered_parameters",
    "gpt_forward_step",
    "gpt_provider",
    "hf_config_fields",
    "hybrid_provider",
    "init_distributed",
    "init_tp_overlap",
    "inject_fault",
    "is_first_rank",
    "jsonl_sink",
    "latest_checkpoint",
    "load_checkpoint",
    "load_full_parameters",
    "load_hf_weights",
    "load_weights",
    "log_line",
    "lora",
    "manual_gc",
    "mask_prompt",
    "merge_lora",
    "named_full_parameters",
    "num_microbatches",
    "offload",
    "onload",
    "pack_samples",
    "packed_forward_step",
    "padded_vocab_size",
    "peak_tflops",
    "place_batch",
    "prefetch_to_device",
    "profiled_steps",
    "progress_bar",
    "ramped_batch_size",
    "read_run_config",
    "record_layout",
    "record_line",
    "replace_layout",
    "save_checkpoint",
    "save_hf_weights",
    "seed_ranks",
    "shared_directory",
    "shutdown_distributed",
    "start_save",
    "step_record",
    "stop_signals",
    "tensorboard_sink",
    "token_logprobs",
    "token_loss",
    "tokenize_to_indexed",
    "train_step",
    "verify_checkpoint",
    "wandb_sink",
    "wrap_ddp",
    "wrap_fsdp",
    "write_indexed",
    "write_run_config",
]
