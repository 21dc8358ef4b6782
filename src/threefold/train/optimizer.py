"""The optimizer of a job over the tensors that this rank keeps: one flat tensor for each bucket, or its shard.

AdamW and SGD treat every element alike, so they can work on flat tensors that know nothing of parameters. What depends
on the parameter, whether its weights decay, is applied here, to the slices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from threefold.job.spec import Optimizer
from threefold.parallel.data import DataParallel
from threefold.parallel.one_bit import OneBit
from threefold.train.one_bit_adam import OneBitAdam


class ShardedOptimizer:
    """AdamW (Loshchilov & Hutter 2019), SGD or 1-bit Adam, as the job says, over the masters of ``data``.

    Weight decay pulls matrices and embeddings towards zero; biases and norm weights, which have one dimension, keep
    their scale. The rule looks at the global shape, so all copies and shards of a parameter are treated alike.
    """

    def __init__(self, settings: Optimizer, data: DataParallel) -> None:
        self.settings, self.data = settings, data
        params = settings.params
        masters = [{"params": data.masters}]
        self.decoupled = settings.type != "SGD"
        self.inner: torch.optim.Optimizer = (
            torch.optim.AdamW(masters, lr=params.lr, betas=params.betas, eps=params.eps, weight_decay=0.0, fused=True)
            if self.decoupled
            else torch.optim.SGD(masters, lr=params.lr, momentum=params.momentum, foreach=True)
        )
        self._counted_bytes = 0
        self.one_bit: OneBitAdam | None = None
        if settings.type == "OneBitAdam" and isinstance(data.compression, OneBit):
            self.one_bit = OneBitAdam(params, data, data.compression, self.inner)

    def step(self, learning_rate: float, factor: float = 1.0) -> None:
        """Update with the gradients times ``factor`` (of clipping and loss scale), and publish the new values."""
        self.data.hand_gradients(factor)
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        self._decay(learning_rate)
        if self.one_bit:
            self.one_bit.step(learning_rate)
        else:
            self.inner.step()
        self.data.publish()
        self._count()

    def _count(self) -> None:
        """State appears in the first step, and 1-bit Adam's errors when the variance is frozen."""
        states = (value for state in self.inner.state.values() for value in state.values())
        num_bytes = sum(value.untyped_storage().nbytes() for value in states if value.dim() > 0)
        added, self._counted_bytes = num_bytes - self._counted_bytes, num_bytes
        self.data.memory.add("optimizer", added, on_host=self.data.policy.offload_optimizer)

    def _decay(self, learning_rate: float) -> None:
        decay = self.settings.params.weight_decay
        if not decay:
            return
        values, gradients = self._decayed()
        if self.decoupled:
            torch._foreach_mul_(values, 1.0 - learning_rate * decay)  # pyright: ignore[reportPrivateImportUsage]
        else:
            torch._foreach_add_(gradients, values, alpha=decay)  # pyright: ignore[reportPrivateImportUsage]

    def _decayed(self) -> tuple[list[Tensor], list[Tensor]]:
        values, gradients = [], []
        for bucket in self.data.buckets:
            gradient = bucket.master.grad
            assert gradient is not None, "gradients were handed over before"
            for value, part in zip(bucket.pieces(bucket.master.data), bucket.pieces(gradient), strict=True):
                if len(value.entry.global_shape) >= 2:
                    values.append(value.values)
                    gradients.append(part.values)
        return values, gradients
