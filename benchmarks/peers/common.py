"""What all systems that are not threefold have in common: the plain model, its data, its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.peers.work import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY, Work, job_of
from threefold.models.decoder import Decoder
from threefold.models.init import decoder_initial_value
from threefold.train.data.order import microbatch_samples
from threefold.train.data.synthetic import SyntheticTokens

Step = Callable[[], float | None]
"""One optimizer step; returns this rank's mean loss, or None where the rank has none."""


@dataclass(frozen=True)
class Place:
    """Which rank this process is, and the work of all."""

    rank: int
    ranks: int
    work: Work


def source_of(work: Work) -> SyntheticTokens:
    """The same samples in every step, so that the loss shows whether an update was right."""
    return SyntheticTokens(work.vocab, work.sequence, seed=1, num_samples=work.samples)


class Microbatches:
    """This replica's microbatches of a step, loaded anew for each, as a training run does."""

    def __init__(self, work: Work, replica: int = 0, replicas: int = 1) -> None:
        self.work, self.replica, self.source = work, replica, source_of(work)
        self.count = work.microbatches // replicas

    def load(self) -> list[tuple[Tensor, Tensor]]:
        """(tokens, labels) of each."""
        work = self.work
        numbers = (
            microbatch_samples(0, work.samples, work.micro_batch, self.count, self.replica, index)
            for index in range(self.count)
        )
        return [tuple(torch.from_numpy(array) for array in self.source.batch(mine)) for mine in numbers]  # type: ignore[misc]


def plain_model(work: Work) -> Decoder:
    """The decoder with the initial weights that threefold gives it."""
    spec = job_of(work).model
    assert spec is not None
    model, initial_value = Decoder(spec), decoder_initial_value(spec, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape))
    return model


def mean_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean over the tokens, all of which are valid."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


def accumulated(
    data: Microbatches,
    optimizer: torch.optim.Optimizer,
    logits_of: Callable[[int, Tensor], Tensor],
    loss_scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Step:
    """A step over all microbatches: ``logits_of`` gets the number and the tokens of each.

    ``loss_scope`` surrounds its forward and backward pass.
    """

    def step() -> float:
        total = 0.0
        optimizer.zero_grad()
        for index, (tokens, labels) in enumerate(data.load()):
            with loss_scope():
                loss = mean_loss(logits_of(index, tokens), labels) / data.count
                loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total

    return step


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """PyTorch's fastest AdamW. Matrices decay; tensors and DTensors, which no call may mix, are groups of their own."""
    groups: dict[tuple[bool, type], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dim() >= 2, type(parameter.data)), []).append(parameter)
    decay = [
        {"params": members, "weight_decay": WEIGHT_DECAY if decays else 0.0} for (decays, _), members in groups.items()
    ]
    return torch.optim.AdamW(decay, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)
