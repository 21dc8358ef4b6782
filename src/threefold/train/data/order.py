"""Which samples belong to which step, rank and microbatch, and the shuffled order of an epoch.

Both are pure functions of the seed and the global sample number. Neither knows how many ranks there are except to cut a
step's samples into equal parts, so a run resumes, and reshapes to another layout, without any iterator to restore.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from threefold.train.data.source import Integers, SampleNumbers

UInt64s = NDArray[np.uint64]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive multiples are spread evenly over 64 bits
_NUM_ROUNDS = 6  # four already make a strong pseudo-random permutation (Luby & Rackoff 1988); halves can be tiny here


def microbatch_samples(
    step: int, train_batch_size: int, micro_batch: int, num_microbatches: int, dp_coord: int, microbatch: int
) -> range:
    """Return the global sample numbers of one microbatch of one data parallel replica.

    ``step`` counts from 0. A step's samples are ``step * train_batch_size`` and up; each replica takes a consecutive
    part of them and each microbatch a consecutive part of that, so every (dp, microbatch size, accumulation) covers
    the same samples.
    """
    first = step * train_batch_size + (dp_coord * num_microbatches + microbatch) * micro_batch
    return range(first, first + micro_batch)


def sample_indices(
    sample_numbers: SampleNumbers, num_samples: int, seed: int, shuffle: bool = True
) -> NDArray[np.int64]:
    """Map global sample numbers to indices in ``[0, num_samples)``; each epoch visits every index exactly once.

    Number n is position ``n % num_samples`` of epoch ``n // num_samples``. With ``shuffle``, positions are permuted
    differently in each epoch.
    """
    epochs, positions = np.divmod(np.asarray(sample_numbers, dtype=np.int64), num_samples)
    return permute(positions, num_samples, seed, epochs) if shuffle else positions


def permute(positions: Integers, length: int, seed: int, epochs: Integers) -> NDArray[np.int64]:
    """Apply the permutation of ``[0, length)`` that (seed, epoch) names to ``positions``, in O(1) memory.

    A Feistel network is a bijection on ``[0, 4^k)`` whatever its round function is. Cycle walking makes it one on
    ``[0, length)``: an image outside is mapped again until it falls inside, which it must, since the walk runs along a
    cycle of a bijection and that cycle holds the start itself. With the smallest 4^k >= length, the average walk is
    below 4 steps. Source: Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains".
    """
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epochs)
    images = _feistel(positions.astype(np.uint64), half_bits, keys)
    outside = images >= length
    while outside.any():
        images[outside] = _feistel(images[outside], half_bits, keys[:, outside])
        outside = images >= length
    return images.astype(np.int64)


def mix64(words: UInt64s) -> UInt64s:
    """Hash each 64-bit word to one that looks random: a bijection (the finalizer of SplitMix64, Steele et al. 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def hash_numbers(seed: int, purpose: int, numbers: Integers) -> UInt64s:
    """Return 64 pseudo-random bits for each number; streams of another seed or ``purpose`` are unrelated."""
    # The start is mixed in Python integers' own array: numpy warns when a *scalar* product wraps, an array's does not.
    start = mix64(np.array([(seed + purpose * _GOLDEN) & _WORD], dtype=np.uint64))
    return mix64(mix64(numbers.astype(np.uint64) * np.uint64(_GOLDEN) + start) ^ start)


def _round_keys(seed: int, epochs: Integers) -> UInt64s:
    """Return one key for each round and number: shape (rounds, numbers)."""
    return np.stack([hash_numbers(seed, 1 + round_number, epochs) for round_number in range(_NUM_ROUNDS)])


def _feistel(words: UInt64s, half_bits: int, keys: UInt64s) -> UInt64s:
    """Permute ``[0, 4^half_bits)``: swap halves and xor one with a hash of the other, once a round."""
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = words >> shift, words & mask
    for round_keys in keys:
        left, right = right, left ^ (mix64(right + round_keys) & mask)
    return (left << shift) | right
