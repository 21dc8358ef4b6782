"""Which gradients are compressed, and how large what is sent instead of them is.

PowerSGD sends two thin factors of a matrix, 1-bit Adam one bit an element. Runtime and cost model both ask here, so
that what is predicted is what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from threefold.job.spec import Job

BITS_OF_BYTE = 8
SCALE_BYTES = 4
BLOCK_ELEMENTS = 128
"""So many sign bits travel with one float32 scale: 1.25 bits an element. One scale for very different elements, such as
the embeddings of words that are in the batch and of words that are not, would move all of them alike."""


@dataclass(frozen=True)
class GradientCompression:
    """``kind`` of compression, after ``start_step`` steps without it; ``rank`` is that of PowerSGD's factors."""

    kind: Literal["powersgd", "one_bit"]
    start_step: int
    rank: int = 1

    def compresses(self, local_shape: Sequence[int]) -> bool:
        """Whether a parameter of this local shape is compressed: a matrix, where it saves something."""
        if len(local_shape) < 2:
            return False
        rows, columns = matrix_shape(local_shape)
        return self.kind == "one_bit" or factor_rank(local_shape, self.rank) * (rows + columns) < rows * columns


def compression_of(job: Job) -> GradientCompression | None:
    """What the job asks for; None where gradients travel whole."""
    if job.optimizer.type == "OneBitAdam":
        return GradientCompression("one_bit", job.optimizer.params.freeze_step or 0)
    stated = job.gradient_compression
    return GradientCompression("powersgd", stated.start_step, stated.rank) if stated.type == "powersgd" else None


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor as a matrix: the first dim, and all others."""
    return shape[0], prod(shape[1:])


def factor_rank(shape: Sequence[int], rank: int) -> int:
    """The rank of a tensor's factors: no more than the matrix can have."""
    return min(rank, *matrix_shape(shape))


def factor_elements(shapes: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    """Elements of the left and of the right factors of all ``shapes`` together."""
    ranks = [factor_rank(shape, rank) for shape in shapes]
    sizes = [matrix_shape(shape) for shape in shapes]
    left = sum(rows * r for (rows, _), r in zip(sizes, ranks, strict=True))
    return left, sum(columns * r for (_, columns), r in zip(sizes, ranks, strict=True))


def chunk_elements(elements: int, ranks: int) -> int:
    """Elements of the chunk that each rank sums: equal parts, padded to whole blocks."""
    return -(-elements // (ranks * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS


def sign_bytes(elements: int, ranks: int) -> int:
    """Bytes of one pass over all ranks' chunks: the sign bits and the scales."""
    blocks = ranks * chunk_elements(elements, ranks) // BLOCK_ELEMENTS
    return blocks * (BLOCK_ELEMENTS // BITS_OF_BYTE + SCALE_BYTES)
