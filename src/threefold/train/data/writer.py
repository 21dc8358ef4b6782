"""Writes token files: each document's tokens and an end of text, into the split that the document belongs to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from threefold.train.data.documents import Piece
from threefold.train.data.meta import SPLITS
from threefold.train.data.order import hash_numbers
from threefold.train.data.tokenizer import TextTokenizer

_SPLIT_STREAM = 201  # names the random stream that splits documents


class TokenWriter:
    """Appends the documents' tokens to the files of their splits.

    Which split is decided by a hash of the seed and the document's number. Document 0 is always for training, so that
    there is something to train on.
    """

    def __init__(self, directory: Path, dtype: str, validation_fraction: float, seed: int) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._fraction = validation_fraction
        self._seed = seed
        names = SPLITS if validation_fraction else SPLITS[:1]
        self._files: dict[str, BinaryIO] = {name: (directory / f"{name}.bin").open("w+b") for name in names}
        self.documents: dict[str, int] = dict.fromkeys(names, 0)
        self._last_train_start = 0  # bytes
        self._document_start = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that are written."""
        return tuple(self._files)

    def write(self, pieces: list[Piece], tokenizer: TextTokenizer) -> None:
        """Encode the pieces together and append each to its document's split."""
        encoded = tokenizer.encode_batch([piece.text for piece in pieces])
        chosen = self._choose(np.array([piece.document for piece in pieces]))
        for piece, tokens, is_validation in zip(pieces, encoded, chosen, strict=True):
            split = "validation" if is_validation else "train"
            file = self._files[split]
            file.write(tokens.astype(self.dtype).tobytes())
            if piece.ends_document:
                file.write(np.array([tokenizer.end_of_text], self.dtype).tobytes())
                self._end_document(split)

    def ensure_validation(self) -> None:
        """Give an empty validation split the end of the training split.

        That is the last document; or, when that is most of the text (a single document, say), the fraction's share.
        """
        if self.documents.get("validation", 1) > 0:
            return
        total = self._files["train"].tell() // self.dtype.itemsize
        last = total - self._last_train_start // self.dtype.itemsize
        is_whole_document = 2 * last <= total
        # At least one token stays on either side, or there is none to move.
        moved = last if is_whole_document else min(math.ceil(total * self._fraction), total - 1)
        self._move_tail(moved * self.dtype.itemsize)
        self.documents["train"] -= is_whole_document
        self.documents["validation"] += 1

    def _choose(self, documents: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which documents are for validation."""
        threshold = np.uint64(int(self._fraction * 2**53))
        return (hash_numbers(self._seed, _SPLIT_STREAM, documents) >> np.uint64(11) < threshold) & (documents > 0)

    def _end_document(self, split: str) -> None:
        self.documents[split] += 1
        if split == "train":
            self._last_train_start = self._document_start
            self._document_start = self._files["train"].tell()

    def _move_tail(self, num_bytes: int) -> None:
        train, validation = self._files["train"], self._files["validation"]
        start = train.tell() - num_bytes
        train.seek(start)
        while block := train.read(1 << 20):
            validation.write(block)
        train.seek(start)
        train.truncate()
