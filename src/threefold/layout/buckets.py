"""Which parameters share a gradient bucket: one collective a bucket instead of one a parameter."""

from __future__ import annotations

from collections.abc import Sequence


def fill_buckets(sizes: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Indices into ``sizes`` (elements), bucket by bucket, in the order given.

    A bucket is closed when the next parameter would take it over ``limit`` elements; a parameter larger than the limit
    has a bucket of its own. Give the parameters in the order in which backward finishes their gradients (the reverse of
    the model's), so that the first bucket is complete, and its reduction under way, while backward still runs (Li et
    al. 2020, PyTorch Distributed).
    """
    buckets: list[tuple[int, ...]] = []
    current: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        if current and filled + size > limit:
            buckets.append(tuple(current))
            current, filled = [], 0
        current.append(index)
        filled += size
    if current:
        buckets.append(tuple(current))
    return tuple(buckets)
