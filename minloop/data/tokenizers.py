"""mcore's tokenizers, built from what a directory holds, and the size of the vocabulary that a model gives them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.transformer import TransformerConfig

TIKTOKEN_SPECIAL_TOKENS = 1000  # how many mcore sets aside unless `num_special_tokens` is given


class Tokenizer(Protocol):
    """What writing tokens needs of an mcore tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int: ...
    def tokenize(self, text: str, /) -> Sequence[int]: ...


def build_tokenizer(source: str | Path, *, library: str | None = None, **options: Any) -> Any:
    """Return mcore's tokenizer (`MegatronTokenizer`) for `source`.

    Args:
        source: a Hugging Face directory, its tokenizer.json, a SentencePiece .model, or a .json of tiktoken's ranks, a
            list of {"rank", "token_bytes", "token_str"}; "byte-level" is `build_byte_tokenizer()`. Nothing is fetched.
        library: mcore's name for the kind, "huggingface", "sentencepiece", "tiktoken" and so on, where the path does
            not tell.
        options: of mcore's class for the library, special tokens above all: ``eos_token="<|endoftext|>"`` (Hugging
            Face), ``special_tokens=...``, ``num_special_tokens=...`` (tiktoken, 1000 unless given).
    Raises:
        ValueError: no such file, a file of no known kind, or one that the library refuses.
        RuntimeError: the library's package is missing.
    """
    if source == "byte-level":
        return build_byte_tokenizer(**options)
    path = Path(source)
    if not path.exists():
        raise ValueError(f"{path} does not exist: a tokenizer is a directory or a file on this machine")
    library = library or _library_of(path)
    if library == "huggingface":
        _check_gpt2(path)
    if library == "tiktoken" and "vocab_size" not in options:
        special = options.setdefault("num_special_tokens", TIKTOKEN_SPECIAL_TOKENS)
        options["vocab_size"] = special + len(json.loads(path.read_text()))
    if library == "huggingface" and path.is_file():
        path = path.parent  # transformers reads directories
    try:
        return _build(library, str(path), **options)
    except (NameError, ImportError) as error:  # mcore imports these packages if it can, and uses them regardless
        raise RuntimeError(f"a {library} tokenizer needs a package that is missing ({error})") from error
    except (AssertionError, OSError, TypeError) as error:
        raise ValueError(f"{source} does not load as a {library} tokenizer: {error!r}") from error


def _check_gpt2(path: Path) -> None:
    """Refuse GPT-2's two files where transformers is not told whose they are."""
    names = ("tokenizer.json", "tokenizer_config.json", "config.json")
    if (path / "merges.txt").exists() and not any((path / name).exists() for name in names):
        raise ValueError(
            f"{path} has merges.txt but none of {', '.join(names)}, by which transformers tells the kind: for GPT-2's "
            'vocab.json and merges.txt write {"tokenizer_class": "GPT2Tokenizer"} to tokenizer_config.json there'
        )


def _library_of(path: Path) -> str:
    if path.is_dir() or path.name in ("tokenizer.json", "tokenizer_config.json"):
        return "huggingface"
    if path.suffix == ".model":
        return "sentencepiece"
    if path.suffix == ".json":
        return "tiktoken"
    raise ValueError(
        f"{path} is of no known kind: give a Hugging Face directory or tokenizer.json, a SentencePiece .model, a .json "
        "of tiktoken's ranks, or library=..."
    )


def build_byte_tokenizer() -> Any:
    """Return mcore's byte-level tokenizer, 256 ids: UTF-8 bytes, 255 end of document, 254 padding.

    UTF-8 never uses the bytes 254 and 255, so no text is taken for either. (mcore's default padding id is 1, a
    character: `GPTDataset` replaces it by 0 and masks its loss.) `detokenize` drops both and trailing white space.
    """
    # mcore numbers the special tokens from the end of the vocabulary.
    return _build("byte-level", vocab_size=254, special_tokens=["<eod>", "<pad>"], _eos_id=255, _pad_id=254)


def build_null_tokenizer(vocab_size: int) -> Any:
    """Return mcore's tokenizer without a text: `vocab_size` ids, the last of them end of document, no padding id."""
    return _build("null-text", vocab_size=vocab_size)


def _build(library: str, path: str | None = None, **options: Any) -> Any:
    factory = cast(Any, MegatronTokenizer)  # its from_pretrained lacks @staticmethod, so type checkers refuse the call
    return factory.from_pretrained(path, metadata_path={"library": library}, **options)


def padded_vocab_size(tokenizer: Tokenizer, config: TransformerConfig, make_vocab_size_divisible_by: int = 128) -> int:
    """Return the `vocab_size` to build a model with: the tokenizer's, up to a multiple of divisor × tensor parallel.

    The rows beyond the tokenizer's ids are trained to be improbable, as in Megatron-LM, whose default divisor is 128.

    Raises:
        ValueError: the divisor is not positive.
    """
    return pad_vocab_size(tokenizer.vocab_size, make_vocab_size_divisible_by * config.tensor_model_parallel_size)


def pad_vocab_size(vocab_size: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `vocab_size`."""
    if multiple < 1:
        raise ValueError(f"vocab_size ({vocab_size}) cannot be padded to a multiple of {multiple}: it must be positive")
    return -(-vocab_size // multiple) * multiple


def check_eod(tokenizer: Tokenizer) -> None:
    """Raise ValueError if documents cannot be ended with `tokenizer.eod`."""
    eod: Any = tokenizer.eod  # None of a Hugging Face tokenizer that has none
    if eod is None or not 0 <= eod < tokenizer.vocab_size:
        raise ValueError(f"append_eod=True, and the tokenizer's end of document is {eod}: build it with eos_token=...")


def encode(tokenizer: Tokenizer, text: str) -> numpy.ndarray:
    """Return `tokenizer.tokenize(text)` as integers [n], by a shorter way where there is one.

    Raises:
        ValueError: an id that is negative, or not below `tokenizer.vocab_size`.
    """
    library = getattr(tokenizer, "library", None)
    inner = getattr(tokenizer, "_tokenizer", None)
    fast = getattr(getattr(inner, "tokenizer", None), "backend_tokenizer", None)
    if library == "byte-level":
        ids = numpy.frombuffer(text.encode(), dtype=numpy.uint8)
    elif library == "huggingface" and fast is not None:
        # Without offsets, and without what transformers builds around the ids.
        options = {"add_special_tokens": cast(Any, inner).include_special_tokens}
        ids = numpy.array(fast.encode_batch_fast([text], **options)[0].ids, dtype=numpy.int64)
    else:
        ids = numpy.array(tokenizer.tokenize(text), dtype=numpy.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= tokenizer.vocab_size):
        # Stored in a narrower type it would silently become another id.
        raise ValueError(
            f"the tokenizer gave ids from {ids.min()} to {ids.max()}, but its vocab_size is {tokenizer.vocab_size}"
        )
    return ids
