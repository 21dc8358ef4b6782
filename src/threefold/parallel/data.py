"""Data parallelism: gradients live in flat buckets, and a bucket's sum over replicas starts as soon as it is complete.

A parameter's ``grad`` is a view into its bucket, so autograd accumulates microbatches in place and the collective
works in place, without a copy in or out. In the last microbatch a hook counts a bucket's gradients; when the last one
is there the all-reduce starts, and backward goes on (Li et al. 2020). Gradients are *summed*: the loss was already
divided by the number of valid tokens in the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from threefold.layout import fill_buckets
from threefold.parallel.collectives import Group, Pending
from threefold.parallel.stage import ShardedParameter


@dataclass
class Bucket:
    """Gradients that travel together: ``flat`` holds those of ``entries`` one after the other."""

    entries: tuple[ShardedParameter, ...]
    flat: Tensor
    group: Group
    early: bool
    missing: int = 0
    pending: Pending | None = None
    views: list[Tensor] = field(default_factory=list)


class GradientSync:
    """Owns the gradients of one rank: zeroes them, and sums each over the ranks that contribute to it.

    ``bucket_elements`` limits a bucket. With ``overlap`` off, all reductions start after backward.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], dp: Group, bucket_elements: int, overlap: bool) -> None:
        self.buckets = build_buckets(parameters, dp, bucket_elements, overlap)
        self._armed = False
        self._next_early = 0
        for bucket in self.buckets:
            for entry in bucket.entries:
                entry.parameter.register_post_accumulate_grad_hook(self._hook_of(bucket))

    def begin_step(self) -> None:
        """Zero all gradients."""
        self._armed, self._next_early = False, 0
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.missing, bucket.pending = len(bucket.entries), None
            for entry, view in zip(bucket.entries, bucket.views, strict=True):
                entry.parameter.grad = view

    def arm(self) -> None:
        """The next backward pass is the last of this step: reduce each bucket as soon as it is complete."""
        self._armed = True

    def finish(self) -> None:
        """Start what has not started yet, in an order that is the same on every rank, and wait for all of it."""
        for bucket in self.buckets:
            if bucket.pending is None:
                bucket.pending = bucket.group.all_reduce(bucket.flat)
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()

    def scale(self, factor: float | Tensor) -> None:
        """Multiply every gradient by ``factor``."""
        for bucket in self.buckets:
            bucket.flat.mul_(factor)

    def _hook_of(self, bucket: Bucket):
        def on_gradient(_parameter: Tensor) -> None:
            if self._armed:
                bucket.missing -= 1
                self._start_complete()

        return on_gradient

    def _start_complete(self) -> None:
        # Buckets start in order, never as they happen to complete, so that all ranks post the same collectives.
        while self._next_early < len(self.buckets):
            bucket = self.buckets[self._next_early]
            if not bucket.early or bucket.missing > 0:
                return
            bucket.pending = bucket.group.all_reduce(bucket.flat)
            self._next_early += 1


def build_buckets(
    parameters: Sequence[ShardedParameter], dp: Group, bucket_elements: int, overlap: bool
) -> tuple[Bucket, ...]:
    """Fill buckets in reverse model order, apart for each group to sum over; those that reduce over dp come first.

    Only these start during backward. Others (tied embeddings, partial gradients under sequence parallelism) use further
    communicators, and two communicators whose order differs between ranks can lock each other up on CUDA.
    """
    trained = [entry for entry in reversed(parameters) if entry.parameter.requires_grad]
    # Not keyed by the group's ranks: with dp = 1, the group of one is a group like any other.
    groups = {id(entry.sum_over): entry.sum_over for entry in trained}
    buckets = []
    # Sorted by name, which is the same order on every rank whatever parameters it holds.
    for group in sorted(groups.values(), key=lambda group: (group is not dp, group.axis)):
        members = [entry for entry in trained if entry.sum_over is group]
        sizes = [entry.parameter.numel() for entry in members]
        for indices in fill_buckets(sizes, bucket_elements):
            entries = tuple(members[index] for index in indices)
            buckets.append(_build_bucket(entries, group, early=overlap and group is dp))
    return tuple(buckets)


def _build_bucket(entries: tuple[ShardedParameter, ...], group: Group, early: bool) -> Bucket:
    first = entries[0].parameter
    flat = torch.zeros(sum(entry.parameter.numel() for entry in entries), dtype=first.dtype, device=first.device)
    pieces = flat.split([entry.parameter.numel() for entry in entries])
    views = [piece.view(entry.parameter.shape) for piece, entry in zip(pieces, entries, strict=True)]
    return Bucket(entries, flat, group, early, views=views)
