"""mcore's reading of tensors, with the restrictions of `reading`, of files by whatever names."""

import copy
import functools
import io
from collections import defaultdict
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from minloop.checkpoint.reading import READERS, SavedCheckpoint, load_plain, named_errors, read_part


@contextmanager
def read_safely(saved: SavedCheckpoint) -> Generator[None]:
    """While inside, mcore reads this checkpoint with the restrictions above, and takes from `saved` what it holds.

    mcore 0.19 takes no reader as an argument: the two functions with which it opens a checkpoint are replaced.
    """

    def common(checkpoint_dir: Any) -> dict[str, Any]:
        return copy.deepcopy(saved.common)

    def reader(checkpoint_dir: Any, *args: Any, **kwargs: Any) -> FileSystemReader:
        return Reader(saved)

    own: tuple[Any, Any] = serialization.load_common_state_dict, torch_strategy._get_filesystem_reader  # pyright: ignore[reportPrivateUsage]
    serialization.load_common_state_dict, torch_strategy._get_filesystem_reader = common, reader  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        serialization.load_common_state_dict, torch_strategy._get_filesystem_reader = own  # pyright: ignore[reportPrivateUsage]


class Reader(FileSystemReader):
    """PyTorch's reader, with metadata read before, objects as plain data, and the file named in every error."""

    def __init__(self, saved: SavedCheckpoint) -> None:
        super().__init__(saved.path)
        self._saved = saved

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._saved.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        vars(planner)["load_bytes"] = functools.partial(self._load_bytes, planner)
        per_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            per_file[self.storage_data[item.storage_index].relative_path].append(item)
        with ThreadPoolExecutor(READERS) as pool:
            plans = {name: replace(plan, items=items) for name, items in per_file.items()}
            files = [pool.submit(self._read_file, name, part, planner) for name, part in plans.items()]
        for file in files:
            file.result()
        return super().read_data(replace(plan, items=[]), planner)

    def _read_file(self, name: str, plan: LoadPlan, planner: LoadPlanner) -> None:
        as_in_file: list[ReadItem] = []
        with named_errors(self._saved.path / name), torch.no_grad():
            for item in plan.items:
                if not self._saved.stacked.get(item.storage_index.fqn):
                    as_in_file.append(item)
                    continue
                target = planner.resolve_tensor(item).detach()
                part = read_part(self._saved, item.storage_index)
                target.copy_(narrow_tensor_by_index(part, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
            super().read_data(replace(plan, items=as_in_file), planner)

    def _load_bytes(self, planner: Any, item: ReadItem, value: io.BytesIO) -> None:
        name = self.storage_data[item.storage_index].relative_path
        planner.state_dict[item.dest_index.fqn] = load_plain(value, self._saved.path / name)
