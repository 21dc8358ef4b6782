"""Dropout whose masks do not depend on the layout.

A mask is a function of the seed, the dropout's name and the global sample number. Each rank draws the whole mask of a
sample and keeps the part that belongs to its activations. So ranks that hold the same activations drop the same
elements, ranks that hold different parts drop independently, replicas differ because their samples do, one process
drops what 64 ranks drop, and computing a forward pass again draws the same masks again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType

import torch
from torch import Tensor, nn

from threefold.models.init import stream_seed
from threefold.parallel.collectives import Group

HEAD_SHARDED: Mapping[str, int] = MappingProxyType({"*.attention.core.dropout": 1})
"""Dropouts between a column and a row layer -> the dim that is split over tp there, for the built-in decoder."""


@dataclass
class CurrentSamples:
    """The global numbers of the samples in the microbatch that is being computed; the pipeline executor sets them."""

    numbers: Sequence[int] = field(default_factory=tuple)


class SampleDropout(nn.Module):
    """Zeroes elements with probability ``p`` and scales the others by 1 / (1 - p); input ``[B, ...]``, a row a sample.

    ``split_dim`` is the dim of the input of which this rank holds a part, None when it holds all of it.
    """

    def __init__(
        self, p: float, name: str, seed: int, samples: CurrentSamples, group: Group, split_dim: int | None
    ) -> None:
        super().__init__()
        self.p, self.name, self.seed = p, name, seed
        self.samples, self.group, self.split_dim = samples, group, split_dim

    def forward(self, x: Tensor) -> Tensor:
        """Drop in training, pass in evaluation."""
        if not self.training or self.p == 0:
            return x
        if len(self.samples.numbers) != x.shape[0]:
            raise ValueError(f"{self.name}: {x.shape[0]} rows but {len(self.samples.numbers)} sample numbers")
        keep = torch.stack([self._keep_mask(number, x) for number in self.samples.numbers])
        return x * keep / (1 - self.p)

    def _keep_mask(self, sample: int, x: Tensor) -> Tensor:
        shape = list(x.shape[1:])
        if self.split_dim is not None:
            shape[self.split_dim - 1] *= self.group.size
        generator = torch.Generator(x.device).manual_seed(stream_seed(self.seed, "dropout", self.name, sample))
        mask = torch.rand(shape, generator=generator, device=x.device) >= self.p
        if self.split_dim is None:
            return mask
        return mask.chunk(self.group.size, dim=self.split_dim - 1)[self.group.index]


def split_dim_of(name: str, sequence_parallel: bool, inside: Mapping[str, int] = HEAD_SHARDED) -> int | None:
    """The dim that is split over tp at the dropout called ``name``."""
    for pattern, dim in inside.items():
        if fnmatchcase(name, pattern):
            return dim
    return 1 if sequence_parallel else None
