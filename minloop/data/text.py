"""Documents that a program has at hand to the .bin and .idx files that mcore's datasets read."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, cast

import numpy
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

from minloop.data.indexed import check_untaken
from minloop.data.tokenizers import Tokenizer, check_eod, encode


def write_indexed(
    documents: Iterable[str], output_prefix: str | Path, tokenizer: Tokenizer, *, append_eod: bool = True
) -> int:
    """Tokenize `documents` into `output_prefix`.bin and .idx; return the number of tokens written.

    ``build_dataset_config(blend=([str(output_prefix)], None), split="99,1,0", ...)`` reads them. Call it on one rank.
    The files appear under their names only when they are whole, .idx last. Documents without a token are left out. Ids
    are stored as uint16 if the vocabulary allows, else int32. For files of text see `tokenize_to_indexed`.

    Args:
        append_eod: end every document with `tokenizer.eod`.
    Raises:
        ValueError: `output_prefix` is in use, there is nothing to write, documents is a string, or an id, the end of
            document's included, is not below tokenizer.vocab_size.
    """
    prefix = str(output_prefix)
    check_untaken(prefix)
    if isinstance(documents, str):
        raise ValueError("documents is one string, and each of its characters would be a document: give a list of them")
    if append_eod:
        check_eod(tokenizer)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    unfinished = f"{prefix}.{os.getpid()}.unfinished"
    bin_path, idx_path = get_bin_path(unfinished), get_idx_path(unfinished)
    try:
        builder = IndexedDatasetBuilder(bin_path, DType.optimal_dtype(tokenizer.vocab_size))
        with cast("IO[bytes]", builder.data_file):
            for document in documents:
                ids = encode(tokenizer, document).astype(numpy.int64)
                if ids.size:
                    ids = numpy.append(ids, tokenizer.eod) if append_eod else ids
                    builder.add_document(torch.from_numpy(ids), [ids.size])
        if not builder.sequence_lengths:
            raise ValueError(f"no document with a token for {prefix}: documents is empty, or all of them are")
        builder.finalize(idx_path)
        os.replace(bin_path, get_bin_path(prefix))
        os.replace(idx_path, get_idx_path(prefix))
    finally:
        for path in (bin_path, idx_path):
            Path(path).unlink(missing_ok=True)
    return sum(builder.sequence_lengths)
