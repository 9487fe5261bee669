"""What indexed text holds, for a look before a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from megatron.core.datasets.indexed_dataset import IndexedDataset

from minloop.data.indexed import check_indexed
from minloop.messages import without_warnings

_BAR = 40  # characters of the longest bar


@dataclass(frozen=True)
class DatasetDescription:
    """What `describe_dataset` found; as a string, a page of text.

    Attributes:
        prefix: of the .bin and .idx.
        documents: in the index, empty ones included.
        sequences: of these documents; one each unless they were split into sentences.
        tokens: ends of documents included.
        dtype: of the ids on the disk.
        histogram: (shortest, longest, sequences) of every power of two of tokens that there is.
        longest: tokens of the longest sequence.
        sample: the beginning of a sequence, as text if there was a tokenizer, else its ids.
    """

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    histogram: list[tuple[int, int, int]]
    longest: int
    sample: str

    def __str__(self) -> str:
        lines = [
            self.prefix,
            f"{self.documents:,} documents, {self.sequences:,} sequences, {self.tokens:,} tokens ({self.dtype}), "
            f"{self.tokens / self.sequences:,.1f} a sequence, at most {self.longest:,}",
            "",
            f"{'tokens':>23}  sequences",
        ]
        most = max(count for _, _, count in self.histogram)
        for low, high, count in self.histogram:
            lines.append(f"{low:>11,}–{high:<11,}  {'█' * max(1, round(_BAR * count / most))} {count:,}")
        return "\n".join([*lines, "", self.sample])


def describe_dataset(
    prefix: str | Path, tokenizer: Any = None, *, sequence: int = 0, sample_tokens: int = 64
) -> DatasetDescription:
    """Describe `prefix`.bin and .idx; print it to see the lengths as a picture.

    Args:
        tokenizer: decodes the sample.
        sequence: number of the one that the sample is of.
        sample_tokens: how much of it is shown.
    Raises:
        ValueError: the files are missing or damaged, see `check_indexed`, or have no such sequence.
    """
    header = check_indexed(prefix)
    if not 0 <= sequence < header.sequences:
        raise ValueError(f"sequence ({sequence}) must be from 0 to {header.sequences - 1}, as {prefix} holds so many")
    with without_warnings():  # of mcore, that there is no rank, before a process group is made
        indexed: Any = IndexedDataset(str(prefix))
    lengths: numpy.ndarray = indexed.sequence_lengths
    # frexp's exponent is the number of binary digits: exact, and one pass
    digits, counts = numpy.unique(numpy.frexp(lengths)[1], return_counts=True)
    bounds = [(2 ** (int(d) - 1) if d else 0, 2 ** int(d) - 1) for d in digits]
    ids = indexed.get(sequence, 0, min(sample_tokens, int(lengths[sequence]))).tolist()
    return DatasetDescription(
        prefix=str(prefix),
        documents=header.documents,
        sequences=header.sequences,
        tokens=int(lengths.sum(dtype=numpy.int64)),
        dtype=header.dtype.__name__,
        histogram=[(low, high, int(count)) for (low, high), count in zip(bounds, counts, strict=True)],
        longest=int(lengths.max()),
        sample=str(ids) if tokenizer is None else tokenizer.detokenize(ids),
    )
