"""Tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022), applied from outside.

A column-parallel layer holds some of the outputs, a row-parallel layer some of the inputs. Between a column layer and
the row layer after it every rank works on its own features and nothing is sent. The paper's conjugate pairs are

    without sequence parallelism   f: identity, backward all-reduce            g: all-reduce, backward identity
    with sequence parallelism      f: all-gather, backward reduce-scatter      g: reduce-scatter, backward all-gather

where the second form sends the same bytes, and splits norms, dropouts and the residual stream by sequence.

Shapes: B microbatch, S sequence (a rank's part of it between layers under sequence parallelism), D model width,
F this rank's features, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from threefold.layout import Shard
from threefold.parallel.collectives import Group, Pending, all_gather_parts, join_parts, reduce_scatter_dim
from threefold.parallel.deferred import DeferredGradients, Product

SEQUENCE_DIM = 1


class _ColumnLinear(torch.autograd.Function):
    """f, then ``x Wᵀ + b`` with this rank's outputs. Backward hides f's communication behind the weight gradient."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x_BSD: Tensor,
        weight_FD: Tensor,
        bias_F: Tensor | None,
        group: Group,
        sequence_parallel: bool,
        deferred: DeferredGradients,
    ) -> Tensor:
        ctx.group, ctx.sequence_parallel, ctx.deferred = group, sequence_parallel, deferred
        ctx.weight, ctx.bias = weight_FD, bias_F
        ctx.save_for_backward(x_BSD, weight_FD)
        return F.linear(_gather_sequence(x_BSD, group) if sequence_parallel else x_BSD, weight_FD, bias_F)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSF: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_BSD, weight_FD = ctx.saved_tensors
        group, deferred = ctx.group, ctx.deferred
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # The whole input is gathered again instead of kept: only 1/tp of it is held between forward and backward.
        start = partial(_start_weight_gradient, group if ctx.sequence_parallel else None)
        if deferred.collecting:
            if needs_weight:
                deferred.add(ctx.weight, start, grad_BSF, x_BSD)
            if needs_bias:
                deferred.add(ctx.bias, _start_bias_gradient, grad_BSF)
            needs_weight = needs_bias = False
        weight_gradient = start(grad_BSF, x_BSD) if needs_weight else None
        grad_x, reduced = None, Pending()
        if needs_x:
            grad_x, reduced = _reduce_input_gradient(grad_BSF @ weight_FD, group, ctx.sequence_parallel)
        # The reduction above is under way while these products run.
        grad_weight = weight_gradient() if weight_gradient else None
        grad_bias = _start_bias_gradient(grad_BSF)() if needs_bias else None
        reduced.wait()
        return grad_x, grad_weight, grad_bias, None, None, None


