"""Tokenizers of which only some files are there."""

import json
from pathlib import Path

import pytest

from minloop.data import build_tokenizer


def test_gpt2s_two_files_need_a_third(tmp_path: Path) -> None:
    characters = [*"abcdefgh", "ab", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(characters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(
        ValueError, match=r"has merges\.txt but none of tokenizer\.json, tokenizer_config\.json, config\.json"
    ):
        build_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = build_tokenizer(tmp_path)
    assert tokenizer.tokenize("abc") == [8, 2]
    assert tokenizer.eod == 9
