"""A memory-mapped token file, cut into samples of equal length.

Shape letters: B samples of a batch, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from threefold.errors import DataError
from threefold.train.data.meta import DTYPES, SplitMeta, TokenMeta, read_meta
from threefold.train.data.order import sample_indices
from threefold.train.data.source import IGNORED, SampleNumbers, SampleSource

__all__ = ["IGNORED", "SampleSource", "TokenDataset"]


@dataclass(frozen=True)
class TokenDataset:
    """One split of a token directory, as samples of ``sequence_length`` tokens; open it with ``TokenDataset.open``.

    The sample with index i is ``tokens[i*S : i*S + S+1]``: S inputs, and the same shifted by one as labels. Neighbours
    share one token, so every token but the first is a label once an epoch. Documents are packed: a sample may span an
    end of text, which the model sees as an ordinary token.
    """

    tokens: NDArray[np.unsignedinteger]
    vocab_size: int
    sequence_length: int
    seed: int
    shuffle: bool = True
    fingerprint: str = ""

    @classmethod
    def open(cls, directory: str | Path, split: str, sequence_length: int, seed: int, shuffle: bool = True) -> Self:
        """Map ``split`` of a directory that ``threefold data build`` made; nothing is read until a batch is asked for.

        Raises DataError when the directory, the split or its file is missing, damaged, or too short for one sample.
        """
        directory = Path(directory)
        meta = read_meta(directory)
        split_meta = _find_split(directory, meta, split)
        _check_length(directory, split, split_meta.tokens, sequence_length)
        tokens = map_tokens(directory / split_meta.file, split_meta.tokens, meta.dtype)
        return cls(tokens, meta.vocab_size, sequence_length, seed, shuffle, meta.fingerprint)

    @property
    def num_samples(self) -> int:
        """Samples in one epoch; the tokens that do not fill a last sample are left out."""
        return (len(self.tokens) - 1) // self.sequence_length

    def batch(self, sample_numbers: SampleNumbers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (tokens_BS, labels_BS) as int64 for these global sample numbers; numbers past the epoch go on.

        Raises DataError for a token id that the vocabulary does not have.
        """
        indices_B = sample_indices(sample_numbers, self.num_samples, self.seed, self.shuffle)
        window = np.arange(self.sequence_length + 1)
        tokens = self.tokens[indices_B[:, None] * self.sequence_length + window].astype(np.int64)
        if tokens.size and tokens.max() >= self.vocab_size:
            raise DataError(
                f"data: token id {tokens.max()} stands in samples {list(sample_numbers)[:3]}, but the vocabulary in "
                f"its meta.json has {self.vocab_size} ids\n    fix: build it again with `threefold data build`"
            )
        return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def _find_split(directory: Path, meta: TokenMeta, split: str) -> SplitMeta:
    if split in meta.splits:
        return meta.splits[split]
    raise DataError(
        f"data: {str(directory)!r} has no split {split!r}; it has {', '.join(sorted(meta.splits))}\n"
        "    fix: name one of these, or build the directory again"
    )


def _check_length(directory: Path, split: str, num_tokens: int, sequence_length: int) -> None:
    if sequence_length < 1:
        raise DataError(
            f"data.sequence_length: {sequence_length} is not a length; allowed: at least 1\n    fix: use e.g. 1024"
        )
    if num_tokens > sequence_length:
        return
    remedy = f"set data.sequence_length to at most {num_tokens - 1}, or add text" if num_tokens > 1 else "add text"
    if split == "validation":
        remedy += ", or build again with a larger --validation-fraction"
    raise DataError(
        f"data.sequence_length: {sequence_length} is too long: the {split} split of {str(directory)!r} has "
        f"{num_tokens} tokens, and one sample takes sequence_length + 1 = {sequence_length + 1}\n    fix: {remedy}"
    )


def map_tokens(path: Path, num_tokens: int, dtype: str) -> NDArray[np.unsignedinteger]:
    """Map a token file into memory, read-only; raise DataError when its size isn't what ``meta.json`` says."""
    expected_bytes = num_tokens * DTYPES[dtype]
    found_bytes = path.stat().st_size if path.is_file() else None
    if found_bytes != expected_bytes:
        state = "is missing" if found_bytes is None else f"has {found_bytes} bytes"
        raise DataError(
            f"data: {str(path)!r} {state}; its meta.json says {expected_bytes} bytes ({num_tokens} tokens of {dtype})\n"
            "    fix: copy the file again, or build the directory again with `threefold data build ... --overwrite`"
        )
    if num_tokens == 0:  # which the operating system refuses to map
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r", shape=(num_tokens,))
