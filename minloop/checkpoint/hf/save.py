"""Writing a model of any layout as Hugging Face's weights."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from minloop.checkpoint.agreement import agreed, from_first_rank
from minloop.checkpoint.hf.config import config_entries, read_hf_config
from minloop.checkpoint.hf.files import require_dtype, write_json, write_weights
from minloop.checkpoint.hf.layout import Layout, layouts
from minloop.checkpoint.hf.target import Target, check_model, chunks_of, groups_of, own_parts
from minloop.checkpoint.streaming import FullTensor, Stream
from minloop.data_parallel import gathered_parameters
from minloop.disk import sync
from minloop.groups import as_the_world


def save_hf_weights(
    directory: str | Path,
    target: Target,
    hf_config: str | Path | Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5_000_000_000,
) -> None:
    """Write the weights as safetensors files that transformers reads, whatever the layout here; every rank calls it.

    The first rank writes, and holds one of mcore's full tensors at a time, which the others send it: a model needs not
    fit one host's memory. The directory appears under its name when it is complete. Beside the weights it holds
    config.json; a tokenizer's files and a generation config are yours to copy.

    Args:
        directory: a new or empty one.
        target: a training state, or this rank's chunks.
        hf_config: the config of the model: a directory with its config.json, or the content of one.
        dtype: float32, bfloat16 or float16; by default the weights' own.
        max_shard_size: bytes of a file; a larger tensor has a file to itself.
    Raises:
        ValueError: `hf_config` describes another model, the directory holds something, or the dtype is none of these.
        RuntimeError: it cannot be written. Every rank raises it; what was written remains as "….unfinished".
    """
    chunks, final = chunks_of(target), Path(directory)
    dtype = dtype or get_model_config(chunks[0]).params_dtype
    with as_the_world(groups_of(chunks)):
        with agreed():
            dtype = require_dtype(dtype)
            entries = config_entries(hf_config)
            model = read_hf_config(entries)
            check_model(chunks, model)
        expected = layouts(model)
        unfinished = from_first_rank(lambda: _begin(final))
        with gathered_parameters(chunks), torch.no_grad():
            stream = Stream(own_parts(chunks), groups_of(chunks))
            check_complete(expected, stream.known)
            tensors = (value.cpu() for _, value in their_tensors(expected, stream, [0], dtype))
            shapes = {name: shape for layout in expected.values() for name, shape in layout.shapes.items()}
            failure = None
            try:
                if dist.get_rank() == 0:
                    write_weights(unfinished, shapes, tensors, dtype, max_shard_size)
            except OSError as error:
                failure = error
            for _ in tensors:  # the other ranks' part, or what they still send to one that failed
                pass
        entry = "torch_dtype" if "torch_dtype" in entries else "dtype"  # its name before and since transformers 5
        entries |= {"architectures": [model.name], entry: str(dtype).removeprefix("torch.")}
        from_first_rank(lambda: _finish(unfinished, final, entries, failure))


def _begin(final: Path) -> Path:
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ValueError(f"{final} holds something already: choose another directory, or empty it")
    unfinished = final.with_name(final.name + ".unfinished")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        for left in unfinished.iterdir():  # by a save that was cut short
            left.unlink()
    except OSError as error:
        raise RuntimeError(f"{final} cannot be written: {error}") from error
    return unfinished


def _finish(unfinished: Path, final: Path, entries: dict[str, Any], failure: OSError | None) -> None:
    if failure is not None:
        raise RuntimeError(f"{final} cannot be written: {failure}") from failure
    write_json(unfinished / "config.json", entries)
    sync(unfinished)
    unfinished.replace(final)
    sync(final.parent)


def check_complete(expected: Mapping[str, Layout], found: Mapping[str, FullTensor]) -> None:
    """Raise an error, the same on every rank, unless the model has the full tensors that its architecture has."""
    if unknown := [name for name in found if name not in expected]:
        raise ValueError(
            f"the model has parameters that its Hugging Face architecture has no tensors for: {', '.join(unknown[:5])}"
        )
    if missing := [name for name in expected if name not in found]:
        raise RuntimeError(f"the model lacks {', '.join(missing[:5])}: its sharded_state_dict is wrong")


def their_tensors(
    expected: Mapping[str, Layout], stream: Stream, ranks: Collection[int] | None, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Hugging Face's tensors on the ranks that ask; the others do their part and yield nothing."""
    for name, full in stream.tensors(list(expected), ranks=ranks, dtype=dtype):
        layout = expected[name]
        whole = {theirs: full.new_empty(shape) for theirs, shape in layout.shapes.items()}
        for theirs, block, rows in layout.pieces(tuple(slice(0, side) for side in full.shape)):
            whole[theirs][block] = full[rows]
        yield from whole.items()
