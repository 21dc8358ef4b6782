"""Who sums the gradients of a bucket in this step: the bucket itself, or a compression in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from threefold.layout import GradientCompression
from threefold.parallel.buckets import Bucket
from threefold.parallel.one_bit import OneBit
from threefold.parallel.power_sgd import PowerSgd


class Compression(Protocol):
    """What the data-parallel engine asks. ``leaves_local``: what it takes is not summed when the step ends."""

    leaves_local: bool

    def begin_step(self) -> None:
        """Note that a step begins."""
        ...

    def takes(self, bucket: Bucket) -> bool:
        """Whether this step's gradients of ``bucket`` are not the bucket's own to sum."""
        ...

    def reduce(self, bucket: Bucket) -> None:
        """Sum the gradients of a bucket that it takes, after the step's last backward pass."""
        ...


class Uncompressed:
    """Takes nothing."""

    leaves_local = False

    def begin_step(self) -> None:
        """Do nothing."""

    def takes(self, bucket: Bucket) -> bool:
        """Never."""
        return False

    def reduce(self, bucket: Bucket) -> None:
        """Do nothing."""


def build_compression(settings: GradientCompression | None, buckets: Sequence[Bucket]) -> Compression:
    """What ``settings`` ask for. Where a bucket's group is one rank nothing is sent, so nothing is compressed."""
    if settings is None:
        return Uncompressed()
    compressed = [bucket for bucket in buckets if bucket.compressible and bucket.group.size > 1]
    return PowerSgd(settings, compressed) if settings.kind == "powersgd" else OneBit(settings.start_step, compressed)