class _RowLinear(torch.autograd.Function):
    """``x Wᵀ`` with this rank's inputs, then g, which adds the ranks' partial products."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x_BSF: Tensor,
        weight_DF: Tensor,
        group: Group,
        sequence_parallel: bool,
        deferred: DeferredGradients,
    ) -> Tensor:
        ctx.group, ctx.sequence_parallel, ctx.deferred = group, sequence_parallel, deferred
        ctx.weight = weight_DF
        ctx.save_for_backward(x_BSF, weight_DF)
        return _reduce(F.linear(x_BSF, weight_DF), group, sequence_parallel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_BSF, weight_DF = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        if ctx.sequence_parallel:
            grad_BSD = _gather_sequence(grad_BSD, ctx.group)
        start = partial(_start_weight_gradient, None)
        if ctx.deferred.collecting and needs_weight:
            ctx.deferred.add(ctx.weight, start, grad_BSD, x_BSF)
            needs_weight = False
        grad_x = grad_BSD @ weight_DF if needs_x else None
        grad_weight = start(grad_BSD, x_BSF)() if needs_weight else None
        return grad_x, grad_weight, None, None, None


class _Lookup(torch.autograd.Function):
    """Rows of an embedding."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, rows_BS: Tensor, weight_VD: Tensor, deferred: DeferredGradients
    ) -> Tensor:
        ctx.weight, ctx.deferred = weight_VD, deferred
        ctx.save_for_backward(rows_BS)
        return F.embedding(rows_BS, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (rows_BS,) = ctx.saved_tensors
        start = partial(_start_lookup_gradient, ctx.weight.shape[0])
        if ctx.deferred.collecting:
            ctx.deferred.add(ctx.weight, start, grad_BSD, rows_BS)
            return None, None, None
        return None, start(grad_BSD, rows_BS)(), None


class _ReducePartial(torch.autograd.Function):
    """g alone: add the ranks' partial values."""

    @staticmethod
    def forward(ctx: Any, partial_BSD: Tensor, group: Group, sequence_parallel: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return _reduce(partial_BSD.clone(), group, sequence_parallel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gather_sequence(grad_BSD, ctx.group) if ctx.sequence_parallel else grad_BSD, None, None


def _gather_sequence(x_BSD: Tensor, group: Group) -> Tensor:
    parts, pending = all_gather_parts(x_BSD, group)
    pending.wait()
    return join_parts(parts, SEQUENCE_DIM)


def _reduce(partial_BSD: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    reduced, pending = _reduce_input_gradient(partial_BSD, group, sequence_parallel)
    pending.wait()
    return reduced


def _reduce_input_gradient(partial_BSD: Tensor, group: Group, sequence_parallel: bool) -> tuple[Tensor, Pending]:
    if sequence_parallel:
        return reduce_scatter_dim(partial_BSD, SEQUENCE_DIM, group)
    return partial_BSD, group.all_reduce(partial_BSD)


def _start_weight_gradient(gathered_over: Group | None, grad: Tensor, x: Tensor) -> Product:
    """The gradient of a weight ``[outputs, inputs]``; begins to gather ``x`` where each rank has a part of it."""
    if gathered_over is None:
        return partial(_weight_gradient, grad, x)
    parts, gathered = all_gather_parts(x, gathered_over)

    def product() -> Tensor:
        gathered.wait()
        return _weight_gradient(grad, join_parts(parts, SEQUENCE_DIM))

    return product


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def _start_bias_gradient(grad: Tensor) -> Product:
    return lambda: grad.reshape(-1, grad.shape[-1]).sum(0)


def _start_lookup_gradient(num_rows: int, grad: Tensor, rows: Tensor) -> Product:
    return lambda: torch.ops.aten.embedding_dense_backward(grad, rows, num_rows, -1, False)


class ColumnLinear(nn.Module):
    """A linear layer that holds, and returns, this rank's outputs: ``[B, S, D] -> [B, S, F]``."""

    def __init__(
        self, linear: nn.Linear, group: Group, sequence_parallel: bool, deferred: DeferredGradients | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.group, self.sequence_parallel = group, sequence_parallel
        self.deferred = deferred or DeferredGradients()

    def forward(self, x_BSD: Tensor) -> Tensor:
        """This rank's outputs over the whole sequence."""
        layer = self.group, self.sequence_parallel, self.deferred
        return _apply(_ColumnLinear, x_BSD, self.weight, self.bias, *layer)


class RowLinear(nn.Module):
    """A linear layer that holds this rank's inputs: ``[B, S, F] -> [B, S, D]``, the sum over all ranks."""

    def __init__(
        self, linear: nn.Linear, group: Group, sequence_parallel: bool, deferred: DeferredGradients | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.group, self.sequence_parallel = group, sequence_parallel
        self.deferred = deferred or DeferredGradients()

    def forward(self, x_BSF: Tensor) -> Tensor:
        """The sum over the ranks; the bias is added once, after it."""
        y_BSD = _apply(_RowLinear, x_BSF, self.weight, self.group, self.sequence_parallel, self.deferred)
        return y_BSD if self.bias is None else y_BSD + self.bias


class VocabEmbedding(nn.Module):
    """An embedding that holds the rows of some tokens: ids ``[B, S] -> [B, S, D]``."""

    def __init__(
        self,
        embedding: nn.Embedding,
        shard: Shard,
        group: Group,
        sequence_parallel: bool,
        deferred: DeferredGradients | None = None,
    ) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.vocab_size = embedding.num_embeddings
        self.shard, self.group, self.sequence_parallel = shard, group, sequence_parallel
        self.deferred = deferred or DeferredGradients()

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Each rank looks up the tokens that it holds and gives zeros for the others; the sum is the embedding."""
        check_ids(ids_BS, self.vocab_size)
        start, length = first_row(self.shard), num_rows(self.shard)
        elsewhere_BS = (ids_BS < start) | (ids_BS >= start + length)
        rows_BS = (ids_BS - start).masked_fill(elsewhere_BS, 0)
        found_BSD = _apply(_Lookup, rows_BS, self.weight, self.deferred)
        partial_BSD = found_BSD.masked_fill(elsewhere_BS.unsqueeze(-1), 0.0)
        return _apply(_ReducePartial, partial_BSD, self.group, self.sequence_parallel)


class SequenceSlice(nn.Module):
    """A replicated embedding of positions ``[S]`` or ids ``[B, S]`` that gives this rank's part of the sequence."""

    def __init__(self, embedding: nn.Embedding, group: Group) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.group = group

    def forward(self, positions_S: Tensor) -> Tensor:
        """The rows of this rank's positions."""
        return F.embedding(positions_S.chunk(self.group.size, dim=-1)[self.group.index], self.weight)


def _apply(function: type[torch.autograd.Function], *args: object) -> Tensor:
    return function.apply(*args)  # type: ignore[no-any-return]


def first_row(shard: Shard) -> int:
    """The global index of the first row that a vocabulary shard holds."""
    return shard.slices[0].global_start if shard.slices else 0


def num_rows(shard: Shard) -> int:
    """How many rows of a vocabulary shard are real; the rest is padding."""
    return sum(piece.length for piece in shard.slices)


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary, which a sharded lookup would silently take for another rank's.

    Only on the CPU: reading the maximum on CUDA would stop the host in every step.
    """
    if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"token ids run from {int(ids.min())} to {int(ids.max())}; the vocabulary has {vocab_size}")
