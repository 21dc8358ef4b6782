"""PowerSGD (Vogels et al. 2019): a gradient matrix is sent as two thin factors that one step of power iteration finds.

    P = sum over ranks of M Q, orthogonalised;   Q = sum over ranks of M^T P;   gradient = P Q^T

M is a rank's local gradient plus what it has not sent yet (error feedback), and Q starts from the last step's. Both
sums are linear, so the result depends on the sum of all ranks' M alone: any number of replicas computes the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from threefold.layout import GradientCompression
from threefold.layout.compression import factor_elements, factor_rank, matrix_shape
from threefold.parallel.buckets import Bucket
from threefold.parallel.stage import ShardedParameter


class PowerSgd:
    """Sums the gradients of ``buckets`` by their factors, from step ``settings.start_step`` (0-based) on."""

    leaves_local = False

    def __init__(self, settings: GradientCompression, buckets: Sequence[Bucket]) -> None:
        self.settings = settings
        self.steps_begun = 0
        self.factors = {id(bucket): Factors(bucket, settings.rank) for bucket in buckets}

    def begin_step(self) -> None:
        """Count the step."""
        self.steps_begun += 1

    def takes(self, bucket: Bucket) -> bool:
        """Whether ``bucket`` is compressed, and the steps without compression are over."""
        return self.steps_begun > self.settings.start_step and id(bucket) in self.factors

    def reduce(self, bucket: Bucket) -> None:
        """Put about the sum of all ranks' gradients into the bucket."""
        self.factors[id(bucket)].reduce()


class Factors:
    """Error and right factors of one bucket's matrices, made when first used; they live as long as the bucket."""

    def __init__(self, bucket: Bucket, rank: int) -> None:
        self.bucket = bucket
        shapes = [entry.parameter.shape for entry in bucket.entries]
        self.shapes = [matrix_shape(shape) for shape in shapes]
        self.ranks = [factor_rank(shape, rank) for shape in shapes]
        self.left_elements, self.right_elements = factor_elements(shapes, rank)
        self.error: Tensor | None = None
        self.right: Tensor | None = None

    def reduce(self) -> None:
        """Replace the local gradients by the approximate sum, and keep what this rank has not sent."""
        bucket, group = self.bucket, self.bucket.group
        grads = bucket.grads[: bucket.starts[-1]]
        if self.error is None or self.right is None:
            self.error, self.right = torch.zeros_like(grads), self._first_right(grads)
            bucket.memory.add("buffers", self.num_bytes)
        owed = self.error.add_(grads)
        matrices, rights = self._matrices(owed), self._cut(self.right, [columns for _, columns in self.shapes])
        left = grads.new_empty(self.left_elements)
        lefts = self._cut(left, [rows for rows, _ in self.shapes])
        for matrix, p, q in zip(matrices, lefts, rights, strict=True):
            torch.mm(matrix, q, out=p)
        group.all_reduce(left).wait()
        for matrix, p, q in zip(matrices, lefts, rights, strict=True):
            p.copy_(torch.linalg.qr(p)[0])
            torch.mm(matrix.t(), p, out=q)
        group.all_reduce(self.right).wait()
        for target, p, q in zip(self._matrices(grads), lefts, rights, strict=True):
            torch.mm(p, q.t(), out=target)
        owed.sub_(grads, alpha=1.0 / group.size)  # all ranks' errors together are what the sum still lacks

    @property
    def num_bytes(self) -> int:
        """Bytes of error and factors."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (self.error, self.right) if tensor is not None)

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        bounds = pairwise(self.bucket.starts)
        return [flat[start:stop].view(shape) for (start, stop), shape in zip(bounds, self.shapes, strict=True)]

    def _cut(self, flat: Tensor, rows: Sequence[int]) -> list[Tensor]:
        sizes = [count * rank for count, rank in zip(rows, self.ranks, strict=True)]
        parts = flat.split(sizes)
        return [part.view(count, rank) for part, count, rank in zip(parts, rows, self.ranks, strict=True)]

    def _first_right(self, like: Tensor) -> Tensor:
        entries = zip(self.bucket.entries, self.shapes, self.ranks, strict=True)
        return torch.cat([_random(entry, columns * rank) for entry, (_, columns), rank in entries]).to(like)


def _random(entry: ShardedParameter, size: int) -> Tensor:
    """Normal numbers from the parameter's name alone, so that every rank of any layout starts from the same."""
    generator = torch.Generator().manual_seed(zlib.crc32(entry.name.encode()))
    return torch.randn(size, generator=generator, dtype=torch.float64)
