"""Cross entropy and log-sum-exp over logits whose vocabulary is split over ranks.

No rank ever sees all logits of a token: three numbers a token are exchanged (maximum, sum of exponentials, logit of the
target) instead of V. Padding columns are masked. Loss is the *sum* over valid tokens; who divides by the number of
valid tokens of the global batch is the engine.

Shapes: B microbatch, S sequence, V this rank's part of the vocabulary, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from threefold.layout import Shard
from threefold.parallel.collectives import Group
from threefold.parallel.tensor import first_row, num_rows

IGNORED = -100
"""The label of a token that does not count, as in PyTorch."""


@dataclass(frozen=True)
class VocabPart:
    """Which columns of the vocabulary this rank's logits hold."""

    group: Group
    vocab_size: int
    start: int
    length: int

    @classmethod
    def of_shard(cls, shard: Shard, vocab_size: int, group: Group) -> VocabPart:
        """The columns that belong to the rows of the head's weight shard."""
        return cls(group, vocab_size, first_row(shard), num_rows(shard))

    @property
    def local_width(self) -> int:
        """Columns of every rank: ceil(V / tp)."""
        return -(-self.vocab_size // self.group.size)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, labels_BS: Tensor, part: VocabPart) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        valid_BS = labels_BS != IGNORED
        here_BS = (labels_BS >= part.start) & (labels_BS < part.start + part.length)
        column_BS1 = (labels_BS - part.start).masked_fill(~here_BS, 0).unsqueeze(-1)
        shifted_BSV, _ = _shift_by_maximum(logits_BSV, part)
        target_BS = shifted_BSV.gather(-1, column_BS1).squeeze(-1).masked_fill(~here_BS, 0.0)
        exp_BSV = shifted_BSV.exp_()
        sums_2BS = torch.stack((exp_BSV.sum(-1), target_BS))
        part.group.all_reduce(sums_2BS).wait()
        total_BS, target_BS = sums_2BS
        ctx.save_for_backward(exp_BSV.div_(total_BS.unsqueeze(-1)), column_BS1, here_BS, valid_BS)
        ctx.dtype = logits_BSV.dtype
        return (total_BS.log() - target_BS).masked_fill(~valid_BS, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        softmax_BSV, column_BS1, here_BS, valid_BS = ctx.saved_tensors
        # d loss / d logit = softmax - onehot(label), for valid tokens.
        grad_BSV = softmax_BSV * (grad * valid_BS).unsqueeze(-1)
        grad_BSV.scatter_add_(-1, column_BS1, (-grad * here_BS).unsqueeze(-1))
        return grad_BSV.to(ctx.dtype), None, None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, part: VocabPart) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        shifted_BSV, maximum_BS = _shift_by_maximum(logits_BSV, part)
        exp_BSV = shifted_BSV.exp_()
        total_BS = exp_BSV.sum(-1)
        part.group.all_reduce(total_BS).wait()
        ctx.save_for_backward(exp_BSV.div_(total_BS.unsqueeze(-1)))
        ctx.dtype = logits_BSV.dtype
        return total_BS.log() + maximum_BS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BS: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (softmax_BSV,) = ctx.saved_tensors
        return (softmax_BSV * grad_BS.unsqueeze(-1)).to(ctx.dtype), None


def _shift_by_maximum(logits_BSV: Tensor, part: VocabPart) -> tuple[Tensor, Tensor]:
    """Logits less the global maximum of each token, in at least float32, padding columns at -inf; and that maximum."""
    if logits_BSV.shape[-1] != part.local_width:
        raise ValueError(
            f"the head returned {logits_BSV.shape[-1]} logits a token, but each of {part.group.size} ranks must hold "
            f"{part.local_width} of a vocabulary of {part.vocab_size}; give the head the style 'vocab'"
        )
    exact = torch.promote_types(logits_BSV.dtype, torch.float32)
    logits_BSV = logits_BSV.to(exact, copy=True)
    logits_BSV[..., part.length :] = float("-inf")
    maximum_BS = logits_BSV.amax(-1)
    part.group.all_reduce(maximum_BS, "max").wait()
    return logits_BSV.sub_(maximum_BS.unsqueeze(-1)), maximum_BS


def cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor, part: VocabPart) -> Tensor:
    """Sum over valid tokens of -log softmax(logits)[label]; equal on all ranks of the group.

    Raises ValueError when the logits are not this rank's part of the vocabulary, or a label is outside of it.
    """
    _check_labels(labels_BS, part.vocab_size)
    return _CrossEntropySum.apply(logits_BSV, labels_BS, part)  # type: ignore[no-any-return]


def logsumexp(logits_BSV: Tensor, part: VocabPart) -> Tensor:
    """log of the sum over the whole vocabulary of exp(logit), ``[B, S]``; for a z-loss (Chowdhery et al. 2022)."""
    return _LogSumExp.apply(logits_BSV, part)  # type: ignore[no-any-return]


def _check_labels(labels_BS: Tensor, vocab_size: int) -> None:
    if labels_BS.device.type != "cpu":
        return  # reading a result would stop the host in every step
    wrong = labels_BS[(labels_BS != IGNORED) & ((labels_BS < 0) | (labels_BS >= vocab_size))]
    if wrong.numel():
        raise ValueError(f"label {int(wrong[0])} is outside the vocabulary of {vocab_size} (ignored is {IGNORED})")
