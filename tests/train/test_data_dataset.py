"""Token directories as samples."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.errors import DataError
from threefold.train.data.dataset import TokenDataset
from threefold.train.data.meta import SplitMeta, TokenMeta, read_meta
from threefold.train.data.source import SampleSource


def write_tokens(directory: Path, num_tokens: int, dtype: str = "uint16") -> Path:
    """Write a directory whose train split counts up: token i is i."""
    directory.mkdir(exist_ok=True)
    np.arange(num_tokens, dtype=np.dtype(dtype).newbyteorder("<")).tofile(directory / "train.bin")
    meta = TokenMeta(70_000, dtype, "bytes", 256, {"train": SplitMeta(num_tokens, "train.bin")}, fingerprint="f")
    (directory / "meta.json").write_text(meta.to_json())
    return directory


def meta_text(**changes: object) -> str:
    splits = {"train": {"tokens": 1, "file": "train.bin"}}
    fields = {"vocab_size": 9, "dtype": "uint16", "tokenizer": "bytes", "end_of_text": 8, "splits": splits, "format": 1}
    return json.dumps({**fields, **changes})


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_samples_tile_the_tokens_and_labels_are_shifted_by_one(tmp_path: Path, dtype: str) -> None:
    dataset = TokenDataset.open(write_tokens(tmp_path, 102, dtype), "train", 10, seed=0, shuffle=False)
    assert (dataset.num_samples, dataset.vocab_size, dataset.sequence_length) == (10, 70_000, 10)
    tokens, labels = dataset.batch([0, 9])
    assert tokens.dtype == labels.dtype == np.int64
    assert tokens.tolist() == [list(range(10)), list(range(90, 100))]
    assert np.array_equal(labels, tokens + 1)


def test_an_epoch_trains_on_every_label_once_and_the_next_one_in_another_order(tmp_path: Path) -> None:
    dataset: SampleSource = TokenDataset.open(write_tokens(tmp_path, 201), "train", 10, seed=7)
    first, second = dataset.batch(range(20))[1], dataset.batch(range(20, 40))[1]
    assert sorted(first.ravel()) == sorted(second.ravel()) == list(range(1, 201))
    assert not np.array_equal(first, second)


@given(num_tokens=st.integers(2, 60), sequence_length=st.integers(1, 59))
def test_num_samples_is_what_fits(num_tokens: int, sequence_length: int) -> None:
    dataset = TokenDataset(np.arange(num_tokens, dtype=np.uint16), 100, sequence_length, seed=0)
    if dataset.num_samples:
        tokens, labels = dataset.batch(range(dataset.num_samples))
        assert labels.max() < num_tokens
        assert np.array_equal(labels, tokens + 1)
    assert dataset.num_samples * sequence_length < num_tokens <= (dataset.num_samples + 1) * sequence_length + 1


def test_first_and_last_pipeline_stage_get_the_same_batch_in_two_epochs(tmp_path: Path) -> None:
    """Stages that advance an iterator each can pair one batch's inputs with another's labels, or stop mid-run."""
    directory = write_tokens(tmp_path, 65)
    first = TokenDataset.open(directory, "train", 8, seed=3)
    last = TokenDataset.open(directory, "train", 8, seed=3)
    last.batch(range(5))  # a reader that has read more is not ahead
    for number in range(2 * first.num_samples):
        assert np.array_equal(first.batch([number])[0][:, 1:], last.batch([number])[1][:, :-1])


def test_tokens_beyond_one_sample_of_the_split_are_refused(tmp_path: Path) -> None:
    directory = write_tokens(tmp_path, 100)
    assert TokenDataset.open(directory, "train", 99, seed=0).num_samples == 1
    with pytest.raises(DataError, match=r"data\.sequence_length: 100 .* 100 tokens(.|\n)*at most 99"):
        TokenDataset.open(directory, "train", 100, seed=0)
    with pytest.raises(DataError, match=r"data\.sequence_length: 0 "):
        TokenDataset.open(directory, "train", 0, seed=0)


def test_a_short_validation_split_names_its_own_remedy(tmp_path: Path) -> None:
    directory = write_tokens(tmp_path, 5)
    meta = read_meta(directory)
    meta = dataclasses.replace(meta, splits={**meta.splits, "validation": SplitMeta(1, "validation.bin")})
    (directory / "meta.json").write_text(meta.to_json())
    with pytest.raises(DataError, match="--validation-fraction"):
        TokenDataset.open(directory, "validation", 4, seed=0)


def test_a_split_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no split 'validation'; it has train"):
        TokenDataset.open(write_tokens(tmp_path, 100), "validation", 8, seed=0)


def test_a_directory_without_meta_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="threefold data build"):
        TokenDataset.open(tmp_path, "train", 8, seed=0)


def test_a_truncated_token_file_is_refused(tmp_path: Path) -> None:
    directory = write_tokens(tmp_path, 100)
    (directory / "train.bin").write_bytes(bytes(198))
    with pytest.raises(DataError, match=r"has 198 bytes; its meta.json says 200 bytes"):
        TokenDataset.open(directory, "train", 8, seed=0)
    (directory / "train.bin").unlink()
    with pytest.raises(DataError, match="is missing"):
        TokenDataset.open(directory, "train", 8, seed=0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "format"),
        ('{"format": 2}', "format 2; this version of threefold reads format 1"),
        ('{"format": 1, "dtype": "int8"}', "dtype 'int8'"),
        ('{"format": 1, "dtype": "uint16", "splits": {"train": {"tokens": 1}}}', "file"),
        ('{"format": 1, "dtype": "uint16", "splits": {}}', "vocab_size"),
        (meta_text(vocab_size="many"), "vocab_size is 'many'"),
        (meta_text(vocab_size=0), "vocab_size 0"),
        (meta_text(splits={"train": {"tokens": 2.5, "file": "train.bin"}}), "splits.train.tokens is 2.5"),
        (meta_text(splits={"train": {"tokens": -1, "file": "train.bin"}}), "-1 tokens"),
        (meta_text(splits={"train": {"tokens": 1, "file": "../train.bin"}}), "allowed: a file beside it"),
    ],
)
def test_a_damaged_meta_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(DataError, match=r"(?s)is damaged.*--overwrite") as caught:
        read_meta(tmp_path)
    assert said in str(caught.value)


def test_a_token_that_the_vocabulary_does_not_have_is_named(tmp_path: Path) -> None:
    dataset = dataclasses.replace(
        TokenDataset.open(write_tokens(tmp_path, 100), "train", 10, seed=0, shuffle=False), vocab_size=50
    )
    dataset.batch([3])
    with pytest.raises(DataError, match=r"token id 60 stands in samples \[5\].* has 50 ids"):
        dataset.batch([5])
