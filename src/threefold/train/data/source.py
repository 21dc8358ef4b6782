"""What the trainer needs of its data, whether it comes from a token file or is made up for a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""The label of a position that does not count in the loss (the value that torch's cross entropy skips by default)."""

Integers = NDArray[np.integer[Any]]
SampleNumbers = Sequence[int] | Integers


class SampleSource(Protocol):
    """An endless stream of samples, addressed by global sample number.

    Whoever holds a source can ask for any sample, in any order, on any rank, and always gets the same one. There is no
    iterator that a rank could advance alone, so ranks cannot drift apart.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids; every id is in ``[0, vocab_size)``."""
        ...

    @property
    def num_samples(self) -> int:
        """Samples in one epoch; sample numbers at and above it begin the next epoch."""
        ...

    @property
    def sequence_length(self) -> int:
        """Tokens in a sample (S)."""
        ...

    def batch(self, sample_numbers: SampleNumbers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (tokens_BS, labels_BS) as int64; a label is the next token, or ``IGNORED``."""
        ...
