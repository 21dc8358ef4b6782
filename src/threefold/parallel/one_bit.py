"""A sum over ranks that send one bit an element: the signs, and one scale a chunk (Tang et al. 2021).

Rank r sums chunk r. Every rank sends it the signs of that chunk of its values (all-to-all); it adds what they stand
for, and sends the signs of the sum to all (all-gather). What a sign and a scale do not say, a rank keeps and adds to
what it sends next: error feedback, once as worker over all elements and once as server over its own chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.layout.compression import BITS_OF_BYTE, SCALE_BYTES, chunk_elements
from threefold.parallel.buckets import Bucket
from threefold.parallel.collectives import Group


class OneBit:
    """Leaves the gradients of matrices local once ``frozen``: then the optimizer sums its momentum by ``exchange``."""

    leaves_local = True

    def __init__(self, freeze_step: int, buckets: Sequence[Bucket]) -> None:
        self.freeze_step, self.buckets = freeze_step, tuple(buckets)
        self.frozen = False

    def begin_step(self) -> None:
        """Do nothing: the optimizer, which knows of skipped steps, says when the variance is frozen."""

    def takes(self, bucket: Bucket) -> bool:
        """Whether ``bucket`` is compressed and the warm-up is over."""
        return self.frozen and any(bucket is mine for mine in self.buckets)

    def reduce(self, bucket: Bucket) -> None:
        """Do nothing: momentum is communicated, not the gradient."""


@dataclass(frozen=True)
class Errors:
    """What was not sent yet: of all elements ``[ranks, chunk]`` and of this rank's sum ``[1, chunk]``."""

    worker: Tensor
    server: Tensor

    @classmethod
    def zeros(cls, elements: int, group: Group, like: Tensor) -> Errors:
        """Nothing is owed yet."""
        chunk = chunk_elements(elements, group.size)
        return cls(like.new_zeros((group.size, chunk)), like.new_zeros((1, chunk)))


def exchange(values: Tensor, errors: Errors, group: Group) -> Tensor:
    """About the sum of all ranks' flat ``values``, the same on every rank; ``errors`` are updated in place."""
    elements, (ranks, chunk) = values.numel(), errors.worker.shape
    counts = (elements - chunk * torch.arange(ranks, device=values.device)).clamp(0, chunk)
    errors.worker.view(-1)[:elements].add_(values)
    sent = _compress(errors.worker, counts)
    arrived = torch.empty_like(sent)
    group.all_to_all_into(arrived, sent).wait()
    errors.server.add_(_decompress(arrived, values.dtype).sum(0, keepdim=True))
    summed = _compress(errors.server, counts[group.index : group.index + 1])
    everything = torch.empty_like(sent)
    group.all_gather_into(everything, summed).wait()
    return _decompress(everything, values.dtype).view(-1)[:elements]


def _compress(values: Tensor, counts: Tensor) -> Tensor:
    """``[chunks, chunk]`` -> messages; ``values`` becomes what the messages do not say.

    The scale is the mean size of the ``counts`` elements of a chunk that are no padding: the nearest to them all.
    """
    scales = (values.abs().sum(1) / counts.clamp(min=1)).float()
    message = torch.cat((scales.view(torch.uint8).view(-1, SCALE_BYTES), pack_signs(values)), dim=1)
    padding = torch.arange(values.shape[1], device=values.device) >= counts[:, None]
    values.sub_(_decompress(message, values.dtype)).masked_fill_(padding, 0.0)
    return message


def _decompress(messages: Tensor, dtype: torch.dtype) -> Tensor:
    """Messages -> ``[chunks, chunk]``."""
    scales, signs = messages[:, :SCALE_BYTES], messages[:, SCALE_BYTES:]
    return unpack_signs(signs, dtype).mul_(scales.contiguous().view(torch.float32).to(dtype))


def pack_signs(values: Tensor) -> Tensor:
    """``[chunks, n]`` -> uint8 ``[chunks, n / 8]``: a bit is 1 where the value is not negative, lowest bit first."""
    bits = (values >= 0).view(values.shape[0], -1, BITS_OF_BYTE)
    return (bits * _bit_values(values.device)).sum(-1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The reverse: 1 and -1 in ``dtype``."""
    bits = (packed.unsqueeze(-1) & _bit_values(packed.device)).ne(0)
    return bits.flatten(1).to(dtype).mul_(2).sub_(1)


def _bit_values(device: torch.device) -> Tensor:
    return 2 ** torch.arange(BITS_OF_BYTE, dtype=torch.uint8, device=device)
