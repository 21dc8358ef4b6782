"""A sum over ranks that send one bit an element: the signs, and a scale a block (Tang et al. 2021).

Rank r sums chunk r. Every rank sends it the signs of that chunk of its values (all-to-all); it adds what they stand
for, and sends the signs of the sum to all (all-gather). What a sign and a scale do not say, a rank keeps and adds to
what it sends next: error feedback, once as worker over all elements and once as server over its own chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.layout.compression import BITS_OF_BYTE, BLOCK_ELEMENTS, SCALE_BYTES, chunk_elements
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
    """What was not sent yet: of all elements ``[ranks, blocks, block]``, of this rank's sum ``[1, blocks, block]``."""

    worker: Tensor
    server: Tensor

    @classmethod
    def zeros(cls, elements: int, group: Group, like: Tensor) -> Errors:
        """Nothing is owed yet."""
        shape = chunk_elements(elements, group.size) // BLOCK_ELEMENTS, BLOCK_ELEMENTS
        return cls(like.new_zeros((group.size, *shape)), like.new_zeros((1, *shape)))


def exchange(values: Tensor, errors: Errors, group: Group) -> Tensor:
    """About the sum of all ranks' flat ``values``, the same on every rank; ``errors`` are updated in place."""
    elements = values.numel()
    holds = torch.zeros_like(errors.worker, dtype=torch.bool)  # padding owes nothing
    holds.view(-1)[:elements] = True
    errors.worker.view(-1)[:elements].add_(values)
    sent = _compress(errors.worker, holds)
    arrived = torch.empty_like(sent)
    group.all_to_all_into(arrived, sent).wait()
    own = holds[group.index : group.index + 1]
    errors.server.add_(
        _decompress(arrived, values.dtype).sum(0, keepdim=True).mul_(own)
    )  # padding arrives as signs too
    summed = _compress(errors.server, own)
    everything = torch.empty_like(sent)
    group.all_gather_into(everything, summed).wait()
    return _decompress(everything, values.dtype).view(-1)[:elements]


def _compress(values: Tensor, holds: Tensor) -> Tensor:
    """``[chunks, blocks, block]`` -> a message for each chunk; ``values`` becomes what the messages do not say.

    A scale is the mean size of a block's elements, without padding: the nearest to them all.
    """
    scales = (values.abs().sum(2) / holds.sum(2).clamp(min=1)).float()
    messages = torch.cat((scales.view(torch.uint8), pack_signs(values.flatten(1))), dim=1)
    values.sub_(_decompress(messages, values.dtype)).mul_(holds)
    return messages


def _decompress(messages: Tensor, dtype: torch.dtype) -> Tensor:
    """Messages -> ``[chunks, blocks, block]``."""
    blocks = messages.shape[1] // (SCALE_BYTES + BLOCK_ELEMENTS // BITS_OF_BYTE)
    scales, signs = messages.split([blocks * SCALE_BYTES, messages.shape[1] - blocks * SCALE_BYTES], dim=1)
    scales = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)  # a view must be aligned
    return unpack_signs(signs, dtype).unflatten(1, (blocks, BLOCK_ELEMENTS)).mul_(scales.to(dtype).unsqueeze(-1))


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
