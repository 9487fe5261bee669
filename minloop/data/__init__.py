"""Data: datasets (mock, indexed text), the resumable loader, and what a step does to a batch."""

from minloop.data.batch import (
    Batch,
    CheckedBatch,
    check_token_ids,
    slice_batch_for_context_parallel,
    to_device,
)
from minloop.data.datasets import (
    build_dataset_config,
    build_gpt_datasets,
    build_mock_dataset,
    build_mock_loader,
    check_vocab_size,
)
from minloop.data.describe import DatasetDescription, describe_dataset
from minloop.data.indexed import check_indexed
from minloop.data.loader import Loader, build_loader, num_microbatches, ramped_batch_size
from minloop.data.packing import mask_prompt, pack_samples
from minloop.data.prefetch import Prefetcher, prefetch_to_device
from minloop.data.stream import StreamLoader, build_stream_loader
from minloop.data.text import write_indexed
from minloop.data.tokenize import TokenizeReport, tokenize_to_indexed
from minloop.data.tokenizers import build_byte_tokenizer, build_tokenizer, padded_vocab_size

__all__ = [
    "Batch",
    "CheckedBatch",
    "DatasetDescription",
    "Loader",
    "Prefetcher",
    "StreamLoader",
    "TokenizeReport",
    "build_byte_tokenizer",
    "build_dataset_config",
    "build_gpt_datasets",
    "build_loader",
    "build_mock_dataset",
    "build_mock_loader",
    "build_stream_loader",
    "build_tokenizer",
    "check_indexed",
    "check_token_ids",
    "check_vocab_size",
    "describe_dataset",
    "mask_prompt",
    "num_microbatches",
    "pack_samples",
    "padded_vocab_size",
    "prefetch_to_device",
    "ramped_batch_size",
    "slice_batch_for_context_parallel",
    "to_device",
    "tokenize_to_indexed",
    "write_indexed",
]
