"""mcore's datasets: a config with the fields set that training wants, mock data, and indexed text with its blends."""

import contextlib
import copy
import importlib
import math
from collections.abc import Generator, Iterator, Sequence
from typing import Any, cast
from unittest import mock

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder, TopLevelDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.datasets.utils import Split
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.distributed_c10d import get_node_local_rank
from torch.utils.data import Subset

from minloop.data.indexed import bytes_before, check_indexed
from minloop.data.loader import Loader, build_loader
from minloop.data.object_storage import check_object_storage
from minloop.data.tokenizers import Tokenizer, build_null_tokenizer
from minloop.messages import without_log_lines


def build_dataset_config(
    *,
    sequence_length: int,
    vocab_size: int | None = None,
    tokenizer: Any = None,
    random_seed: int = 1234,
    **fields: Any,
) -> GPTDatasetConfig:
    """Return mcore's `GPTDatasetConfig`; `fields` are its other fields and win over what is chosen here.

    Chosen: no attention mask in the batch (the attention kernels mask causally by themselves), attention and positions
    running on across documents, loss at the end-of-document token too. Without `blend` or `blend_per_split` it is a
    config for mock data.

    Args:
        sequence_length: tokens per sample.
        vocab_size: instead of a tokenizer, for data that is ids only: mock, or tokenized elsewhere. The end-of-document
            id is then vocab_size - 1.
        tokenizer: an mcore tokenizer, such as `build_byte_tokenizer()`.
        random_seed: decides the order in which `GPTDataset` reads documents and samples.
    Raises:
        ValueError: neither or both of vocab_size and tokenizer, `reset_attention_mask` without a mask to reset, or
            fields that mcore refuses.
    """
    if (vocab_size is None) == (tokenizer is None):
        raise ValueError(f"give one of vocab_size ({vocab_size}) and tokenizer ({tokenizer})")
    if vocab_size is not None:
        tokenizer = build_null_tokenizer(vocab_size)
    for blend in (fields.get("blend"), *(fields.get("blend_per_split") or ())):
        if blend is not None and (isinstance(blend, str) or len(blend) != 2 or isinstance(blend[0], str)):
            raise ValueError(f"blend {blend!r} is not ([prefix, ...], None), or ([prefix, ...], [weight, ...])")
    chosen: dict[str, Any] = {
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    try:
        config = GPTDatasetConfig(
            random_seed=random_seed, sequence_length=sequence_length, tokenizer=tokenizer, **{**chosen, **fields}
        )
    except AssertionError as error:
        raise ValueError(f"{error or 'split must be up to three numbers that are not negative'}: {fields}") from error
    if config.reset_attention_mask and not config.create_attention_mask:
        raise ValueError(
            "reset_attention_mask=True has no effect with create_attention_mask=False: set create_attention_mask=True, "
            "or leave reset_attention_mask out"
        )
    return config


def check_vocab_size(dataset_config: GPTDatasetConfig, vocab_size: int) -> None:
    """Raise ValueError if the tokenizer has ids which a model with `vocab_size` does not."""
    tokenizer_vocab_size = cast(Tokenizer, dataset_config.tokenizer).vocab_size
    if tokenizer_vocab_size > vocab_size:
        raise ValueError(
            f"vocab_size ({vocab_size}) is smaller than the tokenizer's ({tokenizer_vocab_size}): build the model with "
            f"vocab_size={tokenizer_vocab_size} or more"
        )


def build_mock_dataset(
    dataset_config: GPTDatasetConfig, num_samples: int | None = None
) -> MockGPTDataset | Subset[dict[str, torch.Tensor]]:
    """Return mcore's mock data, documents of ids that count upward: easy to learn, and the same on every rank.

    It is built in memory in well under a second, without a file or a collective.

    Args:
        num_samples: exactly so many samples, for instance few of them to learn by heart; None for one epoch.
    Raises:
        ValueError: the config names files in `blend` or `blend_per_split`.
        RuntimeError: mcore's compiled helper is missing.
    """
    if not dataset_config.mock:
        raise ValueError("blend or blend_per_split is set: leave both out for mock data, or use build_gpt_datasets")
    _import_compiled_helper()
    # Not through mcore's builder: it lets the world's ranks wait for each other, to share files that mock data has not.
    config = copy.copy(dataset_config)
    config.path_to_cache = None
    documents = MockGPTDataset.build_low_level_dataset(None, config)
    indices = numpy.arange(len(documents), dtype=numpy.int32)
    with without_log_lines("megatron.core.datasets.gpt_dataset", "because path_to_cache is None"):
        # None is one epoch, though mcore annotates an int.
        dataset = MockGPTDataset(documents, None, indices, cast(int, num_samples), Split.train, config)
    return dataset if num_samples is None else Subset(dataset, range(num_samples))


def build_mock_loader(
    dataset_config: GPTDatasetConfig,
    groups: ProcessGroupCollection,
    *,
    micro_batch_size: int,
    num_samples: int | None = None,
    vocab_size: int | None = None,
    **loader_options: Any,
) -> Loader:
    """`build_loader` over `build_mock_dataset`; `loader_options` are the other arguments of `build_loader`.

    Raises:
        ValueError: as these two, or the model's `vocab_size`, if given, is smaller than the tokenizer's.
        RuntimeError: mcore's compiled helper is missing.
    """
    if vocab_size is not None:
        check_vocab_size(dataset_config, vocab_size)
    dataset = build_mock_dataset(dataset_config, num_samples)
    return build_loader(dataset, groups, micro_batch_size=micro_batch_size, **loader_options)


def build_gpt_datasets(
    dataset_config: GPTDatasetConfig,
    num_samples: tuple[int | None, int | None, int | None],
    *,
    vocab_size: int | None = None,
    cache_per_node: bool = False,
) -> tuple[TopLevelDataset | None, TopLevelDataset | None, TopLevelDataset | None]:
    """Return the train, valid and test datasets of indexed text (.bin and .idx files), None for a split of part 0.

    With several ranks, call it on all of them: mcore lets global rank 0 write the sample indices to
    `dataset_config.path_to_cache` (default: a directory `<prefix>/cache`), then all ranks of the default group meet in
    a barrier, then the others read. So that directory must be one that all ranks see, or `cache_per_node` be set. The
    cache is keyed on the config and the path of the files, not on their content: use a new prefix for new data.

    Args:
        num_samples: at least so many samples of each split, by repeating its documents; None for one epoch.
        vocab_size: the model's, if it is to be compared with the tokenizer's.
        cache_per_node: `path_to_cache` is a disk of each node's own: the first rank of every node writes it.
    Raises:
        ValueError: no `blend` in the config, files that are missing or damaged (see `check_indexed`), a split without
            documents, weights that are not positive or without a size, `vocab_size` smaller than the tokenizer's, or
            object storage (s3://, msc://, whose files are not checked) without directories to cache in.
        RuntimeError: mcore's compiled helper is missing.
    """
    if dataset_config.mock:
        raise ValueError("neither blend nor blend_per_split is set: name the files, or use build_mock_dataset")
    if vocab_size is not None:
        check_vocab_size(dataset_config, vocab_size)
    _import_compiled_helper()
    _check_blends(dataset_config, num_samples)
    sizes = cast("list[int]", list(num_samples))
    distributed = torch.distributed.is_initialized()
    with _first_of_node_builds() if cache_per_node and distributed else contextlib.nullcontext():
        datasets = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, dataset_config).build()
    for dataset in _gpt_datasets(datasets):
        _cache_masks(dataset)
    train, valid, test = datasets
    return train, valid, test


