"""Made-up tokens for tests and parity: no file, any vocabulary, and labels that are ignored unevenly on purpose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from threefold.train.data.order import hash_numbers
from threefold.train.data.source import IGNORED, SampleNumbers

_TOKENS, _SHARES, _MASK, _WHOLLY = range(101, 105)  # purposes: each names an independent random stream
_BLOCK = 8


@dataclass(frozen=True)
class SyntheticTokens:
    """Pseudo-random tokens that depend on the seed and the global sample number only.

    ``ignored_fraction`` above 0 ignores labels *unevenly*, which is what tells a mean over all valid tokens from a mean
    of means: of each block of 8 consecutive samples one is entirely ignored, one is fully valid, and the other six
    ignore a share of their own, ``ignored_fraction`` on average.

    ``only_valid=(sample_number, position)`` ignores everything but that one label, in all of the stream.
    """

    vocab_size: int
    sequence_length: int
    seed: int
    ignored_fraction: float = 0.0
    only_valid: tuple[int, int] | None = None
    num_samples: int = 1 << 31

    def batch(self, sample_numbers: SampleNumbers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (tokens_BS, labels_BS) as int64; a label is the next token, or ``IGNORED``."""
        numbers_B1 = np.asarray(sample_numbers, dtype=np.int64)[:, None] % self.num_samples
        window = np.arange(self.sequence_length + 1)
        addresses = numbers_B1 * (self.sequence_length + 1) + window
        tokens = (hash_numbers(self.seed, _TOKENS, addresses) % np.uint64(self.vocab_size)).astype(np.int64)
        labels_BS = np.where(self._valid(numbers_B1, addresses[:, 1:]), tokens[:, 1:], IGNORED)
        return np.ascontiguousarray(tokens[:, :-1]), labels_BS

    def _valid(self, numbers_B1: NDArray[np.int64], addresses_BS: NDArray[np.int64]) -> NDArray[np.bool_]:
        if self.only_valid is not None:
            sample, position = self.only_valid
            return (numbers_B1 == sample) & (np.arange(self.sequence_length) == position)
        return _uniform(self.seed, _MASK, addresses_BS) >= self._ignored_shares(numbers_B1)

    def _ignored_shares(self, numbers_B1: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the share of each sample's labels that is ignored: 0 keeps all, 1 keeps none."""
        if self.ignored_fraction == 0:
            return np.zeros(numbers_B1.shape)
        blocks, places = np.divmod(numbers_B1, _BLOCK)
        # Which places hold the extremes differs from block to block, so that they meet every rank and microbatch.
        empty = (hash_numbers(self.seed, _WHOLLY, blocks) % np.uint64(_BLOCK)).astype(np.int64)
        full = (empty + 1 + blocks % (_BLOCK - 1)) % _BLOCK
        spread = min(self.ignored_fraction, 1 - self.ignored_fraction)
        shares = self.ignored_fraction + spread * (2 * _uniform(self.seed, _SHARES, numbers_B1) - 1)
        return np.where(places == empty, 1.0, np.where(places == full, 0.0, shares))


def _uniform(seed: int, purpose: int, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return pseudo-random numbers in [0, 1): the top 53 bits, which is what a float64 holds exactly."""
    return (hash_numbers(seed, purpose, numbers) >> np.uint64(11)).astype(np.float64) * 2.0**-53
