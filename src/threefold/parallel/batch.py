"""The part of one global batch that one replica computes, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from threefold.parallel.vocab import IGNORED

LoadSamples = Callable[[Sequence[int]], tuple[NDArray[np.int64], NDArray[np.int64]]]
"""Global sample numbers -> (tokens ``[B, S]``, labels ``[B, S]``)."""


@dataclass(frozen=True)
class ReplicaBatch:
    """The microbatches of one step on one replica.

    Tokens and labels of a microbatch are looked up by the same sample numbers on whatever rank needs them, so the first
    stage's inputs and the last stage's labels can't come apart, and middle stages load nothing.
    """

    samples: tuple[Sequence[int], ...]
    tokens: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]

    @property
    def num_valid(self) -> int:
        """Labels that count, over all microbatches of this replica; 0 on stages that hold no labels."""
        return sum(int((labels != IGNORED).sum()) for labels in self.labels)


def load_batch(
    samples: Sequence[Sequence[int]],
    load: LoadSamples,
    device: torch.device,
    *,
    with_tokens: bool,
    with_labels: bool,
) -> ReplicaBatch:
    """Load what this rank's stage needs: tokens on the first stage, labels on the last."""
    if not (with_tokens or with_labels):
        return ReplicaBatch(tuple(samples), (), ())
    loaded = [load(numbers) for numbers in samples]
    tokens = tuple(_to_device(tokens, device) for tokens, _ in loaded) if with_tokens else ()
    labels = tuple(_to_device(labels, device) for _, labels in loaded) if with_labels else ()
    return ReplicaBatch(tuple(samples), tokens, labels)


def _to_device(array: NDArray[np.int64], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