def _gpt_datasets(datasets: Any) -> Iterator[GPTDataset]:
    """Every `GPTDataset` in the builder's result: one per split, or a blend, or a list (multiple_validation_sets)."""
    for dataset in datasets:
        if isinstance(dataset, GPTDataset):
            yield dataset
        elif dataset is not None:
            yield from _gpt_datasets(dataset if isinstance(dataset, list) else dataset.datasets)


def _cache_masks(dataset: GPTDataset) -> None:
    """Give `dataset` the masks that it would build for its first sample and then use for all.

    Its own cached loss mask is the first sample's, which it zeroes in place where that sample is padded: with
    drop_last_partial_validation_sequence=False every later sample could lose the same tokens.
    """
    if dataset.masks_and_position_ids_are_cacheable:
        config = cast(GPTDatasetConfig, dataset.config)
        length = config.sequence_length
        if config.create_attention_mask:
            dataset.cached_attention_mask = torch.ones(1, length, length, dtype=torch.bool).triu(1)
        dataset.cached_loss_mask, dataset.cached_position_ids = torch.ones(length), torch.arange(length)
        dataset.masks_and_position_ids_are_cached = True


def _check_blends(config: GPTDatasetConfig, num_samples: Sequence[int | None]) -> None:
    """Refuse, on every rank and before any waits for another, what mcore would refuse cryptically or not at all."""
    blends = config.blend_per_split if config.blend is None else [config.blend] * len(num_samples)
    for split, blend, size in zip(Split, blends or (), num_samples, strict=True):
        prefixes, weights = blend or ([], None)
        bounds = (config.split_matrix or [(0.0, 1.0)] * len(Split))[split.value]
        if weights is not None:
            if not all(0 < weight < math.inf for weight in weights):
                raise ValueError(f"the weights of a blend must be positive: {weights} of {prefixes}")
            if size is None:
                raise ValueError(
                    f"num_samples for {split.name} is None, but its blend has weights ({weights}): say how many, or "
                    "leave the weights out (None), which takes one epoch of each"
                )
        for prefix in prefixes:
            if is_object_storage_path(prefix):
                check_object_storage(config, prefix)
                continue
            header = check_indexed(prefix)
            first, last = (round(bound * header.sequences) for bound in bounds or (0.0, 0.0))
            if bounds and bytes_before(prefix, header, first) == bytes_before(prefix, header, last):
                # mcore would count its epochs for ever.
                raise ValueError(
                    f"split={config.split!r} leaves no document with a token for {split.name}, as {prefix} has "
                    f"{header.sequences}: give that part 0, or a larger share, or write more documents"
                )


@contextlib.contextmanager
def _first_of_node_builds() -> Generator[None]:
    """While inside, mcore takes the rank in the node for the rank, so the first of every node writes the cache."""
    get_rank, local_rank = torch.distributed.get_rank, get_node_local_rank()

    def rank(group: Any = None) -> int:
        return local_rank if group is None else get_rank(group)

    with mock.patch.object(torch.distributed, "get_rank", rank):
        yield


def _import_compiled_helper() -> None:
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError as error:
        raise RuntimeError(
            f"megatron-core's compiled dataset helper does not import ({error}): install the megatron-core wheel made "
            "for this Python version and machine; a source tree needs it built (make -C megatron/core/datasets)"
        ) from error
