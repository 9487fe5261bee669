"""Text to the .bin and .idx files that mcore's datasets read, with a tokenizer that needs no file: bytes."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path
from megatron.core.tokenizers import MegatronTokenizer


class Tokenizer(Protocol):
    """What `write_indexed` needs of an mcore tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int: ...
    def tokenize(self, text: str, /) -> Sequence[int]: ...


def build_byte_tokenizer() -> Any:
    """Return mcore's byte-level tokenizer, 256 ids: UTF-8 bytes, 255 end of document, 254 padding.

    UTF-8 never uses the bytes 254 and 255, so no text is taken for either. (mcore's default padding id is 1, a
    character: `GPTDataset` replaces it by 0 and masks its loss.) `detokenize` drops both and trailing white space.
    """
    # mcore numbers the special tokens from the end of the vocabulary.
    return _build_tokenizer("byte-level", vocab_size=254, special_tokens=["<eod>", "<pad>"], _eos_id=255, _pad_id=254)


def build_null_tokenizer(vocab_size: int) -> Any:
    """Return mcore's tokenizer without a text: `vocab_size` ids, the last of them end of document, no padding id."""
    return _build_tokenizer("null-text", vocab_size=vocab_size)


def _build_tokenizer(library: str, **options: Any) -> Any:
    factory = cast(Any, MegatronTokenizer)  # its from_pretrained lacks @staticmethod, so type checkers refuse the call
    return factory.from_pretrained(metadata_path={"library": library}, **options)


def write_indexed(
    documents: Iterable[str], output_prefix: str | Path, tokenizer: Tokenizer, *, append_eod: bool = True
) -> int:
    """Tokenize `documents` into `output_prefix`.bin and .idx; return the number of tokens written.

    ``build_dataset_config(blend=([str(output_prefix)], None), split="99,1,0", ...)`` reads them. Call it on one rank.
    The files appear under their names only when they are whole, .idx last. Documents without a token are left out. Ids
    are stored as uint16 if the vocabulary allows, else int32.

    Args:
        append_eod: end every document with `tokenizer.eod`.
    Raises:
        ValueError: `output_prefix` is in use, there is nothing to write, or an id is not below tokenizer.vocab_size.
    """
    prefix = str(output_prefix)
    for taken in (Path(get_idx_path(prefix)), Path(prefix)):
        if taken.exists():
            # Sample indices cached under the prefix would go on being used for new data: they are keyed on its path.
            raise ValueError(f"{taken} exists: choose another output_prefix, or delete {prefix}, {prefix}.bin and .idx")
    unfinished = f"{prefix}.{os.getpid()}.unfinished"
    bin_path, idx_path = get_bin_path(unfinished), get_idx_path(unfinished)
    try:
        builder = IndexedDatasetBuilder(bin_path, DType.optimal_dtype(tokenizer.vocab_size))
        with cast("IO[bytes]", builder.data_file):
            for document in documents:
                _add_document(builder, document, tokenizer, append_eod)
        if not builder.sequence_lengths:
            raise ValueError(f"no document with a token for {prefix}: documents is empty, or all of them are")
        builder.finalize(idx_path)
        os.replace(bin_path, get_bin_path(prefix))
        os.replace(idx_path, get_idx_path(prefix))
    finally:
        for path in (bin_path, idx_path):
            Path(path).unlink(missing_ok=True)
    return sum(builder.sequence_lengths)


def _add_document(builder: IndexedDatasetBuilder, document: str, tokenizer: Tokenizer, append_eod: bool) -> None:
    ids = numpy.array(tokenizer.tokenize(document), dtype=numpy.int64)
    if not ids.size:
        return
    if append_eod:
        ids = numpy.append(ids, tokenizer.eod)
    if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
        # Stored in a narrower type it would silently become another id.
        raise ValueError(
            f"the tokenizer gave ids from {ids.min()} to {ids.max()}, but its vocab_size is {tokenizer.vocab_size}"
        )
    builder.add_document(torch.from_numpy(ids), [ids.size])
