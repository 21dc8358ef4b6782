"""1-bit Adam (Tang et al. 2021): Adam whose variance is frozen after a warm-up, so that the rest of it is linear.

A frozen variance is a constant scale of each element, and the momentum, a linear sum over the replicas' gradients, can
be sent as signs with error feedback. It is sent in units of the frozen denominator: there all elements are of like
size, as one scale for a whole chunk wants it, and the sum is the very step to take.

Matrices are compressed. Vectors stay with Adam: they are few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from threefold.job.spec import OptimizerParams
from threefold.parallel.buckets import Bucket
from threefold.parallel.data import DataParallel
from threefold.parallel.one_bit import Errors, OneBit, exchange

SMALLEST_DENOMINATOR = 0.1
"""Of a parameter's own root mean square. An element without a gradient in the warm-up, like the embedding of a word not
yet seen, would have a denominator of nearly 0 for ever, and its first gradient would be a step of any size."""


class OneBitAdam:
    """Takes the compressed buckets over from ``inner``, an AdamW over all, once ``freeze_step`` updates are done.

    Their state stays in ``inner.state``: ``exp_avg`` in units of ``denominator``, and the two errors.
    """

    def __init__(
        self, params: OptimizerParams, data: DataParallel, one_bit: OneBit, inner: torch.optim.Optimizer
    ) -> None:
        self.params, self.data, self.one_bit, self.inner = params, data, one_bit, inner
        self.updates = 0

    def step(self, learning_rate: float) -> None:
        """Update everything; gradients of compressed buckets are local once the variance is frozen."""
        if self.one_bit.frozen:
            for bucket in self.one_bit.buckets:
                self._update(bucket, learning_rate)
                bucket.master.grad = None  # inner leaves it alone then
        self.inner.step()
        self.updates += 1
        if self.updates == self.one_bit.freeze_step:
            for bucket in self.one_bit.buckets:
                self._freeze(bucket)
            self.one_bit.frozen = True

    def _freeze(self, bucket: Bucket) -> None:
        state, (_, beta2) = self.inner.state[bucket.master], self.params.betas
        variance: Tensor = state.pop("exp_avg_sq")
        denominator = variance.div_(1.0 - beta2**self.updates).sqrt_().add_(self.params.eps)
        for piece in bucket.pieces(denominator):
            values = piece.values
            values.clamp_(min=SMALLEST_DENOMINATOR * float(values.square().mean().sqrt()))
        state["denominator"] = denominator
        state["exp_avg"].div_(denominator)
        errors = Errors.zeros(denominator.numel(), bucket.group, denominator)
        state["worker_error"], state["server_error"] = errors.worker, errors.server

    def _update(self, bucket: Bucket, learning_rate: float) -> None:
        state, (beta1, _) = self.inner.state[bucket.master], self.params.betas
        gradient, momentum = bucket.master.grad, state["exp_avg"]
        assert gradient is not None, "gradients were handed over before"
        # The old momentum is the same on all ranks: each adds its share, and the sum has the whole.
        own = momentum.mul_(beta1 / bucket.group.size).add_(gradient / state["denominator"], alpha=1.0 - beta1)
        momentum.copy_(exchange(own, Errors(state["worker_error"], state["server_error"]), bucket.group))
        state["step"] += 1
        bias = 1.0 - beta1 ** float(state["step"])
        bucket.master.data.add_(momentum, alpha=-learning_rate / bias)
