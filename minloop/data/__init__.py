"""Data: datasets (mock, indexed text), the resumable loader, and what a step does to a batch."""

from minloop.data.datasets import (
    build_dataset_config,
    build_gpt_datasets,
    build_mock_dataset,
    build_mock_loader,
    check_vocab_size,
)
from minloop.data.loader import (
    Batch,
    Loader,
    build_loader,
    check_token_ids,
    num_microbatches,
    slice_batch_for_context_parallel,
    to_device,
)
from minloop.data.text import build_byte_tokenizer, write_indexed

__all__ = [
    "Batch",
    "Loader",
    "build_byte_tokenizer",
    "build_dataset_config",
    "build_gpt_datasets",
    "build_loader",
    "build_mock_dataset",
    "build_mock_loader",
    "check_token_ids",
    "check_vocab_size",
    "num_microbatches",
    "slice_batch_for_context_parallel",
    "to_device",
    "write_indexed",
]
